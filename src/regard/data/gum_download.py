"""GUM as its repository has it, trees in const/*.ptb and a list of splits, converted to a tree a line. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from regard.data.prepared_files import PreparedFile, text_lines
from regard.data.source_files import source_files, utf8_text
from regard.data.text_files import DataError
from regard.data.treebank import parse_tree, write_tree

GUM_PARTS = ("train", "dev", "test")
WITHHELD = "GUM_reddit_"  # documents whose words are underscores in the repository
_FILES = re.compile(r"^(?:[^/]+/)?(?:const/(?P<document>[^/]+)\.ptb|splits\.md)$")  # not those of _build
_HEADING = re.compile(r"#+\s*(\S+)\s*$")
_DOCUMENT = re.compile(r"\s*[*-]\s+(\S+)\s*$")


def gum_trees(source: Path) -> dict[str, PreparedFile]:
    """Read const/*.ptb and splits.md of a clone or an archive; test2 and documents of reddit are left out."""
    splits, found = "", dict[str, bytes]()
    for name, raw in source_files(source, _FILES):
        parts = _FILES.search(name)
        if parts is not None and parts["document"]:
            found[parts["document"]] = raw
        else:
            splits = utf8_text(raw, f"{source}, {name}")
    if not found:
        raise DataError(f"{source} has no trees: files such as const/GUM_academic_art.ptb are needed")
    if not splits:
        raise DataError(f"{source} has no splits.md, which lists the documents of train, dev and test")
    listed = _documents(splits, f"{source}, splits.md")
    made: dict[str, PreparedFile] = {}
    for part in GUM_PARTS:
        if missing := [name for name in listed[part] if name not in found]:
            raise DataError(f"{source} has no const/{missing[0]}.ptb, which splits.md lists under {part}")
        lines = [
            f"{name}\t{tree}"
            for name in listed[part]
            for tree in _trees_of(utf8_text(found[name], f"{source}, {name}.ptb"), f"{source}, {name}.ptb")
        ]
        made[f"{part}.tsv"] = text_lines(lines, f"{len(lines):,} trees of {len(listed[part]):,} documents")
    return made


def _documents(text: str, where: str) -> dict[str, list[str]]:
    """Read the documents under the headings of the splits, without those of reddit, in the order of their names."""
    listed: dict[str, list[str]] = {}
    part = ""
    for line in text.split("\n"):
        if (heading := _HEADING.match(line)) is not None:
            part = heading[1]
        elif (document := _DOCUMENT.match(line)) is not None and not document[1].startswith(WITHHELD):
            listed.setdefault(part, []).append(document[1])
    for part in GUM_PARTS:
        if not listed.get(part):
            raise DataError(f"{where} lists no documents under the heading {part}")
    names = [name for part in GUM_PARTS for name in listed[part]]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{where} lists {twice} twice")
    return {part: sorted(listed[part]) for part in GUM_PARTS}


def _trees_of(text: str, where: str) -> Iterator[str]:
    """Iterate over the trees of a document, each as one line; a tree ends where all of its brackets are closed."""
    depth = first = 0
    lines: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        first = first if lines else number
        lines.append(line)
        depth += line.count("(") - line.count(")")
        if depth <= 0:
            try:
                yield write_tree(parse_tree(" ".join(lines)))
            except ValueError as error:
                raise DataError(f"{where}, line {first}: not a tree in Penn brackets: {error}") from None
            lines, depth = [], 0
    if lines:
        raise DataError(f"{where}, line {first}: this tree is cut off, {depth} brackets are not closed")
