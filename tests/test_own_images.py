"""A user's own images, a folder for each label, from the command line and in Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.cli.model_check import check_model
from regard.data.image_folders import ImageFile, read_image_folder, split_image_files
from regard.tasks import config, make_task
from regard.training.checkpoints import load_run
from test_cli import refused, run

COLOURS = {"blue": (20, 30, 220), "green": (30, 200, 40), "red": (220, 20, 30)}
SMALL = {
    "side": 16, "width": 16, "heads": 2, "depth": 1, "ffn": 16, "steps": 4, "batch_tokens": 8, "warmup": 1, "validate_every": 2,
    "save_every": 2, "lr": 0.01,
}  # fmt: skip
SETTINGS = ["--device", "cpu", *(word for key, value in SMALL.items() for word in ("--set", f"{key}={value}"))]
MODELS = [
    [],
    ["--mixer", "linear", "--set", "pool=token"],
    ["--preset", "mlp_mixer"],
    ["--preset", "cnn", "--set", "stem=cnn(channels=4, stages=2, blocks=1)"],
    ["--preset", "hybrid", "--set", "gray=true", "--set", "stem=cnn(channels=4, stages=2, blocks=1)"],
]


def photo(label: str, number: int) -> Image.Image:
    """A picture of the colour of a label, taller than wide, with noise of its own."""
    noise = np.random.default_rng(1000 * list(COLOURS).index(label) + number).integers(-20, 20, (24, 18, 3))
    return Image.fromarray((np.array(COLOURS[label]) + noise).clip(0, 255).astype(np.uint8))


def write_photos(place: Path, count: int = 10, first: int = 0) -> Path:
    """One folder for each colour, with as many PNG and JPEG files, and a file beside the folders."""
    for label in COLOURS:
        (place / label).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            photo(label, number).save(place / label / f"{number}.{'png' if number % 2 else 'jpg'}")
        (place / label / ".hidden").write_text("")
    (place / "README").write_text("Photos.")
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The folder of photos, that of the run, and the messages of training."""
    place = tmp_path_factory.mktemp("photos")
    photos, out = write_photos(place / "photos"), place / "run"
    done = run("train", "images", "--folder", str(photos), *SETTINGS, "--out", str(out))
    assert done.exit_code == 0, done.output
    return photos, out, done.stderr


