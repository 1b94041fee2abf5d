"""AN4 in the layouts of its downloads: SPHERE files, wav files, cepstra of Sphinx."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.data.an4_download import an4_arrays
from regard.data.speech_sets import read_an4
from regard.data.sphere_files import parse_sphere
from regard.data.text_files import DataError
from regard.tasks import config, make_task
from test_cli import refused, run
from test_prepare_sets import contents, tar_folder, zip_folder

UTTERANCES = {
    "train": {f"an4_clstk/{voice}/an{i}-{voice}-b": f"GO {'ABC'[i]}" for voice in ("fash", "fbbh") for i in range(3)},
    "test": {"an4test_clstk/mmxg/cen5-mmxg-b": "ONE TWO"},
}


def samples(name: str) -> np.ndarray:
    """About a third of a second of noise that is the utterance's own."""
    return np.random.default_rng(len(name) + sum(name.encode())).integers(-9000, 9000, 5000).astype(np.int16)


def sphere(data: np.ndarray, order: str = "01", **changes: str) -> bytes:
    values = {
        "sample_count -i": str(len(data)),
        "sample_n_bytes -i": "2",
        "channel_count -i": "1",
        f"sample_byte_format -s{len(order)}": order,
        "sample_rate -i": "16000",
        "sample_coding -s3": "pcm",
    }
    head = "NIST_1A\n   1024\n" + "".join(f"{key} {value}\n" for key, value in (values | changes).items()) + "end_head\n"
    return head.encode().ljust(1024) + data.astype("<i2" if order == "01" else ">i2").tobytes()


def as_sphere(path: Path, data: np.ndarray) -> None:
    path.with_suffix(".sph").write_bytes(sphere(data, "01" if len(path.name) % 2 else "10"))


def as_wav(path: Path, data: np.ndarray) -> None:
    with wave.open(str(path.with_suffix(".wav")), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(data.astype("<i2").tobytes())


def layout(folder: Path, write, below: str = "wav") -> Path:
    (folder / "etc").mkdir(parents=True)
    for part, texts in UTTERANCES.items():
        names = [f"{name}\n" for name in texts]
        marks = ("<s> ", " </s>") if part == "train" else ("", "")
        lines = [f"{marks[0]}{text}{marks[1]} ({name.rpartition('/')[2]})\n" for name, text in texts.items()]
        (folder / f"etc/an4_{part}.fileids").write_text("".join(names))
        (folder / f"etc/an4_{part}.transcription").write_text("".join(reversed(lines)))  # the list gives the order
        for name in texts:
            path = folder / below / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, samples(name))
    return folder


