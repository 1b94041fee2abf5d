"""Files that `regard prepare` writes: each is written under another name, and all are renamed at the end. Imports no torch."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

PARTIAL = ".part"  # behind the name of a file that is being written


class PreparedFile(NamedTuple):
    """Describe the content of a file, and write it."""

    amount: str  # what is in it, such as "25,000 lines"
    write: Callable[[IO[bytes]], object]


def json_lines(records: Sequence[Mapping[str, Any]]) -> PreparedFile:
    """Write records as JSON, one a line."""
    return text_lines([json.dumps(record, ensure_ascii=False) for record in records])


def text_lines(lines: Sequence[str], count: str = "") -> PreparedFile:
    """Write lines as UTF-8."""
    return PreparedFile(
        count or f"{len(lines):,} lines", lambda stream: stream.writelines(f"{line}\n".encode() for line in lines)
    )


def one_array(array: np.ndarray, count: str) -> PreparedFile:
    """Write an array as .npy."""
    import numpy as np

    return PreparedFile(count, lambda stream: np.save(stream, array, allow_pickle=False))


def named_arrays(arrays: dict[str, Any], count: str) -> PreparedFile:
    """Write arrays as .npz, compressed."""
    import numpy as np

    return PreparedFile(count, lambda stream: np.savez_compressed(stream, **arrays))


def tar_of(files: Iterable[tuple[str, bytes]], count: str) -> PreparedFile:
    """Write files into a tar archive, without dates and owners: equal files make equal archives."""

    def write(stream: IO[bytes]) -> None:
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name, data in files:
                about = tarfile.TarInfo(name)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))

    return PreparedFile(count, write)


def write_prepared(folder: Path, files: Mapping[str, PreparedFile]) -> None:
    """Write new files into a folder, which is made; where one cannot be written, none is there."""
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    try:
        for name, prepared in files.items():
            made.append(folder / (name + PARTIAL))
            with made[-1].open("wb") as stream:
                prepared.write(stream)
        for name in files:
            made.append((folder / (name + PARTIAL)).replace(folder / name))
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
