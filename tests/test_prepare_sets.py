"""CIFAR-10, GUM, games of Go and spoken digits in the layouts of their downloads, converted and read by their tasks."""

from __future__ import annotations

import io
import math
import shutil
import tarfile
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard import load
from regard.data.cifar_download import CIFAR_RECORD, cifar_arrays, luma
from regard.data.colour_images import read_colour_arrays
from regard.data.fsdd_download import fsdd_tar
from regard.data.go_download import go_lines
from regard.data.go_games import letters_of, read_go
from regard.data.gray_images import read_gray_images
from regard.data.gum_download import gum_trees
from regard.data.prepared_files import PreparedFile, text_lines, write_prepared
from regard.data.source_files import SEVEN_ZIP
from regard.data.speech_sets import read_fsdd
from regard.data.text_files import DataError
from regard.data.treebank import read_gum, write_tree
from regard.tasks import config, make_task
from regard.training.fit import fit
from test_cli import refused, run
from test_image_tasks import TINY
from test_image_tasks import archive as jpeg_archive


def tar_folder(folder: Path, path: Path, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        archive.add(folder, folder.name)
    return path


def zip_folder(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder.parent).as_posix())
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """The folder of the binary version, with 6 images in each batch."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(3)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records = rng.integers(0, 256, (6, CIFAR_RECORD), np.uint8)
        records[:, 0] = rng.integers(0, 10, 6)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    (folder / "batches.meta.txt").write_text("airplane\n")
    return folder


def test_cifar10_in_colour_and_gray(cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_DATA", str(tmp_path / "data"))
    done = run("prepare", "cifar10", str(tar_folder(cifar, tmp_path / "cifar-10-binary.tar.gz")))
    assert done.exit_code == 0 and "regard train cifar10_gray" in done.stdout and "30 images" in done.stdout
    assert run("prepare", "cifar10", str(cifar), "--out", str(tmp_path / "other")).exit_code == 0
    where = tmp_path / "data/cifar10"
    assert contents(where) == contents(tmp_path / "other") and len(contents(where)) == 8
    colour = read_colour_arrays(where)
    raw = (cifar / "data_batch_2.bin").read_bytes()[CIFAR_RECORD : 2 * CIFAR_RECORD]  # the second record of the second batch
    red, green, blue = (raw[1 + i * 1024 : 1 + (i + 1) * 1024] for i in range(3))
    assert colour["train"].labels[7] == raw[0] and colour["train"].images[7].tobytes() == red + green + blue
    assert colour["train"].images.shape == (30, 3, 32, 32) and colour["test"].images.shape == (6, 3, 32, 32)
    for part, own in colour.items():
        gray = read_gray_images(where, part)
        pillow = [np.asarray(Image.fromarray(image.transpose(1, 2, 0)).convert("L")) for image in own.images]
        assert (gray.images == np.stack(pillow)).all() and (gray.labels == own.labels).all()
    assert "colour_train_images.npy is there already" in refused("prepare", "cifar10", str(cifar))


def test_gray_is_rounded_as_pillow_does_for_all_levels_of_two_colours() -> None:
    levels = np.stack(np.meshgrid(np.arange(256), np.arange(256)), 0).astype(np.uint8)
    for third in (0, 77, 255):
        image = np.concatenate([levels, np.full((1, 256, 256), third, np.uint8)])
        assert (luma(image[None])[0] == np.asarray(Image.fromarray(image.transpose(1, 2, 0)).convert("L"))).all()


def test_the_task_reads_original_pixels_first_and_a_run_keeps_what_it_read(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    where = data / "cifar10"
    where.mkdir(parents=True)
    jpeg_archive(where / "cifar10_jpeg.tar.xz")
    monkeypatch.setenv("REGARD_DATA", str(data))
    monkeypatch.setenv("COLUMNS", "200")
    settings = config("cifar10").replace({**TINY, "stem": "patches(side=16)", "steps": 3})
    copied = make_task(settings)
    copied.read()
    assert "a copy of CIFAR-10 in JPEG files" in copied.describe_data()[-1] and set(copied.assets()) == {"labels.json"}
    assert "cifar10_jpeg (is there)" in run("tasks").stdout
    assert run("prepare", "cifar10", str(cifar)).exit_code == 0
    assert "cifar10_colour (is there)" in run("tasks").stdout
    whole = make_task(settings)
    whole.read()
    assert "the original pixels of CIFAR-10" in whole.describe_data()[-1] and len(whole.splits["test"]) == 6
    fit(whole, tmp_path / "run", quiet=True)
    again = load(tmp_path / "run").task
    again.read()
    assert len(again.splits["test"]) == 6 and again.assets() == whole.assets() != copied.assets()
    older = make_task(settings)
    older.restore(copied.assets())  # of a run on the copy, which is read again although the original pixels are there
    older.read()
    assert len(older.splits["test"]) == 20 and "a copy of CIFAR-10" in older.describe_data()[-1]
    for path in where.glob("colour_*"):
        path.unlink()
    with pytest.raises(DataError, match=r"this run is on the original pixels, and .*cifar10 has their copy in JPEG files alone"):
        load(tmp_path / "run").task.read()


def test_damaged_batches_are_refused(cifar: Path, tmp_path: Path) -> None:
    def sentence(source: Path) -> str:
        said = refused("prepare", "cifar10", str(source), "--out", str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()
        return said

    whole = tar_folder(cifar, tmp_path / "whole.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    assert "cut.tar.gz is not a whole .tar, .tar.gz or .zip file" in sentence(tmp_path / "cut.tar.gz")
    plain = tar_folder(cifar, tmp_path / "whole.tar", "w").read_bytes()
    for size in (len(plain) // 2, 512 * (len(plain) // 1024), 3 * 512):
        (tmp_path / "cut.tar").write_bytes(plain[:size])
        assert "cut.tar is not a whole .tar" in sentence(tmp_path / "cut.tar")
    zipped = zip_folder(cifar, tmp_path / "whole.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(zipped[: len(zipped) // 2])
    assert "cut.zip is not a whole" in sentence(tmp_path / "cut.zip")
    (tmp_path / "bent.zip").write_bytes(zipped[:2000] + b"\0" * 500 + zipped[2500:])
    assert "bent.zip is not a whole .zip file" in sentence(tmp_path / "bent.zip")
    batch = cifar / "data_batch_3.bin"
    good = batch.read_bytes()
    batch.write_bytes(good[:-1])
    assert "data_batch_3.bin has 18,437 bytes, which is no number of records of 3,073 bytes" in sentence(cifar)
    batch.write_bytes(b"\x0a" + good[1:])
    assert "data_batch_3.bin: labels go up to 10, not to 9" in sentence(cifar)
    batch.unlink()
    assert "has no data_batch_3.bin: is it the binary version of CIFAR-10?" in sentence(cifar)
    assert "there is no file or folder" in sentence(tmp_path / "gone.tar.gz")


def test_nothing_is_left_where_a_file_cannot_be_written(tmp_path: Path) -> None:
    def broken(stream: io.BytesIO) -> None:
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_prepared(tmp_path / "set", {"a.tsv": text_lines(["a"]), "b.tsv": PreparedFile("", broken)})
    (tmp_path / "set/b.tsv").mkdir()  # no file can be renamed to it
    with pytest.raises(OSError, match=r"b\.tsv"):
        write_prepared(tmp_path / "set", {"a.tsv": text_lines(["a"]), "b.tsv": text_lines(["b"])})
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["b.tsv"]


SPLITS = """# Splits

