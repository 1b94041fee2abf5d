"""Files of a run on a user's data: where they are, their SHA-256 when training began, and which split each of them has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from regard.data.own_files import HELD, file_digest
from regard.data.own_folders import files_left_out, folder_digest, split_folders
from regard.data.strict_json import JsonError, read_value
from regard.data.text_files import DataError

DATA_ASSET = "data.json"


class OwnFile:
    """A file of a run, or a folder of files: where it is, and the SHA-256 that it had when training began."""

    def __init__(self, path: str, asset: str = DATA_ASSET, *, folder: bool = False) -> None:
        self.path, self.name, self.sha256 = path, asset, ""
        self.kind = "folder" if folder else "file"

    def find(self, place: Path | None) -> Path:
        """Return the file: at its recorded path, or at `place`, which is the file or has it; it must not have changed."""
        path = Path(self.path)
        if place is not None:
            inside = place / path.name
            path = place if place.is_file() or (self.kind == "folder" and not inside.is_dir()) else inside
        if not (path.is_dir() if self.kind == "folder" else path.is_file()):
            other = "file, not a folder" if self.kind == "folder" else "folder, not a file"
            problem = f"{path} is a {other}" if path.exists() else f"there is no {self.kind} {path}"
            raise DataError(
                f"{problem}: check its name, or, where the {self.kind} of a run has moved, name its new place by --data"
            )
        digest = folder_digest(path) if self.kind == "folder" else file_digest(path)
        if self.sha256 and digest != self.sha256:
            raise DataError(
                f"{path} is not as it was when this run was trained (its SHA-256 differs): its splits would be others, and "
                f"texts of training among the test. Restore the {self.kind}, or train again in another folder"
            )
        self.sha256 = digest
        return path

    def asset(self) -> dict[str, str]:
        return {self.name: json.dumps({"file": self.path, "sha256": self.sha256})}

    def restore(self, assets: Mapping[str, str]) -> None:
        try:
            self.sha256 = str(read_value(assets[self.name])["sha256"])
        except (JsonError, TypeError, LookupError) as error:
            if error.args == (self.name,):  # the asset is not there
                raise
            raise ValueError(f"{self.name} holds no SHA-256: restore it") from None


class OwnFiles:
    """All files of a run: those of train, and those of val and test where a user has them apart.

    `sides` are the names of the files that make one split together: "source" and "target" of pairs, or "" for one file.
    """

    def __init__(
        self,
        train: Sequence[str],
        valid: Sequence[str] = (),
        test: Sequence[str] = (),
        *,
        sides: Sequence[str] = ("",),
        folder: bool = False,
    ) -> None:
        self.files: dict[str, list[OwnFile]] = {}
        self.folder = folder  # each of them is a folder of labels
        self.left_out = 0  # files beside the folders of labels
        for split, paths in {"train": train, "val": valid, "test": test}.items():
            if len(paths) not in (0, len(sides)):
                option = {"val": "--valid", "test": "--test"}.get(split, "train")
                raise ValueError(f"{option} takes {_files_text(sides)}, not {len(paths)}")
            if paths:
                words = ["" if split == "train" else split]
                names = ["_".join(filter(None, [*words, side, DATA_ASSET])) for side in sides]
                self.files[split] = [OwnFile(path, name, folder=folder) for path, name in zip(paths, names, strict=True)]
        self.apart = [split for split in self.files if split != "train"]  # splits that a user has made

    @property
    def held(self) -> list[str]:
        """Splits that are held out of train."""
        return [name for name in HELD if name not in self.apart]

    def find(self, place: Path | None) -> dict[str, list[Path]]:
        """Return the files of every split that has files; `place` is as for one file, or the folder that has all of them."""
        if place is not None and place.is_file() and len(self._all()) > 1:
            raise DataError(f"{place} is one file: --data names the folder that has all of them")
        return {split: [file.find(place) for file in files] for split, files in self.files.items()}

    def find_single(self, place: Path | None) -> dict[str, Path]:
        """Return the one file of every split; a folder of all texts or images may have folders of train, val and test in it."""
        paths = {split: path for split, (path,) in self.find(place).items()}
        if not self.folder:
            return paths
        inside = split_folders(paths["train"])
        self.left_out = sum(files_left_out(path) for path in paths.values())
        if inside and len(paths) > 1:
            raise DataError(f"{paths['train']} has folders for {' and '.join(inside)} in it: leave --valid and --test out")
        if inside:
            self.apart = [name for name in inside if name != "train"]
        return inside or paths

    def chosen(self, by: str) -> str:
        """Describe how the splits that are in the place of train were made; `by` is how those are that are held out."""
        if len(self.files) > 1 or not self.apart:
            return by
        made = f"{' and '.join(self.apart)} by {'its folder' if len(self.apart) == 1 else 'their folders'}"
        return f"{made}, {self.held[0]} {by}" if self.held else made

    def beside(self) -> list[str]:
        """Describe how many files lie beside the folders of labels."""
        return [f"left out: files beside the folders of labels, {self.left_out:,} in all"] if self.left_out else []

    def describe(self, counts: Mapping[str, int], what: str, how: str) -> str:
        """Describe how many there are of each split, from which file, and how those that were held out were chosen."""
        total = f"{sum(counts.values()):,} {what}"
        first = [f"{counts[name]:,} {name}" for name in counts if name == "train" or name not in self.files]
        if set(self.files) == {"train"}:
            return f"{total} of {self._named('train')}: {', '.join(first)}, {how}"
        apart = [f"{counts[name]:,} {name} of {self._named(name)}" for name in self.files if name != "train"]
        whole = f"{' and '.join(first)} of {self._named('train')}{f', {how}' if self.held else ''}"
        return f"{total}: {'; '.join([whole, *apart])}"

    def repeats(self, counts: Mapping[str, int], what: str) -> list[str]:
        """Describe how many texts of a split that a user made are in train too."""
        return [
            f"also in train: {count:,} of the {what} of {name}" for name, count in counts.items() if name in self.apart and count
        ]

    def _named(self, split: str) -> str:
        return " and ".join(file.path for file in self.files[split])

    def _all(self) -> list[OwnFile]:
        return [file for files in self.files.values() for file in files]

    def assets(self) -> dict[str, str]:
        return {name: text for file in self._all() for name, text in file.asset().items()}

    def restore(self, assets: Mapping[str, str]) -> None:
        for file in self._all():
            file.restore(assets)


def _files_text(sides: Sequence[str]) -> str:
    if len(sides) == 1:
        return "one file"
    return f"{len(sides)} files, one behind the other, for {' and '.join(f'{side}s' for side in sides)}"
