"""Strict JSON: every error has a line and a column, also those that Python's own reader raises without one."""

from __future__ import annotations

import json
import re
from typing import Any

_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)  # strings, which may hold brackets, and brackets


class JsonError(ValueError):
    """Report text that is not JSON or cannot be read; `msg` is the reason, `line` and `column` are counted from 1."""

    def __init__(self, msg: str, line: int, column: int) -> None:
        super().__init__(f"{msg} at line {line}, character {column}")
        self.msg, self.line, self.column = msg, line, column


def read_value(text: str | bytes) -> Any:
    """Return the value of a JSON text. Too many digits in an integer and too deep nesting are JsonErrors too."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text)
    except UnicodeDecodeError as error:
        assert isinstance(text, bytes)
        start = text.rfind(b"\n", 0, error.start) + 1
        line = text.count(b"\n", 0, error.start) + 1
        raise JsonError("not UTF-8", line, error.start - start + 1) from None
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise _error("nested too deeply", str(text), _deepest(str(text))) from None
    except ValueError as error:
        digits = _unreadable(str(text))
        if not digits:
            raise JsonError(str(error), 1, 1) from None
        raise _error(f"an integer of {len(digits.lstrip('-')):,} digits", str(text), str(text).find(digits)) from None


def _error(msg: str, text: str, at: int) -> JsonError:
    line = text.count("\n", 0, at) + 1
    return JsonError(msg, line, at - text.rfind("\n", 0, at))


def _deepest(text: str) -> int:
    """Return the index of the bracket with the deepest nesting."""
    depth = most = place = 0
    for part in _PARTS.finditer(text):
        depth += (part[0] in "[{") - (part[0] in "]}")
        if depth > most:
            most, place = depth, part.start()
    return place


def _unreadable(text: str) -> str:
    """Return the first integer that Python refuses to convert."""
    found: list[str] = []

    def convert(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:
            found.append(digits)
            raise

    try:
        json.loads(text, parse_int=convert)
    except ValueError:
        return found[0] if found else ""
    return ""
