"""Tasks on recordings, on small data sets that are made here: training, exact resume, answers to wav files, refusals."""

import io
import math
import tarfile

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.data.speech_features import centred, raised_floor, trimmed
from regard.data.speech_sets import read_an4, read_fsdd
from regard.data.text_files import DataError, why_no_archive
from regard.data.wav_files import Recording, write_wav
from regard.decoding.ctc_search import CtcBeam
from regard.tasks import config, make_task
from regard.tasks.live_recognition import LIVE_WITHIN, LiveRecogniser
from regard.tasks.trained_run import load
from regard.training.fit import fit

TINY = {
    "width": 16, "heads": 2, "depth": 1, "ffn": 16, "kernel": 3, "steps": 4, "validate_every": 2, "save_every": 2,
    "batch_tokens": 1500, "warmup": 1, "speeds": [1.0, 1.1], "max_len": 128, "average": 1, "precision": "32",
}  # fmt: skip
VOICES = ("anna", "bert", "carl")


def sound(digit: int, voice: int, take: int) -> Recording:
    """A tone for each digit, higher for other voices."""
    n = 700 + 40 * take + 60 * digit
    hertz = 300 + 150 * digit + 40 * voice
    return Recording(0.5 * (2 * math.pi * hertz / 8000 * torch.arange(n)).sin() + 0.01 * torch.randn(n), 8000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data sets in the form of the real ones: three digits by three voices in twelve takes, and twelve utterances of cepstra."""
    root = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    for name in ("fsdd", "an4"):
        (root / name).mkdir()
    with tarfile.open(root / "fsdd" / "fsdd_recordings.tar.xz", "w:xz") as archive:
        for digit in range(3):
            for voice, called in enumerate(VOICES):
                for take in range(12):
                    path = root / f"{digit}_{called}_{take}.wav"
                    write_wav(path, sound(digit, voice, take))
                    archive.add(path, f"recordings/{path.name}")
        info = tarfile.TarInfo("README.md")
        archive.addfile(info, io.BytesIO())
    for part, many in (("train", 18), ("test", 4)):
        lengths = np.arange(40, 40 + many)
        np.savez(
            root / "an4" / f"an4_{part}_mfcc13.npz",
            feat=np.random.default_rng(0).standard_normal((lengths.sum(), 13)).astype(np.float16),
            offset=np.concatenate([[0], lengths.cumsum()]),
            text=np.array([("YES", "GO ON", "A B")[i % 3] for i in range(many)]),
            id=np.array([f"an4/v{i % 10}/a{i}" for i in range(many)]),
        )
    return root


def tiny(name, **changes):
    own = {"held_out": ["carl"]} if name in ("fsdd", "fsdd_strings") else {}
    own |= {"held_out": ["bert", "carl"]} if name == "fsdd_speaker" else {}
    own |= {"mels": 16} if name.startswith("fsdd") else {"decoder_depth": 1}
    return config(name).replace({**TINY, **own, **changes})


def trained(name, folder, out, **changes):
    task = make_task(tiny(name, **changes))
    task.read(folder)
    fit(task, out, accelerator="cpu", quiet=True)
    return task


@pytest.fixture(autouse=True)
def _few_strings(monkeypatch):
    monkeypatch.setattr("regard.tasks.recognition.STRINGS", {"train": 20, "val": 4, "test": 4})


@pytest.mark.parametrize("name", ["fsdd", "fsdd_speaker", "an4", "fsdd_strings"])
def test_a_task_trains_scores_and_answers_a_wav_file(name, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(folder))
    trained(name, folder, tmp_path / "run")
    run = load(tmp_path / "run", device="cpu")
    scores = run.evaluate("test")
    expected = {"fsdd": "accuracy recordings", "fsdd_speaker": "accuracy recordings eer_new"}.get(name, "wer cer utterances")
    assert list(scores) == expected.split()
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(folder / "0_anna_0.wav")])
    assert done.exit_code == 0 and done.stdout.endswith("\n"), done.output
    if name == "fsdd":
        assert done.stdout.strip() in "012"
    bad = tmp_path / "bad.wav"
    bad.write_bytes(b"RIFF and nothing")
    for path, why in ((bad, "not a wav file"), (tmp_path / "none.wav", "there is no file")):
        refused = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(path)])
        assert refused.exit_code == 2 and why in refused.output and path.name in refused.output


def test_a_run_that_is_stopped_goes_on_to_the_same_weights(folder, tmp_path):
    """Augmentation draws from the generators that a checkpoint holds."""
    whole = trained("fsdd", folder, tmp_path / "whole", schedule="constant")
    task = make_task(tiny("fsdd", steps=2, schedule="constant"))
    task.read(folder)
    fit(task, tmp_path / "parts", accelerator="cpu", quiet=True)
    task.config = whole.config
    fit(task, tmp_path / "parts", accelerator="cpu", quiet=True)
    one, two = (load(tmp_path / name, device="cpu").model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_the_mean_of_a_recording_is_left_to_tell_voices():
    """Subtracted from every recording, it left new voices at chance."""
    assert config("fsdd_speaker").normalise == "train" and config("fsdd").normalise == "mean"


@pytest.mark.parametrize("text, why", [("no method works:\n- gz: no\n- xz: no", "no method works"), ("", "it is cut off")])
def test_a_damaged_archive_is_one_line_whatever_its_error_says(text, why):
    assert why_no_archive(EOFError(text)) == why


def test_the_normaliser_is_moved_to_a_device_once(folder):
    """A captured pass may not copy from the host."""
    task = make_task(tiny("fsdd_speaker"))
    task.read(folder)
    windows = torch.zeros(2, 5, 16, device="meta")
    task.normalised(windows)
    moved = task.normaliser
    task.normalised(windows)
    assert task.normaliser is moved and moved.mean.device.type == "meta"


def test_digits_are_cut_and_get_a_floor_that_training_moves(folder):
    """What a recording is normalised to does not depend on its batch; in training its floor is another one each time."""
    changes = {"trim": 22.0, "floor": 35.0, "floor_change": 9.0, "time_masks": 0, "bands": 0}
    task, plain = (make_task(tiny("fsdd", **x)) for x in (changes, {"trim": 0.0, "floor": 0.0, "floor_change": 0.0}))
    task.read(folder)
    plain.read(folder)
    rows = list(task.splits["test"])[:4]
    assert all(trimmed(x.windows, 22.0).equal(y.windows) for x, y in zip(plain.splits["test"], task.splits["test"], strict=True))
    batch = task.batch(rows)
    found = task.prepared(batch).source
    for x, row in zip(found, rows, strict=True):
        alone = centred(raised_floor(row.windows, 35.0), spread=False)
        torch.testing.assert_close(x[: len(row.windows)], alone, atol=1e-5, rtol=0)
    torch.manual_seed(0)
    moved = task.prepared(batch, training=True).source
    torch.manual_seed(0)
    floors = 35.0 + 9.0 * (2 * torch.rand(4) - 1)
    assert len(set(floors.tolist())) == 4
    for x, row, decibels in zip(moved, rows, floors.tolist(), strict=True):
        alone = centred(raised_floor(row.windows, decibels), spread=False)
        torch.testing.assert_close(x[: len(row.windows)], alone, atol=1e-5, rtol=0)


def test_who_is_held_out_is_only_in_test(folder):
    task = make_task(tiny("fsdd"))
    task.read(folder)
    assert {x.voice for x in task.splits["test"]} == {"carl"} and len(task.splits["test"]) == 36
    assert {x.voice for x in task.splits["train"]} == {x.voice for x in task.splits["val"]} == {"anna", "bert"}
    assert len(task.splits["train"]) == 2 * 2 * 3 * 7  # two speeds, two voices, three digits, seven takes
    official = make_task(tiny("fsdd", held_out=[]))
    official.read(folder)
    assert [len(official.splits[part]) for part in ("train", "val", "test")] == [2 * 9 * 2, 9 * 5, 9 * 5]
    voices = make_task(tiny("fsdd_speaker", held_out=["carl"]))
    voices.read(folder)
    assert voices.labels == ["anna", "bert"] and {x.label for x in voices.splits["train"]} == {0, 1}
    for held_out, why in ((["dora"], "no recording is by"), (list(VOICES), "no voice to learn from")):
        with pytest.raises(ValueError, match=why):
            make_task(tiny("fsdd", held_out=held_out)).read(folder)


def test_two_recordings_are_verified(folder, tmp_path):
    trained("fsdd_speaker", folder, tmp_path / "run", held_out=["carl"])
    run = load(tmp_path / "run", device="cpu")
    same, other = folder / "0_anna_0.wav", folder / "2_bert_0.wav"
    first, second = run.predict([f"{same}\t{same}", f"{same}\t{other}"])
    assert float(first) == pytest.approx(1, abs=1e-3) and -1 <= float(second) < 1
    assert "eer" in run.evaluate("test", folder)


@pytest.mark.parametrize("reader", ["location", "monotonic"])
def test_decoders_of_an4_by_settings(reader, folder):
    torch.manual_seed(0)
    task = make_task(tiny("an4", reader=reader))
    task.read(folder)
    model, rows = task.model(), task.splits["test"]
    with torch.no_grad():
        for decode in ("ctc", "attention", "joint"):
            assert len(task.texts(model, rows, beams=2, decode=decode)) == len(rows)
    (weights,) = task.alignment(model, str(folder / "0_anna_0.wav"))
    assert weights.shape[0] == 2 and (weights >= 0).all() and (weights.sum(-1) < 1.001).all()
    wide = task.texts(model, rows, beams=3, decode="ctc")
    assert [task.texts(model, [row], beams=3, decode="ctc")[0] for row in rows] == wide  # padding is as if absent


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("an4", {"features": "mel"}, "no recordings"),
        ("an4", {"ctc_weight": 1.0, "decode": "joint"}, "no decoder"),
        ("an4", {"ctc_weight": 0.0}, "decode=attention"),
        ("an4", {"ctc_weight": 1.5}, "share of the loss"),
        ("fsdd", {"speeds": [3.0]}, "speeds are"),
        ("fsdd", {"band_width": 99}, "band_width"),
        ("fsdd", {"time_share": 2.0}, "time_share"),
        ("fsdd", {"features": "fbank"}, "features"),
        ("fsdd", {"features": "mfcc", "mels": 16}, "trim and floor are of log energies"),
        ("fsdd", {"trim": -1.0}, "trim is in decibels"),
        ("fsdd", {"floor": 5.0, "floor_change": 6.0}, "floor_change is at most floor"),
        ("fsdd", {"halvings": 0}, "halvings=0 has none"),
        ("fsdd", {"features": "mfcc", "mels": 4, "band_width": 2}, "cepstra"),
    ],
)
def test_settings_that_fit_nothing_are_refused(name, changes, why):
    with pytest.raises(ValueError, match=why):
        make_task(tiny(name, **changes))


def test_files_that_are_damaged_are_refused_with_their_names(folder, tmp_path):
    raw = (folder / "fsdd" / "fsdd_recordings.tar.xz").read_bytes()
    (tmp_path / "fsdd_recordings.tar.xz").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DataError, match=r"fsdd_recordings\.tar\.xz"):
        read_fsdd(tmp_path)
    (tmp_path / "fsdd_recordings.tar.xz").unlink()
    for name, content, why in (("0_anna_0.wav", b"RIFF", r"0_anna_0\.wav is not a wav"), ("x.wav", b"", "not called")):
        with tarfile.open(tmp_path / "fsdd_recordings.tar", "w") as archive:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        with pytest.raises(DataError, match=why):
            read_fsdd(tmp_path)
    for part in ("train", "test"):
        (tmp_path / f"an4_{part}_mfcc13.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"an4_train_mfcc13\.npz is not a whole"):
        read_an4(tmp_path)
    arrays = {
        "feat": np.zeros((5, 13), np.float16),
        "offset": np.array([0, 4]),
        "text": np.array(["A"]),
        "id": np.array(["a/b/c"]),
    }
    np.savez(tmp_path / "an4_train_mfcc13.npz", **arrays)
    with pytest.raises(DataError, match="offset does not cut"):
        read_an4(tmp_path)


def test_a_recording_for_a_run_of_texts_is_refused(folder, tmp_path):
    task = make_task(config("reverse").replace({"width": 8, "heads": 1, "depth": 1, "ffn": 8, "steps": 1}))
    task.read()
    task.splits = {name: rows[:4] for name, rows in task.splits.items()}
    task.texts = {name: rows[:4] for name, rows in task.texts.items()}
    fit(task, tmp_path / "run", accelerator="cpu", quiet=True)
    refused = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(folder / "0_anna_0.wav")])
    assert refused.exit_code == 2 and "is a recording" in refused.output


def spread_out(model):
    """Weights large enough for other classes than one."""
    for name, p in model.named_parameters():
        if name.startswith("ctc") and p.dim() == 2:
            torch.nn.init.normal_(p, std=2.0)
    return model.eval()


@pytest.mark.parametrize("halvings", [0, 2])
def test_a_live_recogniser_computes_what_the_whole_pass_does(halvings, folder, monkeypatch):
    torch.manual_seed(0)
    task = make_task(tiny("fsdd_strings", mixer="Truncated(4, 2)", halvings=halvings, beam=4))
    task.read(folder)
    model = spread_out(task.model())
    recording = Recording(torch.cat([sound(d, 0, d).samples for d in range(3)]), 8000)
    whole = model.slots(task.normalised(task.windows_of(recording))[None]).logs[0].detach()
    for size in (80, 333, 5000):
        live, found, written = LiveRecogniser(task, model), [], ""
        monkeypatch.setattr(live.beam, "extend", lambda logs, found=found, own=live.beam.extend: (found.append(logs), own(logs)))
        fed = 0
        for part in recording.samples.split(size):
            written += live.feed(part)
            fed += len(part)
            due = fed / 8000 - live.latency  # what is older than the latency is final
            assert sum(map(len, found)) * 2**halvings * 0.01 >= min(due, 0.01 * len(whole)) - 1e-6
        written += live.finish()
        logs = torch.cat(found)
        real = logs.isfinite()
        torch.testing.assert_close(logs[real], whole[real], atol=1e-4, rtol=1e-4)
        assert len(logs) == len(whole)
        beam = CtcBeam(4, within=LIVE_WITHIN)
        beam.extend(logs)
        assert written == task.vocabulary.decode(beam.answers()[0].tokens)
    short = LiveRecogniser(task, model)
    assert short.feed(torch.zeros(20)) == "" and isinstance(short.finish(), str)


def test_the_command_recognises_live_and_refuses_what_cannot_be(folder, tmp_path):
    trained("fsdd_strings", folder, tmp_path / "run")
    wav = str(folder / "0_anna_0.wav")
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), wav, "--live"])
    assert done.exit_code == 0 and "words are decided" in done.output, done.output
    refused = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), "a text", "--live"])
    assert refused.exit_code == 2 and "--live is for a wav file" in refused.output
    for changes, why in (
        ({"normalise": "utterance"}, "normalise=train"),
        ({"features": "mfcc"}, "features=mel"),
        ({"positions": "sinusoidal"}, "added to tokens"),
        ({"mixer": "softmax"}, "any number of tokens ahead"),
    ):
        task = make_task(tiny("fsdd_strings", **changes))
        task.read(folder)
        with pytest.raises(ValueError, match=why):
            LiveRecogniser(task, task.model())
