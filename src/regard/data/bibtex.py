"""BibTeX as the ACL Anthology writes it: entries with fields in quotes or braces, and their LaTeX as plain text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from regard.data.text_files import DataError, read_text

_ENTRY = re.compile(r"^@(\w+)\s*\{\s*([^,\s]*)\s*,", re.MULTILINE)
_FIELD = re.compile(r"[\s,]*([\w-]+)\s*=\s*")
_BARE = re.compile(r"[\w.:/-]+")
_SIGN = re.compile(r'\\.|[{}"]', re.DOTALL)
_ACCENTS = {
    "`": "\u0300",
    "'": "\u0301",
    "^": "\u0302",
    "~": "\u0303",
    "=": "\u0304",
    "u": "\u0306",
    ".": "\u0307",
    '"': "\u0308",
    "r": "\u030a",
    "H": "\u030b",
    "v": "\u030c",
    "d": "\u0323",
    "c": "\u0327",
    "k": "\u0328",
}
_LETTERS = {
    **{"ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "aa": "å", "AA": "Å", "o": "ø", "O": "Ø", "l": "ł", "L": "Ł"},
    **{"i": "\u0131", "j": "\u0237", "dh": "ð", "DH": "Ð", "th": "þ", "TH": "Þ", "dj": "đ", "DJ": "Đ"},
    **{
        "textasciitilde": "~",
        "textasciicircum": "^",
        "textbackslash": "\\",
        "textquoteright": "\u2019",
        "textquoteleft": "\u2018",
    },
}
_DOTTED = {"\u0131": "i", "\u0237": "j"}  # under an accent
_BY_SIGN = re.compile(r"""\\([`'^~=."])\s*(?:\{\s*(\\[ij]|\w)\s*\}|(\\[ij](?![a-zA-Z])|\w))""")
_BY_LETTER = re.compile(r"\\([urHvdck])(?:\s*\{\s*(\\[ij]|\w)\s*\}|\s+(\w))")
_LETTER = re.compile(rf"\\({'|'.join(sorted(_LETTERS, key=len, reverse=True))})(?![a-zA-Z])(?:\{{\}}|\s+(?=\w))?")
_COMMAND = re.compile(r"\\(?:text\w*|emph|url|href|mbox|ensuremath)\s*(?=\{)")


def bib_entries(path: Path) -> Iterator[dict[str, str]]:
    """Iterate over the entries of a BibTeX file, each a dict of its fields in plain text and its key as "key".

    Field names are lower-case. A value in quotes may hold quotes inside of braces.
    """
    whole = read_text(path)
    for found in _ENTRY.finditer(whole):
        if found[1].lower() in ("comment", "preamble", "string"):
            continue
        entry, at = {"key": found[2]}, found.end()
        while (field := _FIELD.match(whole, at)) is not None:
            value, at = _value(whole, field.end(), path, found[2])
            entry[field[1].lower()] = plain_text(value)
        yield entry


def _value(whole: str, at: int, path: Path, key: str) -> tuple[str, int]:
    """Return the value that begins at a place, without its quotes or braces, and where it ends."""
    opened = whole[at : at + 1]
    if opened not in ('"', "{"):
        bare = _BARE.match(whole, at)
        if bare is None:
            raise DataError(f"{path}, entry {key}: a field has no value")
        return bare[0], bare.end()
    depth = 0
    for sign in _SIGN.finditer(whole, at + 1):
        if not depth and sign[0] == ('"' if opened == '"' else "}"):
            return whole[at + 1 : sign.start()], sign.end()
        depth += (sign[0] == "{") - (sign[0] == "}")
    raise DataError(f"{path}, entry {key}: a field does not end: its {'quote' if opened == chr(34) else 'brace'} is never closed")


def plain_text(text: str) -> str:
    """Convert LaTeX to plain text: accents, letters, dashes, quotes and escapes; a command that is not listed stays.

    Braces and commands of fonts are dropped, runs of white space become one space.
    """
    text = _BY_SIGN.sub(_accented, text)
    text = _BY_LETTER.sub(_accented, text)
    text = re.sub(r"(?<!\\)~", " ", text)
    text = _LETTER.sub(lambda found: _LETTERS[found[1]], text)
    text = _COMMAND.sub("", text)
    text = text.replace("---", "—").replace("--", "\u2013").replace("``", "“").replace("''", "”")
    text = re.sub(r"(?<!\\)[{}]", "", text)
    text = re.sub(r"\\([&%$#_{}~])", r"\1", text)
    return " ".join(text.split())


def _accented(found: re.Match[str]) -> str:
    letter = (found[2] or found[3]).removeprefix("\\")
    return unicodedata.normalize("NFC", _DOTTED.get(letter, letter) + _ACCENTS[found[1]])
