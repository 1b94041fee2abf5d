"""Games of Go as files in SGF, such as those of go-dataset, converted to a game a line. Imports no torch."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from pathlib import Path, PurePosixPath

from regard.data.go_games import GO_COLUMNS, point_of, sgf_properties
from regard.data.prepared_files import PreparedFile, text_lines
from regard.data.source_files import source_files
from regard.data.text_files import DataError

GO_SIDE, FEWEST_MOVES = 19, 30
HELD_GAMES, GAMES_PER_HELD = 500, 7  # in val and in test: at most, and of how many games one
_SGF_FILE = re.compile(r"(?:^|/)[^/.][^/]*\.sgf$", re.IGNORECASE)
_SEVEN_ZIP_FILE = re.compile(r"\.7z(?:\.\d+)?$")
_ABOUT = dict(zip(("DT", "BR", "WR", "KM", "RE"), GO_COLUMNS[1:-1], strict=True))


class _LeftOutError(ValueError):
    """Report why a game is left out, in few words."""


def go_lines(source: Path) -> dict[str, PreparedFile]:
    """Read the games on 19 x 19 points without handicap in a folder or an archive, and split them by a hash of their moves.

    A game ends before its first pass. Those with fewer than 30 moves, of players who do not take turns, or with the moves of
    one before, are left out and counted in a warning.
    """
    games: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for name, raw in source_files(source, _SGF_FILE):
        try:
            line = _game_line(PurePosixPath(name).stem, raw.decode(errors="replace"))
        except _LeftOutError as error:
            left_out[str(error)] += 1
            continue
        moves = line.rpartition("\t")[2]
        left_out["twice there"] += moves in games
        games.setdefault(moves, line)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common() if count)
    held = min(HELD_GAMES, len(games) // GAMES_PER_HELD)
    if not held:
        found = f"{len(games)} games that can be taken{f' ({reasons} are left out)' if reasons else ''}"
        raise DataError(f"{source} has {found}, but {GAMES_PER_HELD} .sgf files are needed{_packed(source)}")
    if reasons:
        warnings.warn(f"{left_out.total():,} of {left_out.total() + len(games):,} games are left out: {reasons}", stacklevel=2)
    ordered = [games[moves] for moves in sorted(games, key=lambda moves: hashlib.sha256(moves.encode()).digest())]
    parts = {"train": ordered[2 * held :], "val": ordered[held : 2 * held], "test": ordered[:held]}
    head = "\t".join(GO_COLUMNS)
    return {f"{part}.tsv": text_lines([head, *lines], f"{len(lines):,} games") for part, lines in parts.items()}


def _packed(source: Path) -> str:
    """Return what to do with archives of 7-Zip in a folder."""
    found = next((path for path in source.rglob("*") if _SEVEN_ZIP_FILE.search(path.name)), None) if source.is_dir() else None
    return f": unpack its archives first, by 7z x '{found}'" if found else ""


def _game_line(name: str, text: str) -> str:
    """Read a game and write its columns."""
    about = dict.fromkeys(_ABOUT.values(), "")
    moves: list[str] = []
    passed = False
    try:
        for key, value in sgf_properties(text):
            if (key == "SZ" and value != str(GO_SIDE)) or (key == "GM" and value != "1"):
                raise _LeftOutError("of another size or game")
            if key in ("AB", "AW", "AE") or (key == "HA" and value not in ("", "0")):
                raise _LeftOutError("with handicap")
            if key in _ABOUT:
                about[_ABOUT[key]] = " ".join(value.split())
            elif key in ("B", "W") and not passed:
                if key != "BW"[len(moves) % 2]:
                    raise _LeftOutError("in which the players do not take turns")
                passed = point_of(value, GO_SIDE) is None
                moves += [] if passed else [value]
    except _LeftOutError:
        raise
    except ValueError:
        raise _LeftOutError("damaged") from None
    if len(moves) < FEWEST_MOVES:
        raise _LeftOutError(f"of fewer than {FEWEST_MOVES} moves")
    return "\t".join((name, *about.values(), "".join(moves)))
