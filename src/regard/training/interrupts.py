"""Handle SIGINT (Control-C) and SIGTERM (`kill`) during training: save a checkpoint, then stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FIRST_MESSAGE = b"\nstopping after this update, which is saved; a second signal stops at once, without saving\n"


class Interrupted(BaseException):
    """Stop training at a point where the state can still be saved."""


class Interrupts:
    """Record signals, and act on them where no progress is lost.

    During an update the first signal is recorded: `requested` is True, and the training loop saves and stops. A second one is passed
    on at once. While a checkpoint is written all signals are only recorded. Inside `at_once()`, around a validation that may take
    minutes, the first one raises Interrupted.
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
            ignored = (None, signal.SIG_IGN)
            self.previous = {number: handler for number, handler in found.items() if handler not in ignored}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Install the handlers, except for ignored signals: a background job of a shell ignores Control-C."""
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
                os.write(2, FIRST_MESSAGE)  # a handler may interrupt a write to any of Python's streams

    def pass_on(self, frame: FrameType | None = None) -> NoReturn:
        """Call the previous handler of the signal."""
        assert self.received is not None
        handler = self.previous.get(self.received)
        if callable(handler):
            handler(self.received, frame)
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Only record signals inside, while a checkpoint is written."""
        self.writing = True
        try:
            yield
        finally:
            self.writing = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise Interrupted on a signal inside, where no state of a checkpoint is changed."""
        self.waiting = True
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self.waiting = False
