"""Files of a download: of a folder, of a zip file or of a tar file, found by their paths. Imports no torch."""

from __future__ import annotations

import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from regard.data.text_files import DataError, why_no_archive

SEVEN_ZIP = b"7z\xbc\xaf\x27\x1c"  # the first bytes of an archive of 7-Zip
_TAR_BLOCK = 512  # bytes; a tar file ends with two blocks of zeros
_TAR_SIGN = slice(257, 262), b"ustar"


def source_files(source: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    """Iterate over the files of a folder, a zip file or a tar file whose paths have a match: the path and the bytes of each.

    Paths are as in an archive, with the name of the folder in front. Those of a folder are sorted.
    """
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source.parent).as_posix()
            if wanted.search(name) and path.is_file():
                yield name, path.read_bytes()
        return
    if not source.is_file():
        raise DataError(f"there is no file or folder {source}")
    start = _first_block(source)
    if start.startswith(SEVEN_ZIP):
        raise DataError(
            f"{source} is an archive of 7-Zip, which is not read here: unpack it (7z x '{source}'), and give the folder"
        )
    yield from (_zipped if zipfile.is_zipfile(source) else _tarred)(source, wanted)


def _first_block(source: Path) -> bytes:
    with source.open("rb") as stream:
        return stream.read(_TAR_BLOCK)


def _zipped(source: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(source) as archive:
            for member in archive.infolist():
                if not member.is_dir() and wanted.search(member.filename):
                    yield member.filename, archive.read(member)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise DataError(f"{source} is not a whole .zip file: {error}") from None
    except (NotImplementedError, RuntimeError) as error:  # another compression, a password
        raise DataError(f"{source} cannot be unpacked: {error}") from None


def _tarred(source: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    if _without_end(source):
        raise DataError(f"{source} is not a whole .tar file: it is cut off")
    try:
        with tarfile.open(source) as archive:
            for member in archive:
                if member.isfile() and wanted.search(member.name) and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{source} is not a whole .tar, .tar.gz or .zip file: {why_no_archive(error)}") from None


def _without_end(source: Path) -> bool:
    """Return whether a plain tar file ends without the block of zeros behind its files: tarfile reads on until there."""
    place, sign = _TAR_SIGN
    if _first_block(source)[place] != sign:
        return False
    with source.open("rb") as stream:
        stream.seek(-min(_TAR_BLOCK, source.stat().st_size), 2)
        return any(stream.read())


def utf8_text(raw: bytes, where: str) -> str:
    """Decode UTF-8; `where` is the place that an error mentions."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start + 1}") from None
