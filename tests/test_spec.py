"""A mechanism as a value: text, Spec and JSON say the same, and what is unknown is answered with what is near."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.catalogue import CATALOGUE
from regard.mixers.attention import Attention
from regard.mixers.base import Core, Dims, Mixer
from regard.patterns import PATTERNS as pattern_names
from regard.patterns import Blocks, Causal, Dilated, Global, Local, Pattern, PerHead, Random, Stride, Tail, Truncated
from regard.spec import Spec, core, layer
from regard.spec import _patterned as patterned
from regard.spec import _spec_options as options_of  # what the law ranges over

SMALL = st.integers(1, 9)
ATOMS = st.one_of(
    st.builds(Local, SMALL),
    st.builds(Truncated, SMALL, SMALL),
    st.builds(Dilated, SMALL, SMALL),
    st.builds(Stride, SMALL),
    st.builds(Blocks, SMALL, SMALL),
    st.builds(Global, first=SMALL, at=st.lists(st.integers(0, 50), max_size=3).map(tuple)),
    st.builds(Tail, st.just(9), SMALL),
    st.builds(Random, SMALL, SMALL, seed=SMALL, per_head=st.booleans(), past=st.booleans()),
    st.just(Causal()),
)
JOINED = st.recursive(
    ATOMS, lambda inner: st.builds(lambda a, b, both: a & b if both else a | b, inner, inner, st.booleans()), max_leaves=5
)
PATTERNS = JOINED | st.lists(JOINED, min_size=1, max_size=3).map(PerHead)
LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any row, any of its options, any value: whether the value makes sense is for the constructor to say."""
    name = draw(st.sampled_from(sorted(CATALOGUE)))
    chosen = [option for option in options_of(name) if draw(st.booleans())]
    chosen += [option for option, p in options_of(name).items() if p.default is p.empty and option not in chosen]
    return Spec(name, **{option: draw(PATTERNS if option in patterned(name) else LITERALS) for option in chosen})


@settings(max_examples=150, deadline=None)
@given(specs())
def test_text_spec_and_json_say_the_same(spec: Spec) -> None:
    assert Spec.parse(str(spec)) == spec
    assert str(Spec.parse(str(spec))) == str(spec)
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert Spec.of(spec) is spec
    assert hash(Spec.of(str(spec))) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec


@settings(max_examples=100, deadline=None)
@given(PATTERNS)
def test_a_pattern_stands_for_sparse(pattern: Pattern) -> None:
    assert Pattern.parse(str(pattern)) == pattern
    assert Spec.of(pattern) == Spec.of(str(pattern)) == Spec("sparse", pattern=str(pattern))


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("softmax", Spec("softmax")),
        ("softmax()", Spec("softmax")),
        ("sparse(Local(8))", Spec("sparse", pattern=Local(8))),
        ("sparse('Local(8)')", Spec("sparse", pattern=Local(8))),
        ("Local(256) | Global(first=4)", Spec("sparse", pattern=Local(256) | Global(first=4))),
        ("relu('sum')", Spec("relu", norm="sum")),
    ],
)
def test_short_forms(text: str, same: Spec) -> None:
    assert Spec.parse(text) == same


def test_prints_as_one_would_type_it() -> None:
    assert str(Spec("softmax")) == "softmax"
    assert str(Spec("relu", norm="sum")) == "relu(norm='sum')"
    assert repr(Spec("relu", norm="sum")) == "Spec('relu', norm='sum')"
    assert str(Spec("sparse", pattern=Local(8) | Global(first=2))) == "sparse(pattern=Local(8) | Global(first=2))"


def test_the_order_of_options_does_not_matter() -> None:
    one, two = list(options_of("bigbird"))[:2]
    assert Spec("bigbird", **{one: 8, two: 3}) == Spec("bigbird", **{two: 3, one: 8})


