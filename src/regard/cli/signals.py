"""Control-C and `kill`, in every command: a message and the exit code of the signal, never a traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from regard.cli.console import stop

_received: list[int] = []  # signals of this process


class Stoppable(TyperGroup):
    """Commands that a signal ends with a sentence, unless the command has one of its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except BaseException as error:
            if not _received and not isinstance(error, KeyboardInterrupt):
                raise
            number = _received[0] if _received else signal.SIGINT
            stop("stopped by Control-C" if number == signal.SIGINT else "stopped by SIGTERM", 128 + number)


def _raise(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - a handler takes both
    _received.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    """At once: the sentence has been written, and threads of libraries may still be waited for."""
    os._exit(128 + number)


def ignore_signals() -> None:
    """Ignore those signals that are handled here, from now on: the command is about to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _raise:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def handled_signals() -> Iterator[None]:
    """Take signals that do what Python does by itself: those that are ignored, or that have another handler, stay as they are."""
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    mine = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    for number in mine:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, _leave if _received else usual[number])
