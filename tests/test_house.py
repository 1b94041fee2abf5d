"""Check the shape of the code base: one name for one thing, imports in one direction, plain wording. See benchmarks/house.py."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_PATH = list(sys.path)
sys.path.insert(0, str(ROOT / "benchmarks"))

import house  # noqa: E402

sys.path[:] = _PATH

WORDS = 3.0  # personified words per 1,000, over all packages


def test_no_public_name_is_defined_in_two_modules():
    assert house.homonyms(public=True) == {}


def test_few_names_are_defined_in_two_modules():
    assert house.homonym_share() < 3


def test_no_file_name_occurs_twice():
    assert house.repeated_files() == []


def test_every_package_has_a_place_in_the_order():
    parts = {path.relative_to(house.SOURCE).parts[0].removesuffix(".py") for path in house.modules(house.SOURCE)}
    assert parts == set(house.ORDER)


@pytest.mark.parametrize("package", house.ORDER)
def test_imports_go_one_way(package):
    """Imports inside functions and for type checkers count."""
    allowed = house.ORDER[: house.ORDER.index(package)]
    found = house.imports().get(package, {})
    assert {name: files for name, files in found.items() if name not in allowed} == {}


def test_no_cycles_between_packages():
    assert house.cycles() == []


def test_personified_words_are_rare():
    assert house.word_rate() < WORDS


def test_the_glossary_names_every_file():
    text = (ROOT / "DESIGN.md").read_text()
    files = [path.relative_to(house.SOURCE).as_posix() for path in house.modules(house.SOURCE)]
    assert [name for name in files if f"`{name}`" not in text and not name.endswith("__init__.py")] == []


@pytest.mark.parametrize(
    "word", ["KV cache", "generate", "prefill", "CUDA graph", "RNG", "BPE dropout", "R-Drop", "non-autoregressive", "backend"]
)
def test_the_words_of_the_field_find_something(word):
    """A file that holds a word in its text, and an identifier of it."""
    texts = [path.read_text() for path in house.modules(house.SOURCE)]
    assert any(word.lower() in text.lower() for text in texts)


def _module(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_measures_find_what_they_are_for(tmp_path):
    """Each measure reports a defect planted in a small package."""
    root = tmp_path / "regard"
    _module(root, "a/one.py", '"""Say what `who` is."""\nif True:\n    LIMIT = 1\n\ndef _f(): pass\n')
    _module(root, "b/one.py", "if TYPE_CHECKING:\n    from regard.a import one\nLIMIT: int = -(1 + 2)\n")
    _module(root, "a/two.py", "def f():\n    from regard.b.one import LIMIT  # nobody\n    return LIMIT  # noqa: who\n")
    assert house.repeated_files(root) == ["one"]
    assert house.homonyms(root, public=True) == {"LIMIT": ["a/one.py", "b/one.py"]}
    assert house.homonyms(root, public=False) == {}
    assert house.homonym_share(root) == pytest.approx(100 / 3)
    assert house.cycles(root) == [("a", "b")]
    assert [word for path in house.modules(root) for _, word in house.personified(path)] == ["say", "nobody"]
    assert house.word_rate(root) == pytest.approx(1000 * 2 / 4)
    assert house.density(root / "b" / "one.py") == 2 / 2


def test_a_sparse_forward_takes_few_calls_in_few_files():
    calls, switches = house.forward_calls()
    assert calls < 70
    assert switches < 25


def test_every_benchmark_reads_its_command_line():
    """One that does not would measure for minutes, and write its results, when it is asked for --help."""
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    silent = [path.name for path in scripts if not re.search(r"ArgumentParser\(|only_words\(", path.read_text())]
    assert len(scripts) > 30 and silent == []
