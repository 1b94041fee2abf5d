"""Answers that are kept while they are made: whatever stops `regard distil`, it goes on behind them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.data.strict_json import JsonError, read_value
from regard.training import atomic_files
from regard.training.atomic_files import RunError


class Partial:
    """A file of JSON lines beside the one to be written, `OUT.partial`: first what it is of, then some answers a line.

    A line is on the disk before the next answers are made. What a dying process left of a last one is cut off.
    """

    def __init__(self, out: Path, of: Mapping[str, Any]) -> None:
        self.out, self.path = out, out.with_name(out.name + ".partial")
        self.answers: list[str] = []
        lines = self._lines()
        if lines and read_value(lines[0]) != of:
            other = "another run, other settings or other data"
            raise RunError(f"{self.path} holds answers of {other}: delete it, or choose another --out")
        for line in lines[1:]:
            self.answers += self._checked(line)
        whole = "".join(line + "\n" for line in lines) or json.dumps(of) + "\n"
        atomic_files.replace(self.path, whole)

    def _lines(self) -> list[str]:
        """All whole lines."""
        if not self.path.exists():
            return []
        *whole, _torn = atomic_files.read_bytes(self.path, "delete it").split(b"\n")
        try:
            texts = [line.decode() for line in whole]
            if texts:
                read_value(texts[0])
        except ValueError:
            raise self._changed() from None
        return texts

    def _checked(self, line: str) -> list[str]:
        try:
            found = read_value(line)
        except JsonError:
            raise self._changed() from None
        if not isinstance(found, list) or not all(isinstance(answer, str) for answer in found):
            raise self._changed()
        return found

    def _changed(self) -> RunError:
        return RunError(f"{self.path} is not as it was written: delete it, and all answers are made anew")

    def add(self, answers: Sequence[str]) -> None:
        """Keep these answers, each as one line of text."""
        plain = [" ".join(answer.splitlines()) for answer in answers]
        try:
            with open(self.path, "ab") as file:
                file.write((json.dumps(plain, ensure_ascii=False) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(atomic_files.cannot_write(self.path, error)) from error
        self.answers += plain

    def finish(self) -> None:
        """Write the whole file, and forget this one."""
        atomic_files.replace(self.out, "".join(answer + "\n" for answer in self.answers))
        self.path.unlink(missing_ok=True)
