"""Masked-language pre-training: which tokens are predicted, floors, exact resume, blanks, and second stages."""

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.data import synthetic
from regard.data.batch import BEGIN, MASK, NO_LABEL
from regard.data.masked_floors import STRENGTH, MaskedPlace, NeighbourCounts
from regard.data.vocabulary import FIRST_TEXT_ID
from regard.tasks import config, make_task
from regard.training.checkpoints import change_run, load_run
from regard.training.fit import fit
from regard.training.token_masking import Masking, mask_tokens
from test_cli import run

TINY = {
    "width": 16,
    "heads": 2,
    "depth": 1,
    "ffn": 32,
    "mixer": "softmax",
    "steps": 6,
    "validate_every": 3,
    "save_every": 3,
    "batch_tokens": 512,
    "warmup": 2,
    "schedule": "constant",
}
WORDS = ["the", "cat", "dog", "sees", "a", "bird", "and", "sleeps"]


@pytest.fixture(autouse=True, scope="module")
def _small_data():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tagging_sentences", "opinion_sentences"):
            real = getattr(synthetic, name)
            patch.setattr(synthetic, name, cache(lambda real=real: real(train=200, val=20, test=20)))
        yield


def lines(tmp_path, count=60):
    dice = np.random.default_rng(3)
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(" ".join(dice.choice(WORDS, 9)) for _ in range(count)))
    return str(path)


def task_of(name="mlm", **changes):
    made = make_task(config(name).replace({**TINY, **changes}))
    made.read()
    return made


def trained(folder, made):
    fit(made, folder, accelerator="cpu", quiet=True)
    return load_run(folder).weights


def test_shares_are_those_of_the_paper_and_nothing_else_changes():
    dice = torch.Generator().manual_seed(5)
    tokens = torch.randint(FIRST_TEXT_ID, 500, (400, 41), generator=dice)
    tokens[:, 0], tokens[:, 7] = BEGIN, 1
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[::2, 33:] = False  # whatever is there
    found = mask_tokens(tokens, valid, Masking(), torch.arange(500), dice)
    real = found.targets != NO_LABEL
    can = (tokens >= FIRST_TEXT_ID) & valid
    assert real.sum(1).tolist() == [max(1, round(0.15 * count)) for count in can.sum(1).tolist()]
    there, shown = tokens.gather(1, found.places), found.inputs.gather(1, found.places)
    assert torch.equal(there[real], found.targets[real]) and bool(can.gather(1, found.places)[real].all())
    predicted = torch.zeros_like(can).scatter(1, found.places, real)
    assert torch.equal(found.inputs[~predicted], tokens[~predicted])
    masked, kept = (shown == MASK)[real].double().mean(), (shown == there)[real].double().mean()
    assert abs(masked - 0.8) < 0.03 and abs(kept - 0.1) < 0.03
    assert int(shown[real & (shown != MASK)].min()) >= FIRST_TEXT_ID
    again = mask_tokens(tokens, valid, Masking(), torch.arange(500), dice)
    assert not torch.equal(again.places, found.places)  # drawn anew


def test_every_token_is_predicted_as_often_as_every_other():
    tokens = torch.full((6000, 12), 9)
    found = mask_tokens(tokens, None, Masking(), torch.arange(20), torch.Generator().manual_seed(1))
    counts = torch.bincount(found.places.flatten()[found.targets.flatten() != NO_LABEL], minlength=12)
    assert int(counts.sum()) == 2 * 6000 and int(counts.min()) > 900 and int(counts.max()) < 1100


def test_a_masked_spelled_word_has_no_letters_and_a_random_one_has_its_own():
    forms = torch.cat([torch.arange(12)[:, None], torch.arange(36).view(12, 3) + 100], 1)
    forms[:FIRST_TEXT_ID, 1:] = 0
    tokens = forms[torch.randint(FIRST_TEXT_ID, 12, (50, 20))]
    found = mask_tokens(tokens, None, Masking(0.5, 0.5, 0.5), forms)
    assert torch.equal(found.inputs, forms[found.inputs[..., 0]]) and bool((found.inputs[..., 0] == MASK).any())


def test_floors_are_the_definition():
    rows, size = [[2, 5, 6, 7], [2, 5, 7, 7], [2, 6, 6]], 9
    counts = NeighbourCounts(rows, size)
    share = np.array([0] * 5 + [3, 4, 4, 1]) / 12
    assert np.allclose(counts.shares, share)
    pair = np.zeros((size, size))
    for row in rows:
        for a, b in pairwise(row):
            pair[a, b] += 1
    total = np.array([sum(row.count(token) for row in rows) for token in range(size)])
    for left, right in [(5, 7), (2, -1), (-1, 6), (-1, -1)]:
        chance = STRENGTH * share + (pair[left] if left >= 0 else 0)
        if right >= 0:
            chance = chance * (pair[:, right] + STRENGTH * share[right]) / (total + STRENGTH)
        chance[:5] = 0
        assert np.allclose(counts.chances(left, right), chance / chance.sum())
    found = counts.bigram([MaskedPlace(2, 6, 5), MaskedPlace(2, 6, 8)])
    assert found.accuracy == 50
    both = counts.chances(2, 6)[[5, 8]]
    assert found.perplexity == pytest.approx(float(np.exp(-np.log(both).mean())))


