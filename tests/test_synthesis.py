"""Speech synthesis: tones and their letters, samples from energies, the model and its loss, failures, the tasks and commands."""

import json
import os
import stat
import tarfile
import wave

import pytest
import torch
from typer.testing import CliRunner

from regard.analysis.alignment_failures import alignment_failure, diagonality, dtw_distance
from regard.cli import app
from regard.config import Config
from regard.data.griffin_lim import deemphasised, mel_powers, wav_of_mel
from regard.data.speech_features import log_mel, mel_filters
from regard.data.speech_sets import SpokenDigit
from regard.data.spoken_texts import digit_texts, part_of_text, read_corpus
from regard.data.text_files import DataError
from regard.data.tone_texts import read_tones, tone_texts, tones
from regard.data.wav_files import read_wav, write_wav
from regard.models.synthesiser import synthesiser
from regard.scores import character_errors
from regard.tasks import config, make_task
from regard.tasks.nearest_texts import nearest_texts
from regard.tasks.trained_run import load
from regard.training.fit import fit
from regard.training.synthesis_loss import last_frames, synthesis_loss

MEL = {"mels": 40, "low": 20.0, "high": 4000.0}
READ = {"low": 20.0, "high": 4000.0}
SMALL = {
    "width": 16, "heads": 2, "depth": 1, "decoder_depth": 1, "ffn": 16, "prenet": 8, "steps": 4, "validate_every": 2,
    "save_every": 2, "batch_tokens": 600, "warmup": 1, "phases": 4, "schedule": "constant",
}  # fmt: skip
SIZES = Config(width=16, heads=2, depth=1, decoder_depth=2, ffn=16, dropout=0.0, max_len=64)


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch):
    monkeypatch.setattr("regard.tasks.synthesis_sets.tone_texts", lambda: tone_texts(train=30, val=4, test=4))


def small(name="tones", folder=None, **changes):
    task = make_task(config(name).replace({**SMALL, **changes}))
    task.read(folder)
    return task


# data and samples


def test_letters_are_found_again_in_their_tones_and_in_samples_of_their_energies():
    made = tone_texts(train=20, val=3, test=5)
    assert [len(made[part]) for part in ("train", "val", "test")] == [20, 3, 5]
    texts = [x.text for part in made.values() for x in part]
    assert len(set(texts)) == 28 and [x.text for x in tone_texts(train=20, val=3, test=5)["val"]] == [x.text for x in made["val"]]
    mels = [log_mel(x.recording.samples, 8000, **MEL) for x in made["train"]]
    assert character_errors([read_tones(mel, **READ) for mel in mels], texts[:20]) == 0
    again = [log_mel(wav_of_mel(mel, 8000, rounds=30).samples, 8000, **MEL) for mel in mels]
    assert character_errors([read_tones(mel, **READ) for mel in again], texts[:20]) < 2
    assert character_errors([read_tones(mel.flip(0), **READ) for mel in mels], texts[:20]) > 50  # it can fail
    with pytest.raises(ValueError, match="'z' has no tone"):
        tones("az")


def test_samples_of_energies_have_nearly_those_energies():
    samples = tones("bad face").samples
    mel = log_mel(samples, 8000, **MEL)
    made = wav_of_mel(mel, 8000, loud=False)
    assert made.rate == 8000 and abs(len(made.samples) - len(samples)) < 200
    clear = mel > mel.max() - 8
    apart = {rounds: _apart(mel, wav_of_mel(mel, 8000, rounds=rounds, loud=False), clear) for rounds in (1, 60)}
    assert apart[60] < 0.5 < apart[1]
    assert float(wav_of_mel(mel, 8000).samples.abs().max()) == pytest.approx(0.8)
    emphasised = torch.cat([samples[:1], samples[1:] - 0.97 * samples[:-1]])
    torch.testing.assert_close(deemphasised(emphasised), samples, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="finite numbers"):
        wav_of_mel(mel * torch.nan, 8000)


def _apart(mel, recording, clear):
    return float((log_mel(recording.samples, 8000, **MEL) - mel)[clear].abs().mean())


def test_powers_are_not_negative_and_fit_the_energies():
    filters = mel_filters(20, 256, 8000, 20.0, 4000.0).double()
    energies = torch.rand(5, 129, dtype=torch.float64) @ filters.mT
    powers = mel_powers(energies, filters, rounds=300)
    assert (powers >= 0).all() and (powers @ filters.mT - energies).norm() / energies.norm() < 1e-3


