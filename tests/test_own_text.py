"""A mechanism of another package, by its class or by the text `mypkg.mod:MyCore`, wherever a Spec is accepted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from regard import CATALOGUE, Can, Core, Dims, Mixer, Spec, attend, core, layer, load, register
from regard.blocks import Stack
from regard.cli import app
from regard.config import Config
from regard.data import synthetic
from regard.mixers.attention import Attention
from regard.mixers.base import Places
from regard.mixers.kv_cache import CachedCore
from regard.mixers.softmax import Softmax
from regard.mixers.unpad import UnpaddedMixer
from regard.models import language_model
from test_docs import ROOT

MODULE = '''
from regard import Dims
from regard.mixers.softmax import Softmax

class Sharp(Softmax):
    """Softmax attention, sharper.

    More about it.
    """

    def __init__(self, dims: Dims, *, factor: float = 1.0):
        super().__init__(dims, scale=factor / 2)
        self.factor = factor

class Needy(Softmax):
    def __init__(self, dims: Dims, *, size: int):
        super().__init__(dims)
        self.size = size

number = 3
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder holds a package of somebody else's, and the catalogue stays as it is."""
    (tmp_path / "ownpkg").mkdir()
    (tmp_path / "ownpkg" / "__init__.py").touch()
    (tmp_path / "ownpkg" / "mod.py").write_text(MODULE)
    (tmp_path / "ownpkg" / "broken.py").write_text("1 / 0")
    (tmp_path / "ownpkg" / "lacking.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(CATALOGUE)
    yield
    assert before == CATALOGUE
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownpkg"]:
        del sys.modules[name]


def test_a_text_and_a_class_build_the_same_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    made = layer("ownpkg.mod:Sharp(factor=2.0)", width=8, heads=2, causal=True)
    from ownpkg.mod import Sharp  # type: ignore[import-not-found]

    assert isinstance(made, Attention) and type(made.core) is Sharp and made.core.factor == 2.0
    again = layer(Spec(Sharp, factor=2.0), width=8, heads=2, causal=True)
    again.load_state_dict(made.state_dict())
    assert torch.equal(made(x), again(x))
    assert made.spec == again.spec == "ownpkg.mod:Sharp(factor=2.0)"
    for plain in (Sharp, "ownpkg.mod:Sharp", " ownpkg.mod:Sharp() ", {"name": "ownpkg.mod:Sharp"}):
        assert layer(plain, width=8, heads=2).spec == "ownpkg.mod:Sharp"


def test_specs_of_own_classes_are_values() -> None:
    spec = Spec.parse("ownpkg.mod:Sharp(2.0)")
    assert str(spec) == "ownpkg.mod:Sharp(factor=2.0)" and spec == Spec("ownpkg.mod:Sharp", factor=2.0) == Spec.parse(str(spec))
    assert Spec.from_json(spec.to_json()) == spec and hash(Spec.of(spec.to_json())) == hash(spec)
    row = spec.row
    assert (row.name, row.family, row.summary) == ("sharp", "own", "Softmax attention, sharper.")
    assert Spec.of(Softmax) == Spec("softmax") == Spec.parse("regard.mixers.softmax:Softmax")


def test_own_mechanisms_in_attend_stacks_and_models() -> None:
    dims = Dims(8, 2)
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    assert torch.allclose(attend(q, k, v, core("ownpkg.mod:Sharp", dims)), attend(q, k, v, core("softmax", dims)), atol=1e-6)
    stack = Stack.of(["ownpkg.mod:Sharp", Softmax], width=8, heads=2)
    assert [block.mixer.spec for block in stack.blocks] == ["ownpkg.mod:Sharp", "softmax"]
    config = Config(mixer="ownpkg.mod:Sharp(factor=2.0)", width=8, heads=2, depth=1, ffn=8)
    assert language_model(config, vocab=9)(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 9)


def test_a_class_that_no_module_has_works_in_its_process() -> None:
    class Inner(Softmax):
        pass

    made = layer(Inner, width=8, heads=2)
    assert isinstance(made, Attention) and type(made.core) is Inner
    assert Spec.parse(str(made.spec)).row.make is Inner


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ownpkg.nowhere:Sharp", "there is no module ownpkg.nowhere: write the one"),
        ("nowhere_at_all:Sharp", "there is no module nowhere_at_all"),
        ("ownpkg.mod:Sharpe", "ownpkg.mod has no Sharpe that is a regard.Core"),
        ("ownpkg.mod:number", "ownpkg.mod:number is no mechanism: it must be a subclass of regard.Core"),
        ("ownpkg.mod:Dims", "is no mechanism"),
        ("regard:Core", "is no mechanism"),
        ("ownpkg.mod:Sharp(factr=2)", "Sharp has no option 'factr': did you mean 'factor'"),
        ("ownpkg.mod:Sharp(factor=", "cannot be read"),
        ("ownpkg.mod:Needy", "size"),
        ("ownpkg.broken:Sharp", "ownpkg.broken cannot be imported: ZeroDivisionError"),
        ("ownpkg.lacking:Sharp", "ownpkg.lacking needs a_package_that_is_not_there, which is not installed"),
        ({"name": "ownpkg.mod:Sharp", "options": {"size": 1}}, "has no option 'size'"),
        ({"name": "ownpkg.mod:Sharp(factor=1)"}, "nothing is called"),
    ],
)
def test_wrong_texts_get_a_sentence(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + message.replace("(", r"\(")):
        layer(text, width=8, heads=2)