@pytest.mark.parametrize("units", ["subwords", "words", "characters", "bytes", "spelled"])
def test_units_train_score_and_fill_blanks(units, tmp_path):
    made = task_of(file=lines(tmp_path), units=units, vocab=400, window=16)
    assert max(map(made.size, made.splits["train"])) <= 16
    first = made.score(model := made.model(), "val")
    assert made.score(model, "val") == first  # the same places every time, and in every run
    assert task_of(file=lines(tmp_path), units=units, vocab=400, window=16, seed=2).score(model, "val") == first
    trained(tmp_path / "run", made)
    again = make_task(made.config)
    again.restore(made.assets())
    again.model().load_state_dict(model.state_dict())
    assert again.predict(model, ["the cat [MASK] a", ""]) == made.predict(model, ["the cat [MASK] a", ""])
    filled = made.predict(model, ["The cat [MASK] a [MASK]."])[0]
    assert filled.startswith("The cat ") and "[MASK]" not in filled and filled.endswith(".")
    assert made.attention(model, "the [MASK] dog").layers[0].weights.shape[0] == 2
    with pytest.raises(ValueError, match=r"line 2 has no \[MASK\]"):
        made.predict(model, ["a [MASK]", "a"])


def test_the_loss_is_that_of_predicted_tokens_alone(tmp_path):
    made = task_of(file=lines(tmp_path), units="words", vocab=100, dropout=0.0)
    batch, model = made.batch(made.splits["train"][:4]), made.model().eval()
    torch.manual_seed(4)
    with torch.no_grad():
        loss = made.loss(model, batch, 1)
    torch.manual_seed(4)
    drawn = mask_tokens(batch.source, batch.source_valid, made.masking, torch.arange(len(made.units)))
    scores = model(drawn.inputs, batch.source_valid).detach().log_softmax(-1)  # of all tokens
    rows = [(b, int(p), int(t)) for b in range(4) for p, t in zip(drawn.places[b], drawn.targets[b], strict=True) if t >= 0]
    assert int(loss.over) == len(rows) == 4  # one of nine words
    assert float(loss.total) == pytest.approx(-sum(float(scores[row]) for row in rows), rel=1e-5)


def test_a_small_model_is_above_its_floors_where_the_far_side_decides(tmp_path):
    """Of each text the last word repeats the first: what neighbours do not tell."""
    dice = np.random.default_rng(1)
    rows = [[first := str(dice.choice(WORDS)), *dice.choice(["x", "y"], 3), first] for _ in range(400)]
    (tmp_path / "f.txt").write_text("\n".join(" ".join(row) for row in rows))
    small = {
        "steps": 150,
        "validate_every": 150,
        "save_every": 150,
        "batch_tokens": 1024,
        "lr": 1e-2,
        "width": 32,
        "dropout": 0.0,
    }
    made = task_of(file=str(tmp_path / "f.txt"), units="words", vocab=100, **small, predicted=0.2)
    fit(made, tmp_path / "run", accelerator="cpu", quiet=True)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["val"]
    assert line["accuracy"] > line["bigram"] + 8 and line["perplexity"] < line["bigram_perplexity"] < line["floor_perplexity"]


@pytest.mark.parametrize("units", ["words", "spelled"])
def test_a_run_that_goes_on_is_the_run_that_was_never_interrupted(units, tmp_path):
    changes = {"corpus": "saw", "units": units, "vocab": 100}
    whole = trained(tmp_path / "whole", task_of(**changes))
    trained(tmp_path / "parts", task_of(**changes, steps=3))
    parts = trained(tmp_path / "parts", task_of(**changes))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


