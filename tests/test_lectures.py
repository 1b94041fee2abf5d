"""docs/lectures.md: every command, example, law and test that it names exists, and what it corrects is right.

Dotted names are in test_site.py.
"""

import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

from regard import CATALOGUE, Spec, layer, tasks
from regard.blocks import Stack
from regard.cli import app
from regard.cli.settings import check_used, config_of
from regard.laws import LAWS
from regard.models import Encoder, LanguageModel, NextToken, Patches, Tokens, pooled
from regard.training.losses import cross_entropy

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "lectures.md").read_text().replace("\\|", "|")
QUOTED = sorted(set(re.findall(r"`([^`]+)`", PAGE)))
COMMANDS = [text for text in QUOTED if text.startswith("regard ")]
TESTS = [text for text in QUOTED if "::" in text]
SPECS = [  # gat needs edges
    text for text in QUOTED if re.fullmatch(r"[A-Z]\w+\(.*\)|[a-z_]+\(.*=.*\)", text) or (text in CATALOGUE and text != "gat")
]


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_exists_with_what_it_names(text):
    command, *words = shlex.split(text)[1:]
    known = typer.main.get_command(app).commands
    assert command in known
    options = {option for one in known[command].params for option in one.opts}
    assert {word for word in words if word.startswith("--")} <= options
    if command == "train":
        check_training(words)
    elif command in ("show", "check") and words[0] != "RUN":
        Spec.of(words[0])
    for option, name in pairwise(words):
        if option == "--law":
            assert name in LAWS
        if option == "--mixers":
            assert [Spec.of(text) for text in name.split(", ")]


def check_training(words):
    """Put the settings together as the command does."""
    values = {key: [b for a, b in pairwise(words) if a == key] for key in ("--mixer", "--set", "--preset")}
    config = config_of(words[0], values["--mixer"], values["--set"], None, None, next(iter(values["--preset"]), None))
    check_used(tasks.make_task(config), values["--set"])


@pytest.mark.parametrize("text", SPECS)
def test_a_mechanism_or_pattern_is_one(text):
    assert Spec.of(text)


def test_examples_tests_and_laws_are_there():
    for name in re.findall(r"`((?:examples|benchmarks)/\w+\.py)`", PAGE):
        assert (ROOT / name).is_file(), name
    for text in TESTS:
        path, _, name = text.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), text
    for part in re.findall(r"laws? ((?:`\w+`(?:, )?)+)", PAGE):
        assert set(re.findall(r"`(\w+)`", part)) <= LAWS.keys(), part
    assert len(TESTS) > 20 and len(COMMANDS) > 50


@cache
def tokens(n=7, width=16):
    return torch.randn(2, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_softmax_is_over_the_keys_of_each_query():
    weights = layer("softmax", width=16, heads=2).double().weights(tokens())
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert not torch.allclose(weights.sum(-2), torch.ones_like(weights[..., 0]))  # over queries it is anything


def test_softmax_knows_differences_alone():
    x = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert torch.allclose(x.softmax(-1), (x + 1000).softmax(-1))

    def ratio(pair):
        return float((pair[0] - pair[1]) / (pair[0] + pair[1]))

    assert ratio(x.softmax(-1)) > ratio(x)
    near = torch.tensor([0.1, -0.09], dtype=torch.float64)
    assert ratio(near.softmax(-1)) < ratio(near) / 100


def test_a_decoder_has_an_order_without_positions():
    order, x = torch.tensor([3, 0, 6, 2, 5, 1, 4]), tokens()
    encoder = Stack.of("softmax", width=16, heads=2, depth=2).double().eval()
    decoder = Stack.of("softmax", width=16, heads=2, depth=2, causal=True).double().eval()
    assert torch.allclose(encoder(x[:, order]), encoder(x)[:, order])  # equivariant
    assert not torch.allclose(encoder(x[:, order]), encoder(x))  # and not invariant
    assert torch.allclose(pooled(encoder(x[:, order]), None, "mean"), pooled(encoder(x), None, "mean"))
    assert not torch.allclose(decoder(x[:, order]), decoder(x)[:, order])
    assert not torch.allclose(decoder(x[:, order])[:, -1], decoder(x)[:, -1])


def test_a_head_reads_every_channel():
    made = layer("softmax", width=16, heads=4)
    assert {name for name, p in made.named_parameters() if p.dim() == 2} == {f"{part}.weight" for part in "qkv"} | {"out.weight"}
    assert (made.q.weight[:4] != 0).any(0).all()  # of the first head, at all 16 channels of a token


def test_a_table_is_the_product_with_one_hot_vectors():
    embed, ids = Tokens(9, 16, scale=False), torch.tensor([[3, 8, 3]])
    assert torch.allclose(embed(ids), nn.functional.one_hot(ids, 9).float() @ embed.table.weight)


def test_no_weight_depends_on_the_length():
    made = Encoder(Tokens(9, 16), Stack.of("softmax", width=16, heads=2, depth=1))
    assert [made(torch.randint(9, (1, n))).x.shape[1] for n in (1, 5, 300)] == [1, 5, 300]


def test_losses_of_tokens_add_up_to_that_of_the_sentence():
    """The sum over tokens is minus the logarithm of the probability of the whole answer, which sums to 1 over all answers."""
    torch.manual_seed(1)
    model = (
        LanguageModel(Tokens(4, 8), Stack.of("softmax", width=8, heads=2, depth=1, causal=True), NextToken(8, 4)).double().eval()
    )
    answers = torch.cartesian_prod(*[torch.arange(4)] * 3)
    fed = torch.cat([torch.zeros_like(answers[:, :1]), answers[:, :-1]], 1)
    with torch.no_grad():
        losses = torch.stack([cross_entropy(model(a[None]), b[None]).total for a, b in zip(fed, answers, strict=True)])
    assert float(torch.exp(-losses).sum()) == pytest.approx(1)


def test_attention_has_fewer_weights_than_a_small_convolution():
    attention = sum(p.numel() for p in layer("softmax", width=64, heads=4).parameters() if p.dim() == 2)
    assert attention == 4 * 64**2 < nn.Conv2d(64, 64, 3, bias=False).weight.numel() == 9 * 64**2


def test_patches_of_sixteen_pixels():
    assert Patches(3, 16, 32)(torch.zeros(1, 3, 224, 224)).shape[1] == 196