def test_recordings_become_the_cepstra_that_predict_computes(tmp_path: Path) -> None:
    an4 = layout(tmp_path / "an4", as_sphere)
    sources = [an4, tar_folder(an4, tmp_path / "an4_sphere.tar.gz"), zip_folder(an4, tmp_path / "an4.zip")]
    sources.append(layout(tmp_path / "wavs/an4", as_wav))
    for number, source in enumerate(sources):
        done = run("prepare", "an4", str(source), "--out", str(tmp_path / str(number)))
        assert done.exit_code == 0 and "6 utterances" in done.stdout and "regard train an4 --data" in done.stdout
        assert contents(tmp_path / str(number)) == contents(tmp_path / "0")
    train, val, test = read_an4(tmp_path / "0")
    assert [x.name for x in test] == [*UTTERANCES["test"]] and test[0].text == "ONE TWO"
    assert {x.name: x.text for x in (*train, *val)} == UTTERANCES["train"] and {x.speaker for x in val} == {"fash"}
    made = make_task(config("an4"))
    of_wav = made.read_windows(str(sources[-1] / "wav/an4test_clstk/mmxg/cen5-mmxg-b.wav"))
    torch.testing.assert_close(torch.from_numpy(test[0].cepstra), of_wav[:, :13], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("order", ["<", ">"])
def test_cepstra_of_sphinx_are_kept_and_come_before_recordings(tmp_path: Path, order: str) -> None:
    kept: dict[str, np.ndarray] = {}

    def as_cepstra(path: Path, data: np.ndarray) -> None:
        kept[path.name] = data[: 13 * 30].astype(np.float32).reshape(-1, 13)
        path.with_suffix(".mfc").write_bytes(
            np.array([13 * 30], f"{order}i4").tobytes() + kept[path.name].astype(f"{order}f4").tobytes()
        )

    an4 = layout(tmp_path / "an4", as_cepstra, "feat")
    as_sphere_here = an4 / "wav/an4test_clstk/mmxg"
    as_sphere_here.mkdir(parents=True)
    as_sphere(as_sphere_here / "cen5-mmxg-b", samples("another"))
    assert run("prepare", "an4", str(an4), "--out", str(tmp_path / "out")).exit_code == 0
    for x in (y for part in read_an4(tmp_path / "out") for y in part):
        assert np.array_equal(x.cepstra, kept[x.name.rpartition("/")[2]])


def test_both_byte_orders_of_sphere_files_are_read() -> None:
    data = samples("a")
    little, big = (parse_sphere(sphere(data, order), "a.sph") for order in ("01", "10"))
    assert torch.equal(little.samples, big.samples) and little.rate == 16_000
    assert np.array_equal(little.samples.numpy() * 2**15, data)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"RIFF", "does not begin with NIST_1A"),
        (sphere(samples("a"))[:600], r"cut off: 0 of 10,000 bytes"),
        (sphere(samples("a"))[:-2], r"cut off: 9,998 of 10,000 bytes"),
        (sphere(samples("a")).replace(b"end_head", b"end_hand"), "end_head is missing"),
        (sphere(samples("a"), **{"sample_coding -s3": "ulaw"}), "samples of 'ulaw' in 2 bytes"),
        (sphere(samples("a"), **{"channel_count -i": "2"}), "2 channels, not 1"),
        (sphere(samples("a"), **{"sample_count -i": "many"}), "'many' for sample_count, not a number"),
        (sphere(samples("a"), **{"sample_rate -i": "3"}), "3 samples a second"),
    ],
)
def test_damaged_sphere_files_are_refused(raw: bytes, why: str) -> None:
    with pytest.raises(DataError, match=rf"^a\.sph.*{why}"):
        parse_sphere(raw, "a.sph")


def test_damaged_downloads_are_refused(tmp_path: Path) -> None:
    an4 = layout(tmp_path / "an4", as_sphere)
    lost = an4 / "wav/an4_clstk/fash/an1-fash-b.sph"
    whole = lost.read_bytes()
    lost.unlink()
    with pytest.raises(DataError, match=r"an4_train\.fileids lists an4_clstk/fash/an1-fash-b, which is not there"):
        an4_arrays(an4)
    lost.write_bytes(sphere(samples("a"), **{"sample_rate -i": "8000"}))
    with pytest.raises(DataError, match=r"an1-fash-b\.sph has 8,000 samples a second, not 16,000"):
        an4_arrays(an4)
    lost.write_bytes(whole)
    words = an4 / "etc/an4_test.transcription"
    words.write_text("ONE TWO\n")
    with pytest.raises(DataError, match=r"an4_test\.transcription, line 1 is not words and a name in parentheses: 'ONE TWO'"):
        an4_arrays(an4)
    words.write_text("ONE TWO (another)\n")
    with pytest.raises(DataError, match="cen5-mmxg-b, which has no transcription"):
        an4_arrays(an4)
    words.unlink()
    with pytest.raises(DataError, match=r"lacks etc/an4_test\.transcription"):
        an4_arrays(an4)
    (tmp_path / "feat/a/b").mkdir(parents=True)
    cepstra = tmp_path / "feat/a/b/c.mfc"
    for raw, why in (
        (b"\x01\x00\x00\x00", "does not count the others"),
        (b"\x01\0\0\0\0\0\0\0", "1 numbers: they are no windows of 13"),
    ):
        cepstra.write_bytes(raw)
        with pytest.raises(DataError, match=why):
            an4_arrays(tmp_path / "feat")
    raw_only = layout(tmp_path / "raw/an4", lambda path, data: path.with_suffix(".raw").write_bytes(data.tobytes()))
    with pytest.raises(DataError, match=r"byte order nothing says: use an4_sphere\.tar\.gz"):
        an4_arrays(raw_only)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no recordings: files such as "):
        an4_arrays(tmp_path / "empty")
    assert "`regard prepare an4 " in refused("train", "an4", "--data", str(tmp_path))