def test_is_a_value() -> None:
    with pytest.raises(AttributeError):
        Spec("softmax").name = "relu"  # type: ignore[misc]
    spec = Spec("relu", norm="sum")
    spec.options["norm"] = "count"
    assert spec.options == {"norm": "sum"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Spec("sofmax"), "did you mean 'softmax'?"),
        (lambda: Spec("relu", nrom="sum"), "did you mean 'norm'?"),
        (lambda: Spec("softmax", scale=float("inf")), "too large"),
        (lambda: Spec("softmax", scale=torch.ones(())), "cannot take"),
        (lambda: Spec.of("sofmax"), "did you mean 'softmax'?"),
        (lambda: Spec.of("sparse(Locl(8))"), "did you mean 'Local'?"),
        (lambda: Spec.of("sparse"), "missing a required argument: 'pattern'"),
        (lambda: Spec.of("3"), "not a mechanism"),
        (lambda: Spec.of("softmax | relu"), "joins two patterns"),
        (lambda: Spec.of({"nme": "softmax"}), '"options"'),
        (lambda: Spec.of({"name": "softmax", "options": {"scal": 1}}), "did you mean 'scale'?"),
        (lambda: Spec("relu", norm=Local(8)), "cannot take"),
    ],
)
def test_a_mistake_is_answered_with_what_is_near(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_of_anything_else_says_so() -> None:
    with pytest.raises(TypeError, match="a mechanism is a Spec"):
        Spec.of(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CATALOGUE)
def test_builds_a_layer(name: str) -> None:
    spec = Spec(name, **CATALOGUE[name].examples[0].options)
    mixer = layer(str(spec), width=32, heads=4, max_len=64)
    assert isinstance(mixer, Mixer)
    assert mixer(torch.randn(2, 40, 32)).shape == (2, -(-40 // mixer.rate), 32)


def test_a_core_gets_the_projections_of_all_cores() -> None:
    dims = Dims(width=32, heads=4)
    assert isinstance(core("relu(norm='sum')", dims), Core)
    mixer = Spec("softmax").build(dims, shared_qk=True)
    assert isinstance(mixer, Attention)
    assert mixer.q is mixer.k


def test_a_whole_layer_has_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(Mixer):
        pass

    monkeypatch.setitem(CATALOGUE, "whole", replace(CATALOGUE["softmax"], name="whole", make=Whole))
    assert isinstance(layer(Spec("whole"), width=32, heads=4), Whole)
    with pytest.raises(ValueError, match="leave out shared_qk"):
        layer(Spec("whole"), width=32, heads=4, shared_qk=True)
    with pytest.raises(ValueError, match="is a whole layer"):
        core(Spec("whole"), Dims(width=32, heads=4))


ROOT = Path(__file__).parents[1]
CALL = re.compile(r"(?<![\w.'\"])([A-Za-z_]\w*)\(((?:[^()`\n]|\([^()`\n]*\))*)\)")
KNOWN = {name.lower() for name in (*CATALOGUE, *pattern_names)}


def quoted(text: str) -> list[str]:
    """The specs and patterns in a text, also those with capitals where none belong; formulas and placeholders left out."""
    found = []
    for call in CALL.finditer(text.replace("\\|", "|")):
        words = re.findall(r"(?<!['\w])[a-z_]+\w*(?!\w*\s*[=('\w])", call[2])  # neither options, nor calls, nor strings
        plain = not words and not re.search(r"\.\.\.|[{}<>^/+]", call[2]) and re.search(r"\d|=", call[2])
        stem = call.string.endswith("stem=", 0, call.start())  # a setting of images that is no mechanism
        if call[1].lower() in KNOWN and plain and not stem:
            found.append(call[0])
    return found


def test_specs_in_messages_and_documents_can_be_read() -> None:
    """A sentence that recommends a spec must not recommend one that the parser refuses."""
    assert quoted(
        "stem=conv(layers=2), a pattern such as local(64), `sparse(Local(3) \\| Stride(2))`, relu(W1 x), Blocks(size, around=0)"
    ) == [
        "local(64)",
        "sparse(Local(3) | Stride(2))",
    ]
    texts = [path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    for path in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        pairs = [pair for node in nodes if isinstance(node, ast.Dict) for pair in zip(node.keys, node.values, strict=True)]
        stems = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "stem"]
        own = [node for node in nodes if isinstance(node, ast.Constant) and node not in stems]
        texts += [node.value for node in own if isinstance(node.value, str)]
    found = [spec for text in texts for spec in quoted(text)]
    assert len(found) > 60
    for spec in found:
        Spec.parse(spec)