STAGES = {
    "polarity": ({"corpus": "polarity", "units": "words"}, {}),
    "saw": ({"corpus": "saw", "units": "spelled", "spelling": 8}, {"spelling": 8}),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_second_stage_starts_from_the_first_and_goes_on_exactly(name, tmp_path):
    first, second = STAGES[name]
    weights = trained(tmp_path / "first", task_of(**first))
    then = {**second, "init_from": str(tmp_path / "first")}
    made = task_of(name, **then)
    state = made.model().state_dict()
    kept = {key: x for key, x in weights.items() if key.startswith("encoder.")}
    assert kept and all(torch.equal(state[key], x) for key, x in kept.items())
    fresh = task_of(name, **second).model().state_dict()
    assert any(state[key].shape != fresh[key].shape or not torch.equal(state[key], fresh[key]) for key in kept)
    assert {key for key in state if key not in kept} == {"head.map.weight", "head.map.bias"}
    assets = load_run(tmp_path / "first").assets
    assert all(made.assets()[key] == text for key, text in assets.items() if key in made.assets())  # its vocabulary
    whole = trained(tmp_path / "whole", task_of(name, **then))
    trained(tmp_path / "parts", task_of(name, **then, steps=3))
    parts = trained(tmp_path / "parts", task_of(name, **then))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    again = make_task(made.config)  # a finished run does not need the first one any more
    again.restore(made.assets())
    (tmp_path / "first").rename(tmp_path / "gone")
    assert again.model().state_dict().keys() == state.keys()


@pytest.mark.parametrize("name", STAGES)
def test_a_second_stage_that_has_begun_does_not_need_the_first(name, tmp_path, monkeypatch):
    first, second = STAGES[name]
    monkeypatch.chdir(tmp_path)
    trained(Path("first"), task_of(**first))
    words = [x for key, value in {**TINY, **second, "init_from": "first"}.items() for x in ("--set", f"{key}={value}")]
    train = ["train", name, "--device", "cpu", "--json"]
    assert run(*train, *words, "--out", "whole").exit_code == 0
    begun = [text.replace(f"steps={TINY['steps']}", "steps=3") for text in words]
    assert run(*train, *begun, "--out", "parts").exit_code == 0
    Path("first").rename("gone")
    kept = json.loads(Path("parts/config.json").read_text())
    assert kept["init_from"] == str(tmp_path / "first")
    change_run(Path("parts"), {**kept, "init_from": "first"})  # as an earlier version wrote it
    done = run(*train, "--out", "parts", "--set", f"steps={TINY['steps']}")
    assert done.exit_code == 0, done.output
    one, other = (load_run(Path(folder)).weights for folder in ("whole", "parts"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert run(*train, "--out", "parts").exit_code == 0  # it is finished
    assert "holds no run" in run(*train, *words, "--out", "new").stderr


def test_what_does_not_fit_is_refused_with_the_settings_that_differ(tmp_path):
    trained(tmp_path / "first", task_of(corpus="polarity", units="words"))
    where = str(tmp_path / "first")
    with pytest.raises(ValueError, match=r"has width=16, units=words, but here it is width=32, units=subwords: both stages"):
        task_of("polarity", init_from=where, width=32, units="subwords")
    with pytest.raises(ValueError, match=re.escape("a run of mlm without words.json, which saw needs: `regard train mlm")):
        task_of("saw", init_from=where)
    with pytest.raises(ValueError, match=r"init_from=.*nowhere holds no run"):
        task_of("polarity", init_from=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"init_from=.* lacks 'encoder.stack"):
        task_of("polarity", init_from=where, mixer="conv").model()
    assert "init_from has one" in make_task(config("polarity").replace({"init_from": where})).unused()["vocab"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "which texts\\? Give --file FILE, or --set corpus="),
        ({"corpus": "saw", "file": "x"}, "the texts are in one place"),
        ({"corpus": "nothing"}, "corpus"),
        ({"masked": 0.9, "random": 0.2}, "masked and random together at most 1"),
        ({"predicted": 0.0}, "predicted must be above 0"),
        ({"window": 2000, "corpus": "saw"}, "window must be at most max_len"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        task_of(**changes)


def test_lines_of_a_book_are_joined(tmp_path):
    made = task_of(file=lines(tmp_path), units="words", vocab=100, window=32, join=True)
    assert {len(row) for row in made.splits["train"][:-1]} == {32} and all(row[0] == BEGIN for row in made.splits["train"])


def test_in_the_command_line(tmp_path):
    file = lines(tmp_path)
    out = str(tmp_path / "run")
    words = [x for text in ("units=words", "vocab=100", *(f"{k}={v}" for k, v in TINY.items())) for x in ("--set", text)]
    done = run("train", "mlm", "--file", file, *words, "--out", out, "--device", "cpu")
    assert done.exit_code == 0 and "the likeliest token between its neighbours" in done.stderr, done.stderr
    scores = json.loads(run("evaluate", out, "--json", "--device", "cpu").stdout)["scores"]
    assert {"perplexity", "accuracy", "floor", "bigram"} <= scores.keys()
    answer = run("predict", out, "a [MASK] bird", "--device", "cpu").stdout.split()
    assert answer[0] == "a" and answer[1] in WORDS and answer[2] == "bird"
    assert run("predict", out, "a [MASK] bird", "--set", "top=3", "--device", "cpu").stdout.count("%") == 3
    assert "it has no [MASK]" in run("predict", out, "a bird").stderr
    assert "vocab does nothing here" in run("train", "mlm", "--file", file, "--set", "units=bytes", "--set", "vocab=9").stderr
