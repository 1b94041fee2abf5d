"""benchmarks/exposure_bias.py: the rest behind a forced token, scored by its definition."""

import runpy
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from regard.data import synthetic
from regard.data.batch import BEGIN, END
from regard.tasks import config, make_task

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        yield runpy.run_path(str(ROOT / "benchmarks" / "exposure_bias.py"))


def test_the_rest_is_scored_by_edits_with_its_end(bench):
    score = bench["rest_score"]
    assert score([7, 8, 9], [7, 8, 9]) == 100 and score([], []) == 100
    assert score([7, 8], [7, 8, 9]) == 75 and score([5] * 20, [7]) == 0


def test_wrong_tokens_are_wrong_and_the_same_for_every_mode(bench):
    examples = [([5, 6], [5, 6, 7, END]), ([6, 8], [8, 9, END])]
    for share in bench["SHARES"]:
        found = bench["wrong_tokens"](examples, share)
        assert found == bench["wrong_tokens"](examples, share)
        assert all(
            token != target[place] and place < len(target) - 1
            for (place, token), (_, target) in zip(found, examples, strict=True)
        )


def test_a_model_is_fed_the_prefix_the_forced_token_and_then_itself(bench, monkeypatch):
    monkeypatch.setattr(synthetic, "string_pairs", cache(partial(synthetic.string_pairs, train=40, val=5, test=12)))
    made = make_task(config("reverse").replace({"width": 16, "heads": 2, "depth": 1, "ffn": 16, "max_len": 64}))
    made.read()
    torch.manual_seed(1)
    model = made.model().eval()
    examples = list(made.splits["test"])
    forced = bench["wrong_tokens"](examples, 0.4)
    found = bench["rest_scores"](made, model, examples, forced, True)
    for (source, target), (place, token), score in zip(examples[:4], forced, found, strict=False):
        fed, said = [BEGIN, *target[:place], token], list[int]()
        most = 2 * max(len(other) for (_, other), (at, _) in zip(examples, forced, strict=True) if at == place)
        while len(said) < most and END not in said:
            scores = model(torch.tensor([source]), None, torch.tensor([[*fed, *said]]))[0, -1].detach()
            scores[[0, 1, 2, 4]] = -torch.inf  # special tokens but END
            said.append(int(scores.argmax()))
        answer = [word for word in said if word != END]
        assert score == pytest.approx(bench["rest_score"](answer, target[place + 1 : -1]), abs=1e-9)