def test_folders_of_images_are_split_described_trained_scored_and_asked(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    photos, out, messages = trained
    assert f"30 images of {photos}: 24 train, 3 val, 3 test, by a hash of each file" in messages
    assert "left out: files beside the folders of labels, 1 in all" in messages
    assert "3 labels: blue (10), green (10), red (10)" in messages
    assert "floor: the most frequent label, blue, is right for 33.3 % of val and 33.3 % of test" in messages
    assert "floor: the label whose mean image is nearest is right for 100.0 % of val and 100.0 % of test" in messages
    scores = json.loads(run("evaluate", str(out), "--json").stdout)["scores"]
    assert scores["images"] == 3 and scores["nearest_mean"] == 100 and round(scores["floor"]) == 33 and "accuracy" in scores
    photo("red", 99).save(tmp_path / "new.jpg")
    assert run("predict", str(out), str(tmp_path / "new.jpg")).stdout.strip() in COLOURS
    assert "there is no file none.jpg" in refused("predict", str(out), "none.jpg")


def test_it_learns_colours(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    settings = SMALL | {"steps": 40, "crop": 0, "colour": 0.0, "mixup": 0.1, "cutout": 4, "validate_every": 20, "save_every": 20}
    found = regard.train("images", tmp_path / "run", folder=trained[0], device="cpu", quiet=True, **settings)
    assert found.evaluate("test")["accuracy"] == 100
    photo("green", 99).save(tmp_path / "new.png")
    loaded = regard.load(tmp_path / "run", device="cpu")
    assert loaded.predict([str(tmp_path / "new.png"), ""]) == ["green", ""]


@pytest.mark.parametrize("words", MODELS, ids=str)
def test_all_models_of_images_train_and_answer(words: list[str], trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    without = {"depth", "heads", "ffn"} if "cnn" in words else set()
    small = ["--device", "cpu", *(f"--set={key}={value}" for key, value in SMALL.items() if key not in without)]
    done = run("train", "images", "--folder", str(trained[0]), *small, *words, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert run("predict", str(tmp_path / "run"), str(trained[0] / "red/1.png")).stdout.strip() in COLOURS


@pytest.mark.parametrize("preset", [None, "cnn", "hybrid", "mlp_mixer"])
def test_defaults_and_presets_build_a_model(preset: str | None) -> None:
    check_model(make_task(config("images", preset)))


def test_a_run_that_goes_on_ends_with_the_weights_of_one_that_was_not_stopped(
    trained: tuple[Path, Path, str], tmp_path: Path
) -> None:
    photos, _, _ = trained
    constant = [*SETTINGS, "--set", "schedule=constant", "--set", "mixup=0.2"]
    for name, words in {"parts": [word.replace("steps=4", "steps=2") for word in constant], "whole": constant}.items():
        done = run("train", "images", "--folder", str(photos), *words, "--out", str(tmp_path / name))
        assert done.exit_code == 0, done.output
    assert run("train", "images", "--out", str(tmp_path / "parts"), "--set", "steps=4", "--device", "cpu").exit_code == 0
    parts, whole = (load_run(tmp_path / name).weights for name in ("parts", "whole"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_a_folder_that_has_moved_or_changed(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    photos, out, _ = trained
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    assert run("evaluate", str(out), "--data", str(tmp_path)).exit_code == 0
    photo("red", 50).save(copy / "red" / "more.png")
    assert "Restore the folder" in refused("evaluate", str(out), "--data", str(copy))


def test_splits_that_a_user_has_are_kept_and_images_in_two_of_them_are_counted(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_photos(photos / "train")
    write_photos(photos / "test", 3, first=20)
    for path in sorted((photos / "train/red").glob("?.*")):
        shutil.copy(path, photos / "test/red" / f"same{path.name}")
    done = run("train", "images", "--folder", str(photos), *SETTINGS, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert f"49 images of {photos}: 27 train, 3 val, 19 test, test by its folder, val by a hash of each file" in done.stderr
    assert "also in train: 9 of the images of test" in done.stderr  # one of the ten is held out for validation
    both = ["--folder", str(photos), "--test", str(photos / "test")]
    assert "has folders for train and test in it: leave --valid and --test out" in refused("train", "images", *both)
    given = ["--folder", str(photos / "train"), "--test", str(photos / "test"), *SETTINGS, "--out", str(tmp_path / "other")]
    assert "19 test of" in run("train", "images", *given).stderr
    (photos / "test/red").rename(photos / "test/pink")
    assert "no training image has the label 'pink'" in refused("train", "images", *given[:-1], str(tmp_path / "third"))


def test_files_of_one_content_are_in_one_split_and_names_have_no_effect() -> None:
    pixels = np.zeros((1, 1, 1), np.uint8)
    files = [ImageFile(pixels, label, f"{label} {i % 20}") for label in "ab" for i in range(40)]
    parts = split_image_files(files, Path("photos"))
    assert [len(part) for part in parts] == [64, 8, 8]
    assert len({x.digest for x in parts.train} & {x.digest for part in parts[1:] for x in part}) == 0
    other = split_image_files(files[::-1], Path("photos"))
    assert {x.digest for x in other.test} == {x.digest for x in parts.test}


def test_an_image_is_its_middle_square_in_the_side_and_colours_that_were_asked_for(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 1)
    assert [x.pixels.shape for x in read_image_folder(photos, 6, False)] == [(3, 6, 6)] * 3
    assert [x.pixels.shape for x in read_image_folder(photos, 8, True)] == [(1, 8, 8)] * 3
    made = make_task(config("images").replace({"gray": True, "side": 20}))
    made.labels = ["a", "b"]  # type: ignore[attr-defined]
    assert made.model()(torch.zeros(1, 1, 20, 20)).shape == (1, 2)


def test_all_damaged_files_are_named_in_one_sentence(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 5)
    whole = (photos / "red/1.png").read_bytes()
    (photos / "red/1.png").write_bytes(whole[: len(whole) // 2])
    one = refused("train", "images", "--folder", str(photos), *SETTINGS)
    assert "red/1.png is not a whole image" in one and one.strip().endswith("Delete this file, or move it away")
    (photos / "blue/notes.txt").write_text("no image")
    (photos / "blue/0.jpg").write_bytes(b"")
    said = refused("train", "images", "--folder", str(photos), *SETTINGS)
    assert all(f"{name} is not a whole image" in said for name in ("blue/0.jpg", "blue/notes.txt", "red/1.png"))
    assert said.strip().endswith("Delete these files, or move them away")
    for path in [*photos.glob("*/*.*")]:
        path.write_bytes(b"")
    assert "; and 11 more. Delete these files" in refused("train", "images", "--folder", str(photos), *SETTINGS)


def test_what_is_no_folder_of_images_is_refused(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 5)
    given = ["train", "images", "--folder", str(photos), *SETTINGS]
    (photos / "grey").mkdir()
    assert "grey has no image in it: put some there, or delete the folder" in refused(*given)
    (photos / "grey/deep").mkdir()
    assert "deep is a folder in the folder of a label, where every file is an image: move it away" in refused(*given)
    shutil.rmtree(photos / "grey")
    for label in ("blue", "green"):
        shutil.rmtree(photos / label)
    assert "every image has the label 'red', but a classifier needs two labels at least" in refused(*given)
    shutil.rmtree(photos / "red")
    assert "has no folders in it: one for each label is needed, with an image in every file" in refused(*given)
    write_photos(photos, 4)
    assert "no label has 5 different images, so that none is left for test and val" in refused(*given)
    assert "which folder has the images? Give --folder FOLDER" in refused("train", "images")
    assert "there is no folder" in refused("train", "images", "--folder", str(tmp_path / "none"))
    assert "is a file, not a folder" in refused("train", "images", "--folder", str(photos / "README"))
    assert "--folder does nothing here: it is for classify and images" in refused("train", "saw", "--folder", str(photos))
    assert "--text does nothing here: it is for classify" in refused(*given, "--text", "a")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("side=30", "30 pixels do not divide into patches of 4: use side=28 or 32, or other patches (stem=patches(side=...))"),
        ("side=3", "3 pixels do not divide into patches of 4: use side=4, or other patches"),
        ("side=0", "side must be an integer of at least 1, not 0"),
        ("side=5000", "side must be at most 4,096, not 5000"),
        ("crop=40", "crop must be from 0 to 32, not 40"),
        ("max_len=9", "max_len does nothing here"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in refused("train", "images", "--folder", str(tmp_path), "--set", change)
