"""SIGINT (Control-C) and SIGTERM (`kill`) while a run trains: it is saved first, and stops then."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FIRST_MESSAGE = b"\nstopping behind this update, which is saved; once more stops at once and loses what is not saved\n"


class Interrupted(BaseException):
    """Raised where training can stop at once and still save what it has."""


class Interrupts:
    """A signal is noted, and acted on where nothing is lost by it.

    During an update the first one is noted: `requested` is True, and the loop of updates saves and stops. A second one is passed
    on at once. While a checkpoint is written all of them are only noted, so that none is half-written. Inside `at_once()`, around
    a validation that may take minutes, the first one raises Interrupted.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.received: int | None = None  # the first signal
        self.writing = self.waiting = False
        self.previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.received is not None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python sets no handlers
            found = {number: signal.getsignal(number) for number in SIGNALS}
            self.previous = {number: handler for number, handler in found.items() if handler not in (None, signal.SIG_IGN)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals, unless they are ignored: a job of a shell's background ignores Control-C."""
        for number in self.previous:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = self.requested
        if not again:
            self.received = number
        if self.writing:
            return
        if self.waiting and not again:
            raise Interrupted
        if again:
            self.pass_on(frame)
        if not self.quiet:
            with suppress(OSError):
                os.write(2, FIRST_MESSAGE)  # a handler may run inside of a write to any stream of Python's

    def pass_on(self, frame: FrameType | None = None) -> NoReturn:
        """What the signal would have done without all this."""
        assert self.received is not None
        handler = self.previous.get(self.received)
        if callable(handler):
            handler(self.received, frame)
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """While a checkpoint is written."""
        self.writing = True
        try:
            yield
        finally:
            self.writing = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While nothing is changed that a checkpoint needs."""
        self.waiting = True
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self.waiting = False
