"""The command `regard`: Control-C while torch is being imported is a sentence too. Imports nothing before it has to."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Import the command line, then run it."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, _leave)
    from regard.cli import main as command

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler takes both
    """At once: nothing has been begun."""
    if sys.stderr is not None:
        os.write(sys.stderr.fileno(), b"stopped by Control-C while starting\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