def test_distances_and_failures():
    torch.manual_seed(0)
    x = torch.randn(12, 3)
    slow = x.repeat_interleave(2, 0)
    assert dtw_distance(x, x) == dtw_distance(x, slow) == 0 and dtw_distance(x, slow.flip(0)) > 0.3
    by_hand = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]])
    assert dtw_distance(*by_hand) == pytest.approx(1.0)  # cells (0, 0) and (1, 1): 0 and 2

    def failed(path, n=12, stopped=True):
        return alignment_failure(torch.eye(n)[path], stopped)

    assert failed(list(range(12))) == (False, False, False) and diagonality(torch.eye(12)) == 1
    assert failed([0, 1, 2, 6, 7, 8, 9, 10, 11]).skips is False  # three characters are left out
    assert failed([0, 1, 2, 7, 8, 9, 10, 11]) == (True, False, False)
    assert failed([0, 1, 2, 3, 4, 5, 6, 7]).skips and failed([4, 5, 6, 7, 8, 9, 10, 11]).skips  # at the ends
    assert failed([0, 2, 4, 6, 3, 8, 11]).repeats is False and failed([0, 2, 4, 6, 2, 8, 11]).repeats
    assert failed(list(range(12)), stopped=False).any
    assert diagonality(torch.eye(12).flip(1)) < 0.3
    assert nearest_texts(["abcd", "xyz"], ["dcba", "abce", "xy z"]) == [1, 2]


# the model


@pytest.mark.parametrize("reader", ["plain", "location", "monotonic"])
def test_a_model_speaks_step_by_step_what_the_whole_pass_gives_in_any_batch(reader):
    torch.manual_seed(0)
    model = synthesiser(SIZES, 20, 6, reader=reader, reduction=2, hidden=8).eval().double()
    source = torch.randint(5, 20, (3, 7))
    valid = torch.arange(7) < torch.tensor([7, 4, 6])[:, None]
    found = model.generate(source, valid, torch.tensor([9, 5, 7]))
    assert [len(x) for x in found.frames] == [2 * len(x) for x in found.weights]
    for row, (frames, weights, stopped) in enumerate(zip(*found, strict=True)):
        assert weights.shape[1] == int(valid[row].sum()) and len(weights) <= (9, 5, 7)[row]
        alone = model.generate(source[row : row + 1, : weights.shape[1]], None, torch.tensor([(9, 5, 7)[row]]))
        torch.testing.assert_close(alone.frames[0], frames, atol=1e-5, rtol=1e-5)
        assert alone.stopped[0] == stopped
        forced = model(source[row : row + 1], valid[row : row + 1], last_frames(frames[None].double(), 2))
        torch.testing.assert_close(forced[0, :, :-1].reshape(-1, 6).float(), frames, atol=1e-4, rtol=1e-4)


def test_dropout_stays_on_in_evaluation_and_a_seed_repeats_it():
    torch.manual_seed(0)
    model = synthesiser(SIZES, 20, 6, hidden=32, reduction=2).eval()
    source, inputs = torch.randint(5, 20, (1, 5)), torch.randn(1, 4, 6)

    def outputs(seed=1, always=True):
        model.embed.always = always
        model.embed.reseed(seed)
        return model(source, None, inputs).detach()

    assert torch.equal(outputs(), outputs()) and not torch.allclose(outputs(1), outputs(2))
    assert torch.equal(outputs(1, always=False), outputs(2, always=False)) and not torch.allclose(
        outputs(), outputs(always=False)
    )
    share = (model.embed.keep == 0).float().mean()
    assert 0.45 < share < 0.55 and set(model.embed.keep.unique().tolist()) == {0.0, 2.0}
    assert "embed.keep" not in model.state_dict()


