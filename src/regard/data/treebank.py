"""Constituency trees: Penn brackets to trees and back, trees to sequences of brackets and back, and the reader of GUM.

A sequence has a token for every step through a tree, left to right: `(NP` opens a constituent, a part-of-speech tag is for the
next word, `)` closes the constituent that was opened last. Vinyals et al. 2014, arXiv:1412.7449.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from regard.data.datasets import Splits
from regard.data.locate import file
from regard.data.text_files import DataError, read_lines

CLOSING = ")"
_PIECE = re.compile(r"[()]|[^\s()]+")
_SIGNS = {"(": "-LRB-", ")": "-RRB-"}  # a bracket that is a word


class Leaf(NamedTuple):
    """A leaf: a word and its part of speech."""

    tag: str
    word: str


class Tree(NamedTuple):
    """A constituent: its label and what it consists of, one child at least."""

    label: str
    children: tuple[Tree | Leaf, ...]


class Constituent(NamedTuple):
    """The words [start, end) of a sentence under a label."""

    label: str
    start: int
    end: int


def parse_tree(text: str) -> Tree:
    """Read a tree in Penn brackets, "(S (NP (PRP I)) (VP (VBP see)))"; raise ValueError if it is not one."""
    pieces = _PIECE.findall(text)
    open_nodes: list[tuple[str, list[Tree | Leaf]]] = []
    done: Tree | None = None
    place = 0
    while place < len(pieces):
        piece = pieces[place]
        if done is not None:
            raise ValueError(f"{piece!r} comes behind the end of the tree")
        if piece == "(":
            label, inner = (*pieces[place + 1 : place + 3], "", "")[:2]
            if label in ("", "(", ")"):
                raise ValueError("a bracket opens without a label behind it")
            if inner in ("(", ")", ""):
                open_nodes.append((label, []))
                place += 2
                continue
            if not open_nodes:
                raise ValueError(f"the word {inner!r} is in no constituent")
            if pieces[place + 3 : place + 4] != [")"]:
                raise ValueError(f"{label!r} has the word {inner!r} and more: a part of speech has one word")
            open_nodes[-1][1].append(Leaf(label, inner))
            place += 4
            continue
        if piece != ")" or not open_nodes:
            raise ValueError(f"{piece!r} is outside of all brackets")
        done = _closed(open_nodes)
        place += 1
    if done is None:
        raise ValueError(f"{len(open_nodes)} brackets are not closed" if open_nodes else "there is no bracket in it")
    return done


def _closed(open_nodes: list[tuple[str, list[Tree | Leaf]]]) -> Tree | None:
    """Close the innermost constituent; return the tree if it was the outermost."""
    label, children = open_nodes.pop()
    if not children:
        raise ValueError(f"the constituent {label} is empty")
    tree = Tree(label, tuple(children))
    if not open_nodes:
        return tree
    open_nodes[-1][1].append(tree)
    return None


def write_tree(tree: Tree) -> str:
    """Write a tree in Penn brackets on one line: the inverse of `parse_tree`."""
    words = iter(words_of_tree(tree))
    parts: list[str] = []
    for token in brackets(tree):
        if token == CLOSING:
            parts[-1] += CLOSING
        elif token[0] == "(":
            parts.append(token)
        else:
            parts.append(f"({token} {next(words).word})")
    return " ".join(parts)


def brackets(tree: Tree) -> list[str]:
    """Write a tree as a sequence: `(LABEL`, the tag of the next word, `)`. With its words it is the whole tree."""
    found: list[str] = []
    left: list[Tree | Leaf | None] = [tree]
    while left:
        node = left.pop()
        if node is None:
            found.append(CLOSING)
        elif isinstance(node, Leaf):
            found.append(node.tag)
        else:
            found.append(f"({node.label}")
            left += [None, *reversed(node.children)]
    return found


def tree_of(sequence: Sequence[str], words: Sequence[str]) -> Tree:
    """Build the tree of a sequence over words: the inverse of `brackets`. Raises ValueError if it is not well-formed."""
    open_nodes: list[tuple[str, list[Tree | Leaf]]] = []
    left, done = iter(words), None
    for token in sequence:
        if done is not None:
            raise ValueError(f"{token!r} comes behind the end of the tree")
        if token[0] == "(":
            open_nodes.append((token[1:], []))
        elif not open_nodes:
            raise ValueError(f"{token!r} is outside of all brackets")
        elif token == CLOSING:
            done = _closed(open_nodes)
        else:
            word = next(left, None)
            if word is None:
                raise ValueError(f"the sequence has more than the {len(words)} words of the sentence")
            open_nodes[-1][1].append(Leaf(token, word))
    if done is None or next(left, None) is not None:
        raise ValueError("the sequence ends before all words are in it and all brackets are closed")
    return done


def words_of_tree(tree: Tree) -> list[Leaf]:
    """Return the leaves of a tree, left to right."""
    return [node for node in _nodes(tree) if isinstance(node, Leaf)]


def _nodes(tree: Tree) -> Iterator[Tree | Leaf]:
    left: list[Tree | Leaf] = [tree]
    while left:
        node = left.pop()
        yield node
        if isinstance(node, Tree):
            left += reversed(node.children)


def constituents(tree: Tree) -> list[Constituent]:
    """List the constituents of a tree, each before those inside of it."""
    found: list[Constituent] = []
    open_ones: list[int] = []
    count = 0
    for token in brackets(tree):
        if token == CLOSING:
            place = open_ones.pop()
            found[place] = found[place]._replace(end=count)
        elif token[0] == "(":
            open_ones.append(len(found))
            found.append(Constituent(token[1:], count, count))
        else:
            count += 1
    return found


def plain_label(label: str) -> str:
    """Leave out the functions of a label: NP-SBJ is NP. A label that begins with a hyphen, as -LRB- does, stays."""
    return re.sub(r"(?<=.)[-=].*", "", label) if label[0] != "-" else label


def without_functions(tree: Tree) -> Tree:
    """Leave out the functions of all labels of constituents."""
    words = [leaf.word for leaf in words_of_tree(tree)]
    return tree_of([f"({plain_label(token[1:])}" if token[0] == "(" else token for token in brackets(tree)], words)


def right_branching(words: Sequence[Leaf], label: str, top: str = "ROOT") -> Tree:
    """Build the floor of parsing: every word opens a constituent of one label that reaches to the end of the sentence."""
    opened = [token for word in words[:-1] for token in (f"({label}", word.tag)]
    last = [f"({label}", words[-1].tag] if len(words) == 1 else [words[-1].tag]
    depth = max(1, len(words) - 1)
    return tree_of([f"({top}", *opened, *last, *[CLOSING] * (depth + 1)], [word.word for word in words])


def escaped_word(word: str) -> str:
    """Write a bracket that is a word as Penn treebanks do: -LRB- or -RRB-."""
    return _SIGNS.get(word, word)


def read_gum(folder: Path) -> Splits[list[Tree]]:
    """Read the constituency trees of GUM, 10,224 / 1,575 / 1,464 without its reddit part. Zeldes 2017."""
    return Splits(*(_trees(file(folder, f"{part}.tsv")) for part in ("train", "dev", "test")))


def _trees(path: Path) -> list[Tree]:
    found = []
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise DataError(f"{path}, line {number}: {len(columns)} columns instead of 2, a document and a tree")
        try:
            found.append(parse_tree(columns[1]))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not a tree in Penn brackets: {error}") from None
    if not found:
        raise DataError(f"{path} has no trees")
    return found
