"""Find the files of a data set on this machine, or raise an error with instructions to download them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from regard.data.text_files import COMPRESSED_SUFFIXES, DataError
from regard.text import unknown


class DatasetInfo(NamedTuple):
    """Describe a data set that has a reader."""

    title: str
    address: str  # of the download
    files: Sequence[str]  # each plain, or with .gz, .xz or .bz2 appended to its name
    note: str = ""  # on the format, where it differs from the download
    folder: str = ""  # where its files are, if that is not its name
    instead: str = ""  # a data set of the same content, which is read where only that one is there


CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

DATASETS = {
    "multi30k": DatasetInfo(
        "Multi30k, captions of images in English and German",
        "https://github.com/multi30k/dataset/tree/master/data/task1/raw",
        [f"{part}.{language}" for part in ("train", "val", "test_2016_flickr") for language in ("en", "de")],
    ),
    "ud_english_ewt": DatasetInfo(
        "Universal Dependencies English Web Treebank",
        "https://github.com/UniversalDependencies/UD_English-EWT",
        [f"en_ewt-ud-{part}.conllu" for part in ("train", "dev", "test")],
    ),
    "imdb": DatasetInfo(
        "IMDB reviews (Maas et al. 2011)",
        "https://ai.stanford.edu/~amaas/data/sentiment or https://huggingface.co/datasets/stanfordnlp/imdb",
        ["train.jsonl", "test.jsonl"],
        'A line is a review: {"text": "…", "label": 0 or 1}, where 1 is a good one. '
        "`regard prepare imdb aclImdb_v1.tar.gz` writes both files.",
    ),
    "tinyshakespeare": DatasetInfo(
        "Tiny Shakespeare",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        ["input.txt"],
    ),
    "acl_titles": DatasetInfo(
        "abstracts and titles of the ACL Anthology",
        "https://aclanthology.org/anthology+abstracts.bib.gz",
        ["train.jsonl", "val.jsonl", "test.jsonl"],
        'A line is a paper: {"abstract": "…", "title": "…"}. '
        "`regard prepare acl_titles anthology+abstracts.bib.gz` writes all three.",
    ),
    "wikisql": DatasetInfo(
        "WikiSQL, as text2sql-data has it",
        "https://github.com/jkkummerfeld/text2sql-data/tree/master/data",
        ["wikisql.json"],
    ),
    "gum": DatasetInfo(
        "GUM, constituency trees of English",
        "https://github.com/amir-zeldes/gum (const/*.ptb)",
        ["train.tsv", "dev.tsv", "test.tsv"],
        "A line is the name of a document and a tree in Penn brackets, with a tab between them. "
        "`regard prepare gum FOLDER` writes all three from a clone or its .zip file.",
    ),
    "go_fox_pro": DatasetInfo(
        "games of Go with a professional, from the Fox server",
        "https://github.com/featurecat/go-dataset",
        ["train.tsv", "val.tsv", "test.tsv"],
        "Columns are id, date, black_rank, white_rank, komi, result and moves: SGF letters of the points, black first. "
        "`regard prepare go Pro` writes all three from the folder that Pro/Pro.7z has in it, unpacked by 7-Zip.",
    ),
    "aan_scisumm": DatasetInfo(
        "papers of computational linguistics and pairs of them, one of which cites the other or not",
        "https://github.com/WING-NUS/scisumm-corpus",
        ["docs.jsonl", *(f"pairs.{part}.tsv" for part in ("train", "val", "test"))],
        'A line of docs.jsonl is a paper: {"id": "…", "text": "…"}; pairs have the columns label (0 or 1), doc1, doc2.',
    ),
    "cifar10_colour": DatasetInfo(
        "CIFAR-10 in colour, as arrays of NumPy",
        CIFAR_PAGE,
        [f"colour_{part}_{what}.npy" for part in ("train", "test") for what in ("images", "labels")],
        "Images are uint8 of shape (examples, 3, 32, 32); labels are uint8, 0 to 9. "
        "`regard prepare cifar10 cifar-10-binary.tar.gz` writes all of them, and those in gray.",
        "cifar10",
        "cifar10_jpeg",
    ),
    "cifar10_jpeg": DatasetInfo(
        "CIFAR-10 in colour, as a tar archive of JPEG files",
        CIFAR_PAGE,
        ["cifar10_jpeg.tar"],
        "The archive holds train/CLASS/NUMBER.jpg and test/CLASS/NUMBER.jpg, 32 x 32 pixels, for ten classes. "
        "`regard prepare cifar10` writes the pixels without loss instead, which are another data set: cifar10_colour.",
        "cifar10",
    ),
    "cifar10": DatasetInfo(
        "CIFAR-10 in gray, as arrays of NumPy",
        CIFAR_PAGE,
        [f"gray_{part}_{what}.npy" for part in ("train", "test") for what in ("images", "labels")],
        "Images are uint8 of shape (examples, 32, 32), 0.299 red + 0.587 green + 0.114 blue; labels are uint8, 0 to 9. "
        "`regard prepare cifar10 cifar-10-binary.tar.gz` writes all of them, and those in colour.",
    ),
    "tox21": DatasetInfo(
        "Tox21, molecules and twelve labels of toxicity",
        "https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/tox21.csv.gz",
        ["tox21.csv"],
    ),
    "planetoid": DatasetInfo(
        "Cora, a citation graph, with the splits of Planetoid, as arrays of NumPy",
        "https://github.com/kimiyoung/planetoid",
        ["cora.npz"],
        "Words of papers are a sparse matrix (indptr, indices, data, shape); label, edges (of shape (edges, 2)), and the papers "
        "of the splits (train_idx, val_idx, test_idx). `regard prepare cora FOLDER` writes it from a clone or its .zip file.",
    ),
    "fsdd": DatasetInfo(
        "the Free Spoken Digit Dataset, digits in wav files",
        "https://github.com/Jakobovski/free-spoken-digit-dataset",
        ["fsdd_recordings.tar"],
        "It is a tar file of the folder recordings, whose files are called digit_speaker_index.wav. "
        "`regard prepare fsdd FOLDER` writes it from a clone or its .zip file.",
    ),
    "tts": DatasetInfo(
        "recordings with their texts, in the layout of LJ Speech",
        "https://keithito.com/LJ-Speech-Dataset",
        ["metadata.csv"],
        "A line is name|text, its recording wavs/name.wav. `regard prepare espeak TEXTS` makes such a folder by espeak-ng.",
    ),
    "an4": DatasetInfo(
        "AN4 of CMU, spelled words, as 13 cepstra a window",
        "http://www.speech.cs.cmu.edu/databases/an4",
        ["an4_train_mfcc13.npz", "an4_test_mfcc13.npz"],
        "Arrays: feat (windows, 13) of all utterances, offset (utterances + 1), text, id (folder/speaker/name). "
        "`regard prepare an4 FILE` writes them from an4_sphere.tar.gz.",
    ),
}


def find(name: str, folder: Path | str | None = None) -> Path:
    """Return the folder of a data set: `folder` or its child `name`, else `$REGARD_DATA/<name>`; some share a folder.

    Raises DataError, with what to download and where to put it, unless all files are there, or those of a set that is read
    in its place (`stored_form`).
    """
    if name not in DATASETS:
        raise DataError(unknown("no data set is called", name, DATASETS))
    root = folder if folder is not None else os.environ.get("REGARD_DATA") or None
    if root is None:
        where = DATASETS[name].folder or name
        raise DataError(f"{_instructions(name)} into a folder {where}, and name the folder above it by REGARD_DATA or --data")
    files = DATASETS[name].files
    child = Path(root).expanduser() / (DATASETS[name].folder or name)
    candidates = [child] if folder is None else [Path(root).expanduser(), child]
    for candidate in candidates:
        if not _missing(candidate, files):
            return candidate
    nearest = min(candidates, key=lambda candidate: (len(_missing(candidate, files)), candidate != child))
    missing = ", ".join(_missing(nearest, files))
    problem = f"{nearest} has no {missing}" if nearest.is_dir() else f"there is no folder {nearest}"
    if other := DATASETS[name].instead:
        with suppress(DataError):
            return find(other, folder)
    raise DataError(f"{problem}. {_instructions(name)} into {nearest}, or name another place by REGARD_DATA or --data")


def stored_form(name: str, folder: Path | str | None = None) -> str:
    """Return which data set is read for `name`: itself, or the one in its place where only that one is there."""
    found = find(name, folder)
    return DATASETS[name].instead if _missing(found, DATASETS[name].files) else name


def file(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, plain or compressed."""
    for ending in COMPRESSED_SUFFIXES:
        if (found := folder / (name + ending)).is_file():
            return found
    raise DataError(f"{folder} has no {name}, nor one with {', '.join(filter(None, COMPRESSED_SUFFIXES))} behind its name")


def _missing(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not any((folder / (name + ending)).is_file() for ending in COMPRESSED_SUFFIXES)]


def _instructions(name: str) -> str:
    known = DATASETS[name]
    note = f" {known.note}" if known.note else ""
    files = ", ".join(known.files)
    return (
        f"{name} is {known.title}, from {known.address}.{note} "
        f"Put {files} (as {'it is' if len(known.files) == 1 else 'they are'}, or with .gz, .xz or .bz2 behind the name)"
    )
