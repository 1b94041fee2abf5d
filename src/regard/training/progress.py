"""Progress of a run with the time left: a bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

try:
    from rich.console import Console
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"progress needs {error.name}: pip install 'regard[train]'", name=error.name) from None

LINE_SECONDS = 10.0  # seconds between two plain lines
REDRAW = 0.2  # seconds between two updates of a bar


class Progress:
    """Track progress without output: the base of both kinds."""

    def __init__(self, total: int, done: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.clock = total, clock
        self.first: float = done
        self.done: float = done
        self.begun, self.shown = clock(), -1e9
        self.loss: float | None = None
        self.score: str = ""

    def step(self, done: float) -> None:
        """Record an update: cheap, and without synchronisation with the device."""
        self.done = done
        now = self.clock()
        if now - self.shown >= self.wait:
            self.shown = now
            self.show()

    def measured(self, loss: float) -> None:
        self.loss = loss

    def validated(self, name: str, score: float, best: float | None) -> None:
        suffix = "" if best is None or best == score else f" (best {best:.4g})"
        self.score = f"val {name} {score:.4g}{suffix}"

    def note(self, text: str) -> None:
        """Print a permanent line."""

    def close(self) -> None:
        """End the display, after success or failure."""

    wait = float("inf")
    unit = "step"

    def show(self) -> None:
        """Print the current line or draw the current bar."""

    def left(self) -> float:
        """Estimate the seconds left from the mean speed since the start."""
        made = self.done - self.first
        if made <= 0:
            return float("nan")
        return (self.clock() - self.begun) / made * (self.total - self.done)

    def text(self) -> str:
        parts = [f"{self.unit} {int(self.done)}/{self.total}"]
        parts += [f"train loss {self.loss:.4g}"] if self.loss is not None else []
        parts += [self.score] if self.score else []
        return "  ".join([*parts, f"{span(self.left())} left"])


class Lines(Progress):
    """Print lines, for a file or a pipe."""

    wait = LINE_SECONDS

    def __init__(self, total: int, done: int = 0, *, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(total, done, clock=clock)
        self.console, self.shown = console, clock()

    def show(self) -> None:
        self.note(self.text())

    def validated(self, name: str, score: float, best: float | None) -> None:
        super().validated(name, score, best)
        self.shown = self.clock()
        self.show()

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


class Bar(Lines):
    """Draw a bar, for a terminal."""

    wait = REDRAW

    def __init__(self, total: int, done: int = 0, *, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Drawn

        super().__init__(total, done, console=console, clock=clock)
        self.drawn = Drawn(BarColumn(), TextColumn("{task.description}", markup=False), console=console, auto_refresh=False)
        self.bar = self.drawn.add_task("", total=total, completed=done)
        self.drawn.start()

    def show(self) -> None:
        self.drawn.update(self.bar, completed=self.done, description=self.text(), refresh=True)

    def close(self) -> None:
        self.show()
        self.drawn.stop()


def progress(total: int, done: int = 0, *, quiet: bool = False, console: Console | None = None) -> Progress:
    """Choose the kind of progress that fits the console."""
    if quiet:
        return Progress(total, done)
    console = console or Console(emoji=False)
    return (Bar if console.is_terminal else Lines)(total, done, console=console)


def print_line(text: str) -> None:
    """Print one line on stdout."""
    Lines(0, console=Console(emoji=False)).note(text)


def span(seconds: float) -> str:
    """Format a duration: 3 s, 2:05, 1:02:03."""
    if seconds != seconds or seconds == float("inf"):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