def test_the_loss_is_that_of_frames_stops_and_guidance():
    torch.manual_seed(0)
    model = synthesiser(SIZES, 20, 6, hidden=8, reduction=2, dropout=0.0).double()
    source, frames = torch.randint(5, 20, (2, 5)), torch.randn(2, 8, 6, dtype=torch.float64)
    valid = torch.tensor([[True] * 4, [True, True, False, False]])

    def loss(**options):
        return synthesis_loss(model, source, None, frames, valid, reduction=2, **options)

    y = model(source, None, last_frames(frames, 2))
    apart = (y[..., :-1].reshape(2, 8, 6) - frames)[torch.tensor([[True] * 8, [True] * 4 + [False] * 4])]
    stops = torch.nn.functional.logsigmoid(
        torch.cat([-y[0, :3, -1], y[0, 3:, -1].repeat(5), -y[1, :1, -1], y[1, 1:2, -1].repeat(5)])
    )
    for kind, own in (("l1", apart.abs()), ("l2", apart.square()), ("l1+l2", apart.abs() + apart.square())):
        found = loss(kind=kind)
        torch.testing.assert_close(found.total, own.sum() / 12 - stops.sum())
        assert int(found.over) == 6
    guided = loss(guide=2.0)
    torch.testing.assert_close(guided.total, loss().total + 2 * guided.parts["guide"])
    guided.total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# tasks and commands


def test_a_run_speaks_into_a_file_and_a_picture(tmp_path):
    task = small()
    fit(task, tmp_path / "run", accelerator="cpu", quiet=True)
    run = str(tmp_path / "run")
    scores = load(run, device="cpu").evaluate("test")
    assert {"distance", "mel_error", "failures", "skips", "repeats", "endless", "cer", "floor_mean", "floor_nearest"} <= set(
        scores
    )
    assert all(value >= 0 for value in scores.values())
    out = tmp_path / "x.wav"
    done = CliRunner().invoke(app, ["predict", run, "bad face", "--out", str(out)])
    assert done.exit_code == 0 and "written" in done.output, done.output
    first = read_wav(out)
    assert first.rate == 8000 and len(first.samples) > 200
    other = CliRunner().invoke(app, ["predict", run, "bad face", "--out", str(out), "--set", "take=2"])
    assert other.exit_code == 0 and not torch.equal(first.samples, read_wav(out).samples)
    assert CliRunner().invoke(app, ["predict", run, "bad face", "--out", str(tmp_path / "x.png")]).exit_code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    line = CliRunner().invoke(app, ["predict", run, "bad face"])
    assert " s, " in line.stdout
    for words, why in (
        (["bad zoo", "--out", str(out)], "'z' is in no text that was learned"),
        (["bad zoo"], "'z' is in no text that was learned"),
        (["bad", "--out", str(tmp_path / "x.mp3")], "speech goes into a .wav file"),
        (["bad", "--out", str(tmp_path / "none" / "x.wav")], "there is no folder"),
        (["bad\nface", "--out", str(out)], "the speech of one text"),
    ):
        refused = CliRunner().invoke(app, ["predict", run, *words])
        assert refused.exit_code == 2 and why in " ".join(refused.output.split()), refused.output
    shown = load(run, device="cpu").attention(["bad face"])[0]
    assert shown.layers[0].weights.shape[2] == len("bad face") + 1 == len(shown.layers[0].keys)
    (tmp_path / "run" / "assets" / "synthesis.json").write_text(json.dumps({"mean": [0.0], "spread": [1.0], "pace": 1}))
    with pytest.raises(ValueError, match=r"synthesis\.json|assets"):
        load(run, device="cpu")


@pytest.mark.parametrize("reader", ["plain", "monotonic"])
def test_a_run_that_is_stopped_goes_on_to_the_same_weights(reader, tmp_path):
    """Validations, which speak with dropout, draw nothing from the generators of training."""
    whole = small(reader=reader)
    fit(whole, tmp_path / "whole", accelerator="cpu", quiet=True)
    task = small(reader=reader, steps=2)
    fit(task, tmp_path / "parts", accelerator="cpu", quiet=True)
    task.config = whole.config
    fit(task, tmp_path / "parts", accelerator="cpu", quiet=True)
    one, two = (load(tmp_path / name, device="cpu").model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_tones_task_learns_and_its_floors_are_scores():
    task = small(dropout=0.0, width=32, prenet=16)
    floors = task.floors("test")
    assert 0.2 < floors["floor_nearest"] < floors["floor_mean"] < 1.5
    torch.manual_seed(0)
    model, batch = task.model(), task.batch(task.splits["train"][:12])
    optimizer, losses = torch.optim.Adam(model.parameters(), 5e-3), []
    for step in range(40):
        loss = task.loss(model, batch, step).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reader": "cross"}, "reader"),
        ({"frame_loss": "mse"}, "frame_loss"),
        ({"reduction": 0}, "reduction"),
        ({"guide": -1.0}, "guide is at least 0"),
        ({"prenet_dropout": 1.0}, "prenet_dropout"),
    ],
)
def test_settings_that_fit_nothing_are_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        make_task(config("tones").replace(changes))