def test_wrong_classes_get_a_sentence() -> None:
    Spec.parse("ownpkg.mod:Sharp")  # imports the module
    from ownpkg.mod import Needy  # type: ignore[import-not-found]

    with pytest.raises(ValueError, match=r"Needy needs size: write Spec\(Needy, size=...\)"):
        layer(Needy, width=8, heads=2)
    for wrong in (dict, Core, Mixer):
        with pytest.raises(TypeError, match=r"subclass of regard.Core or regard.Mixer"):
            layer(wrong, width=8, heads=2)
    other = type("Needy", (Softmax,), {"__module__": "ownpkg.mod"})
    with pytest.raises(ValueError, match=r"ownpkg.mod has another Needy: name this class with regard.register"):
        layer(other, width=8, heads=2)


class NoMethods(Core):
    """A core that writes none of its methods."""

    can = Can.CAUSAL


class NoForward(Mixer):
    """A mixer that writes none of its methods."""

    can = Can.STREAM


class NoMix(UnpaddedMixer):
    """A mixer of unpadded tokens that writes none of its methods."""

    can = Can.CAUSAL


class NoAnswer(CachedCore):
    """A core with a cache that does not answer."""

    can = Can.CAUSAL


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoMethods, r"NoMethods does not define empty\(k, v\): write it, it must return a memory without tokens"),
        (NoForward, r"NoForward does not define forward\(x, .* must return the outputs \(b n w\)"),
        (NoMix, r"NoMix does not define mix\(x, places\).* must return the outputs \(b n w\)"),
        (NoAnswer, r"NoAnswer does not define answer\(log, q, places, causal\).* must return the answers \(b h n e\)"),
    ],
)
def test_a_method_that_a_class_lacks_is_named(make: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        layer(make, width=16, heads=2)(torch.randn(1, 5, 16))


def test_the_other_methods_that_a_class_lacks_are_named() -> None:
    core, mixer, x = NoMethods(Dims(16, 2)), NoForward(Dims(16, 2)), torch.randn(1, 2, 5, 8)
    places = Places.of_heads(x, None)
    for call, method in (
        (lambda: core.push(None, x, x, places), "push"),
        (lambda: core.read(None, x, places), "read"),
        (lambda: core.push_pooled(None, x, x, None), "push_pooled"),  # type: ignore[arg-type]
        (lambda: mixer.start(1), "start"),
        (lambda: mixer.extend(None, x), "extend"),  # type: ignore[arg-type]
        (lambda: NoMix(Dims(16, 2)).empty(1), "empty"),
        (lambda: NoMix(Dims(16, 2)).scan(None, x, places), "scan"),
    ):
        with pytest.raises(NotImplementedError, match=rf"does not define {method}\("):
            call()


def test_the_command_line_shows_it() -> None:
    shown = CliRunner().invoke(app, ["show", "ownpkg.mod:Sharp(factor=2.0)", "--length", "32"])
    assert shown.exit_code == 0 and "Softmax attention, sharper." in shown.output and "--out sharp.png" in shown.output
    wrong = CliRunner().invoke(app, ["show", "ownpkg.mod:Nothing"])
    assert wrong.exit_code == 2 and "ownpkg.mod has no Nothing" in wrong.output


def test_a_run_with_an_own_mechanism_is_trained_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = partial(synthetic.string_pairs, train=50, val=5, test=5)
    monkeypatch.setattr(synthetic, "string_pairs", drawn)
    mixer = "mixer=ownpkg.mod:Sharp(factor=2.0)"
    tiny = [mixer, "width=8", "heads=2", "depth=1", "ffn=8", "steps=2", "batch_tokens=256"]
    words = [word for text in tiny for word in ("--set", text)]
    made = CliRunner().invoke(app, ["train", "reverse", *words, "--device", "cpu"])
    assert made.exit_code == 0, made.output
    run = load(tmp_path / "runs" / "reverse-ownpkg.mod-Sharp-factor=2.0-1", device="cpu")
    assert {type(part).__name__ for part in run.model.modules()} >= {"Sharp"} and len(run.predict(["a b"])) == 1


class Warm(Softmax):
    """A mechanism of a package that is gone afterwards."""


def test_a_run_whose_mechanism_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "string_pairs", partial(synthetic.string_pairs, train=50, val=5, test=5))
    tiny = ["mixer=warm", "width=8", "heads=2", "depth=1", "ffn=8", "steps=1", "batch_tokens=256"]
    words = [word for text in tiny for word in ("--set", text)]
    register("warm", Warm, summary="")
    try:
        made = CliRunner().invoke(app, ["train", "reverse", *words, "--device", "cpu", "--out", "run"])
    finally:
        CATALOGUE.pop("warm")
    assert made.exit_code == 0, made.output
    for command in (["predict", "run", "a b"], ["evaluate", "run"], ["train", "reverse", "--out", "run"]):
        wrong = CliRunner().invoke(app, command)
        why = "run/config.json names a mechanism whose package may not be installed here: nothing is called 'warm'"
        assert wrong.exit_code == 2 and why in wrong.output, wrong.output


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package has entry points."""
    folder = tmp_path / "ownpkg-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ownpkg\nVersion: 1.0\n")
    points = [
        "sharp = ownpkg.mod:Sharp",
        "softmax = ownpkg.mod:Sharp",
        "gone = ownpkg.mod:Gone",
        "odd = ownpkg.mod",
        "twice = ownpkg.twice:Twice",
    ]
    (folder / "entry_points.txt").write_text("\n".join(["[regard.mechanisms]", *points]))
    twice = "from regard import register\nfrom regard.mixers.softmax import Softmax\nclass Twice(Softmax): ...\n"
    (tmp_path / "ownpkg" / "twice.py").write_text(twice + "register('twice', Twice, summary='Registered.')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("regard.spec.CATALOGUE", catalogue := dict(CATALOGUE))
    monkeypatch.setattr("regard.own_mechanism.CATALOGUE", catalogue)


@pytest.mark.usefixtures("installed")
def test_an_installed_package_names_its_mechanisms() -> None:
    assert "ownpkg" not in sys.modules and Spec("softmax").row.make is Softmax
    made = layer("sharp(factor=2.0)", width=8, heads=2)
    assert isinstance(made, Attention) and type(made.core).__module__ == "ownpkg.mod" and made.spec == "sharp(factor=2.0)"
    assert Spec.parse("ownpkg.mod:Sharp") == Spec("sharp") == Spec.of({"name": "sharp"})
    assert Spec("sharp").row.summary == "Softmax attention, sharper."
    assert Spec("twice").row.summary == "Registered."
    with pytest.raises(ValueError, match=r"ownpkg.mod has no Gone"):
        layer("gone", width=8, heads=2)
    with pytest.raises(ValueError, match=r"the entry point odd of regard.mechanisms must name one class"):
        Spec("odd")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("option", [[], ["--options"], ["--json"]])
def test_the_list_has_installed_mechanisms(option: list[str]) -> None:
    shown = CliRunner().invoke(app, ["list", *option])
    assert shown.exit_code == 0 and "ownpkg.mod:Sharp is left out: its name softmax is taken" in shown.stderr
    assert ('"class": "ownpkg.mod:Sharp"' if option == ["--json"] else "installed  sharp: ownpkg.mod:Sharp") in shown.stdout
    assert "ownpkg" not in sys.modules


def test_the_published_example_is_a_mechanism_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    made = layer("new_mechanism:Average", width=8, heads=2, causal=True)
    monkeypatch.delitem(sys.modules, "new_mechanism")
    assert made.spec == "new_mechanism:Average" and made(torch.randn(1, 5, 8)).shape == (1, 5, 8)
