"""The command `regard`: Control-C during the imports ends with a message too. Only the standard library is imported before."""

import os
import signal
import sys
from types import FrameType

NEEDS_CLI = "the command regard needs {}: pip install 'regard[cli]', or 'regard[train]' to train as well\n"


def main() -> None:
    """Import the command line, then run it."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, _leave)
    try:
        from regard.cli import main as command
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(NEEDS_CLI.format(error.name))
        sys.exit(2)
    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler takes both
    """Exit at once: nothing has been begun."""
    if sys.stderr is not None:
        os.write(sys.stderr.fileno(), b"stopped by Control-C while starting\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