def digits(root):
    made = [
        SpokenDigit(tones("ab"[d % 2] + "cd"[voice == "bert"]), str(d), voice, take, "")
        for d in range(4)
        for voice in ("anna", "bert")
        for take in range(8)
    ]
    (root / "fsdd").mkdir()
    with tarfile.open(root / "fsdd" / "fsdd_recordings.tar", "w") as archive:
        for x in made:
            path = root / f"{x.digit}_{x.speaker}_{x.take}.wav"
            write_wav(path, x.recording)
            archive.add(path, f"recordings/{path.name}")
    return made


def test_digits_of_one_voice_are_joined_and_no_text_is_in_two_splits(tmp_path):
    made = digits(tmp_path)
    parts = digit_texts(made, "anna", train=30, val=4, test=4)
    assert all(part_of_text(x.text) == name for name, part in parts.items() for x in part) and len(parts["train"]) == 30
    task = small("fsdd_tts", tmp_path, voice="anna")
    assert "".join(task.vocabulary.characters) == " ehnortwz"
    assert set(task.score(task.model(), "val")) >= {"distance", "failures"}
    with pytest.raises(ValueError, match="no recording is by"):
        digit_texts(made, "carl")


def test_texts_that_are_too_long_are_left_out_and_counted():
    longest = max(len(x.frames) // 3 for x in small().splits["train"])
    task = small(max_len=longest - 1)
    assert task.left_out >= 1 and "left out" in task.describe_data()[1] and "left out" not in str(small().describe_data())
    with pytest.raises(ValueError, match="larger max_len"):
        small(max_len=2)


SPEAKER = """#!{python}
import sys, wave
out, text = sys.argv[sys.argv.index("-w") + 1], sys.argv[-1]
if "bad" in text:
    sys.exit("no such voice")
with wave.open(out, "wb") as file:
    file.setnchannels(1); file.setsampwidth(2); file.setframerate(22050)
    file.writeframes(bytes(range(256)) * 10 * len(text))
"""


def test_a_corpus_is_made_by_espeak_and_learned_from(tmp_path, monkeypatch):
    import sys

    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"Text  number {i} | here\n" for i in range(40)) + "\nx\n")
    out = tmp_path / "tts"
    asked = ["prepare", "espeak", str(texts), "--out", str(out)]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2 and "apt-get install espeak-ng" in " ".join(refused.output.split())
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "espeak-ng"
    program.write_text(SPEAKER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = CliRunner().invoke(app, [*asked, "--most", "35"])
    assert done.exit_code == 0 and "regard train tts --data" in done.output, done.output
    assert (out / "metadata.csv").read_text().splitlines()[1] == "00002|text number 1 here" and len(
        os.listdir(out / "wavs")
    ) == 35
    assert "is there already" in " ".join(CliRunner().invoke(app, asked).output.split())
    task = small("tts", out, mels=20)
    assert task.wav_rate == 16_000 and sum(map(len, task.splits.values())) == 35
    texts.write_text("this is bad\n")
    failed = CliRunner().invoke(app, ["prepare", "espeak", str(texts), "--out", str(tmp_path / "other")])
    assert failed.exit_code == 2 and "no such voice" in " ".join(failed.output.split())
    assert not (tmp_path / "other" / "metadata.csv").exists()


def test_damaged_corpora_are_refused_with_the_place(tmp_path):
    (tmp_path / "wavs").mkdir()
    for number in range(3):
        with wave.open(str(tmp_path / "wavs" / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(bytes(2000))
    for content, why in (
        ("0|a\nbroken\n", r"metadata\.csv, line 2: a line is name\|text"),
        ("0|a\n../x|b\n", r"line 2: '\.\./x' is no name"),
        ("0|a\n7|b\n", r"there is no file .*7\.wav"),
        ("0|a\n1|b\n", "too few texts"),
    ):
        (tmp_path / "metadata.csv").write_text(content)
        with pytest.raises(DataError, match=why):
            read_corpus(tmp_path)
    (tmp_path / "wavs" / "0.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"0\.wav is not a wav file"):
        read_corpus(tmp_path)
