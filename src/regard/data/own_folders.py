"""Folders of a user: one folder for each label, one text or image in each file; whole, or divided into folders of splits."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from regard.data.datasets import LabelledText
from regard.data.own_files import file_digest
from regard.data.text_files import DataError, check_unicode, read_text

SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}


def read_labelled_folder(folder: Path) -> list[LabelledText]:
    """Read a text with one label from every file of the folders in `folder`, in the order of their names.

    The name of a folder is the label. Files beside these folders, and hidden ones, are left out: `files_left_out` counts them.
    """
    found = []
    for label, paths in files_by_label(folder, "a text").items():
        for path in paths:
            text = read_text(path)
            if not text.strip():
                raise DataError(f"{path} is empty: write its text, or delete it")
            found.append(LabelledText(text, label))
    return found


def files_by_label(folder: Path, what: str) -> dict[str, list[Path]]:
    """List the files in each folder in `folder`, by the name of that folder: the label. `what` is what every file is."""
    labels = _folders(folder)
    if not labels:
        raise DataError(f"{folder} has no folders in it: one for each label is needed, with {what} in every file")
    found = {}
    for place in labels:
        if not check_unicode(place.name):
            shown = os.fsencode(place).decode(errors="backslashreplace")
            raise DataError(f"the name of the folder {shown} is not UTF-8, and no label: give it another one")
        found[place.name] = _visible(place)
        if inner := next((path for path in found[place.name] if path.is_dir()), None):
            raise DataError(f"{inner} is a folder in the folder of a label, where every file is {what}: move it away")
    return found


def split_folders(folder: Path) -> dict[str, Path]:
    """Map train, val and test to their folders, where all folders in `folder` are called so and train is one; else {}."""
    names = [(SPLIT_FOLDERS.get(path.name), path) for path in _folders(folder)]
    found = {name: path for name, path in names if name is not None}
    if len(found) == len(names):
        return {name: found[name] for name in ("train", "val", "test") if name in found} if "train" in found else {}
    if None in dict(names) or "train" not in found:
        return {}
    raise DataError(f"{folder} has several folders for validation: keep one of {', '.join(path.name for _, path in names)}")


def files_left_out(folder: Path) -> int:
    """Count the files that lie beside the folders of labels, in `folder` or in its folders of train, val and test."""
    places = [folder, *split_folders(folder).values()]
    return sum(path.is_file() for place in places for path in _visible(place))


def folder_digest(folder: Path) -> str:
    """Return a SHA-256 of all files in a folder, by their paths and contents; hidden files are left out."""
    whole = hashlib.sha256()
    for path in _below(folder):
        name = os.fsencode(path.relative_to(folder).as_posix())  # which may not be UTF-8
        whole.update(name + f"\0{file_digest(path)}\n".encode())
    return whole.hexdigest()


def _below(folder: Path) -> list[Path]:
    found = []
    for path in _visible(folder):
        found += _below(path) if path.is_dir() else [path]
    return found


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _visible(folder: Path) -> list[Path]:
    """List what a folder holds, but hidden files and folders, by name."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from None
