"""Defects for `mutants.py`: tasks of the arena and what compares mechanisms on them. Each names the tests that must notice it."""

from __future__ import annotations

R = "src/regard/"

ARENA: dict[str, tuple[str, str, str, str]] = {}
