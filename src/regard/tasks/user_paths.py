"""Paths that a user gives to a run. Imports no torch."""

from __future__ import annotations

import os


def absolute_path(path: str) -> str:
    """Make a path absolute, so that a run finds its file from every folder; "" stays as it is."""
    found = os.path.abspath(os.path.expanduser(path)) if path else ""
    try:
        found.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(found).decode(errors="backslashreplace")
        raise ValueError(f"{shown} is not UTF-8, and no run can keep such a path: give it another name") from None
    return found
