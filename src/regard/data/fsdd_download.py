"""The Free Spoken Digit Dataset as its repository has it, a folder of wav files, packed into one tar file."""

from __future__ import annotations

import re
from pathlib import Path

from regard.data.prepared_files import PreparedFile, tar_of
from regard.data.source_files import source_files
from regard.data.speech_sets import FSDD_NAME
from regard.data.text_files import DataError
from regard.data.wav_files import parse_wav

_RECORDING = re.compile(r"(?:^|/)recordings/([^/.][^/]*\.wav)$")


def fsdd_tar(source: Path) -> dict[str, PreparedFile]:
    """Read recordings/*.wav of a clone or an archive, or the folder recordings; every file is checked."""
    found: dict[str, bytes] = {}
    for path, raw in source_files(source, _RECORDING):
        name = path.rpartition("/")[2]
        where = f"{source}, {path}"
        if FSDD_NAME.fullmatch(name) is None:
            raise DataError(f"{where} is not called digit_speaker_index.wav")
        if name in found:
            raise DataError(f"{where} is there twice, in two folders called recordings")
        parse_wav(raw, where)
        found[name] = raw
    if not found:
        raise DataError(f"{source} has no recordings: files such as recordings/0_george_0.wav are needed")
    files = [(f"recordings/{name}", found[name]) for name in sorted(found)]
    speakers = {name.split("_")[1] for name in found}
    return {"fsdd_recordings.tar": tar_of(files, f"{len(found):,} recordings of {len(speakers)} speakers")}