The following standard train / dev / test / test2 splits are used.

## dev

  * GUM_news_dev

## test

  * GUM_news_test
  * GUM_reddit_test

## test2

  * GENTLE_poetry_far

## train

  * GUM_news_b
  * GUM_news_a
"""
TREE = "(ROOT\n  (S\n    (NP-SBJ (PRP I))\n    (VP (VBP see)\n      (PRN (-LRB- [) (CD {}) (-RRB- ])))))\n\n"
LINE = "(ROOT (S (NP-SBJ (PRP I)) (VP (VBP see) (PRN (-LRB- [) (CD {}) (-RRB- ])))))"


@pytest.fixture
def gum(tmp_path: Path) -> Path:
    """A clone with two trees in each document, and one of another version in the folder that builds the corpus."""
    folder = tmp_path / "gum"
    for name in ("GUM_news_dev", "GUM_news_test", "GUM_reddit_test", "GENTLE_poetry_far", "GUM_news_b", "GUM_news_a"):
        for place, number in (("const", "1"), ("_build/src/const", "9")):
            (folder / place).mkdir(parents=True, exist_ok=True)
            (folder / place / f"{name}.ptb").write_text(TREE.format(number) + TREE.format(name), encoding="utf-8")
    (folder / "splits.md").write_text(SPLITS)
    return folder


def test_trees_over_several_lines_become_a_tree_a_line(gum: Path, tmp_path: Path) -> None:
    for number, source in enumerate((gum, zip_folder(gum, tmp_path / "gum-master.zip"))):
        done = run("prepare", "gum", str(source), "--out", str(tmp_path / str(number)))
        assert done.exit_code == 0 and "4 trees of 2 documents" in done.stdout and "regard train gum" in done.stdout
    assert contents(tmp_path / "0") == contents(tmp_path / "1")
    lines = (tmp_path / "0/train.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"GUM_news_a\t{LINE.format(1)}" and lines[3] == f"GUM_news_b\t{LINE.format('GUM_news_b')}"
    parts = read_gum(tmp_path / "0")
    assert [len(part) for part in parts] == [4, 2, 2] and write_tree(parts[2][1]) == LINE.format("GUM_news_test")


def test_damaged_clones_of_gum_are_refused(gum: Path, tmp_path: Path) -> None:
    def sentence() -> str:
        return refused("prepare", "gum", str(gum), "--out", str(tmp_path / "out"))

    document = gum / "const/GUM_news_a.ptb"
    document.write_text(TREE.format(1) + TREE.format(2)[:30])
    assert "GUM_news_a.ptb, line 7: this tree is cut off, 3 brackets are not closed" in sentence()
    document.write_text(TREE.format(1) + "(ROOT ())\n")
    assert "GUM_news_a.ptb, line 7: not a tree in Penn brackets" in sentence()
    document.write_bytes(b"\xff")
    assert "GUM_news_a.ptb: not UTF-8 at byte 1" in sentence()
    document.unlink()
    assert "has no const/GUM_news_a.ptb, which splits.md lists under train" in sentence()
    (gum / "splits.md").write_text(SPLITS.replace("## dev", "## held out"))
    assert "splits.md lists no documents under the heading dev" in sentence()
    (gum / "splits.md").write_text(SPLITS + "  * GUM_news_dev\n")
    assert "splits.md lists GUM_news_dev twice" in sentence()
    (gum / "splits.md").unlink()
    assert "has no splits.md, which lists the documents of train, dev and test" in sentence()
    shutil.rmtree(gum / "const")
    assert "has no trees: files such as const/" in sentence()
    assert not (tmp_path / "out").exists()


def game(number: int, *, moves: int = 40, head: str = "HA[0]", first: int = 0, tail: str = "") -> str:
    """A game in which both players put stones on their own half."""
    rng = np.random.default_rng(number)
    points = [rng.permutation(180), 180 + rng.permutation(180)]
    played = (f";{'BW'[(i + first) % 2]}[{letters_of(int(points[i % 2][i // 2]), 19)}]" for i in range(moves))
    about = f"(;GM[1]FF[4]  SZ[19]  GN[]  DT[2016-09-20]  PB[x]  PW[y]  BR[9段]  WR[P7段]  KM[650]{head}RE[B+R]AP[foxwq]  "
    return about + "".join(played) + tail + ")"


@pytest.fixture
def pro(tmp_path: Path) -> Path:
    """Twenty games that are taken, and one of each kind that is not."""
    folder = tmp_path / "Pro"
    (folder / "9p").mkdir(parents=True)
    for number in range(20):
        (folder / "9p" / f"{1000 + number}.sgf").write_text(game(number), encoding="utf-8")
    others = {
        "handicap": game(30, head="HA[2]", tail=";AB[aa][bb]"),
        "set-up": game(31, head=";AB[dd]"),
        "small": game(32).replace("SZ[19]", "SZ[13]"),
        "short": game(33, moves=29),
        "white": game(34, first=1),
        "cut": game(35)[:-30],
        "off": game(36).replace(";B[", ";B[z", 1),
        "twice": game(0),
    }
    for name, text in others.items():
        (folder / "9p" / f"{name}.sgf").write_text(text, encoding="utf-8")
    return folder


def test_games_are_split_by_their_moves(pro: Path, tmp_path: Path) -> None:
    branch = game(1)[:-1] + "(;B[]C[a \\] sign (;W[ab])];W[aa])(;B[sa];W[sb]))"  # its main line goes on with a pass
    (pro / "9p/1001.sgf").write_bytes(branch.encode().replace(b"PB[x]", b"PB[\xe4\xba]"))  # a name that was cut off
    outs = [tmp_path / name for name in ("a", "b", "c")]
    for out, source in zip(
        outs, (pro, zip_folder(pro, tmp_path / "pro.zip"), tar_folder(pro, tmp_path / "p.tar.xz", "w:xz")), strict=True
    ):
        with pytest.warns(UserWarning, match="8 of 28 games are left out") as warned:
            done = run("prepare", "go", str(source), "--out", str(out))
        assert done.exit_code == 0 and "regard train go" in done.stdout
        for reason in ("2 with handicap", "2 damaged", "1 of fewer than 30 moves", "1 of another size or game", "1 twice there"):
            assert reason in str(warned[0].message)
        assert "1 in which the players do not take turns" in str(warned[0].message)
    assert contents(outs[0]) == contents(outs[1]) == contents(outs[2])
    parts = read_go(outs[0])
    assert [len(part) for part in parts] == [16, 2, 2] and {len(moves) for part in parts for moves in part} == {40}
    rows = [line.split("\t") for path in outs[0].iterdir() for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    assert {row[0] for row in rows} == {str(1000 + number) for number in range(20)}
    assert {tuple(row[1:6]) for row in rows} == {("2016-09-20", "9段", "P7段", "650", "B+R")}


def test_archives_of_seven_zip_and_too_few_games_are_refused(pro: Path, tmp_path: Path) -> None:
    packed = tmp_path / "Pro.7z"
    packed.write_bytes(SEVEN_ZIP + bytes(40))
    out = ("--out", str(tmp_path / "out"))
    assert "Pro.7z is an archive of 7-Zip, which is not read here: unpack it (7z x" in refused("prepare", "go", str(packed), *out)
    for path in (pro / "9p").glob("10*.sgf"):
        path.unlink()
    said = refused("prepare", "go", str(pro), *out)
    assert "has 1 games that can be taken (2 " in said and "but 7 .sgf files are needed" in said
    shutil.rmtree(pro / "9p")
    packed.rename(pro / "Pro2.7z.001")
    assert "unpack its archives first, by 7z x" in refused("prepare", "go", str(pro), *out)


def sound(path: Path, count: int = 400) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.array([1000 * math.sin(i) for i in range(count)], "<i2").tobytes())


def test_recordings_of_digits(tmp_path: Path) -> None:
    clone = tmp_path / "free-spoken-digit-dataset"
    for name in ("7_jackson_32", "0_george_1", "0_george_0"):
        sound(clone / f"recordings/{name}.wav")
    (clone / "metadata.py").write_text("")
    sources = [clone, clone / "recordings", zip_folder(clone, tmp_path / "a.zip"), tar_folder(clone, tmp_path / "a.tar.gz")]
    for number, source in enumerate(sources):
        done = run("prepare", "fsdd", str(source), "--out", str(tmp_path / str(number)))
        assert done.exit_code == 0 and "3 recordings of 2 speakers" in done.stdout and "regard train fsdd_strings" in done.stdout
        assert contents(tmp_path / str(number)) == contents(tmp_path / "0")
    found = read_fsdd(tmp_path / "0")
    assert [x.name for x in found] == [f"recordings/{x}.wav" for x in ("0_george_0", "0_george_1", "7_jackson_32")]
    path = clone / "recordings/7_jackson_32.wav"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"7_jackson_32\.wav is cut off"):
        fsdd_tar(clone)
    path.rename(clone / "recordings/seven.wav")
    with pytest.raises(DataError, match=r"seven\.wav is not called digit_speaker_index\.wav"):
        fsdd_tar(clone)
    shutil.rmtree(clone / "recordings")
    with pytest.raises(DataError, match="has no recordings: files such as "):
        fsdd_tar(clone)


@pytest.mark.parametrize(
    ("task", "command"), [("gum", "gum"), ("go", "go"), ("fsdd", "fsdd"), ("cora", "cora"), ("cifar10_gray", "cifar10")]
)
def test_a_missing_set_is_answered_with_the_command(tmp_path: Path, task: str, command: str) -> None:
    assert f"`regard prepare {command} " in refused("train", task, "--data", str(tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    for convert in (cifar_arrays, gum_trees, go_lines, fsdd_tar):
        with pytest.raises(DataError, match=r" has (no|0) "):
            convert(tmp_path)
