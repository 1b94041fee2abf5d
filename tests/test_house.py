"""Check the shape of the code base: one name for one thing, imports in one direction, plain wording. See benchmarks/house.py."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_PATH = list(sys.path)
sys.path.insert(0, str(ROOT / "benchmarks"))

import house  # noqa: E402

sys.path[:] = _PATH

# A package (or top-level module) imports only what is in front of it here. `__init__` is that of regard itself.
ORDER = (
    *("_version", "checks", "text", "transforms", "cache", "data"),
    *("patterns", "ops", "mixers", "positions", "catalogue_row", "catalogue", "spec"),
    *("blocks", "analysis", "config", "models", "runtime", "decoding"),
    *("scores", "training", "tasks", "pretrained", "plots", "__init__", "cli"),
)
# Left to be removed: these four hold what is still there, and shrink only.
SHARED_NAMES = {"CPU", "DECODING", "GPU"}
SHARED_FILES = {"attention"}
CYCLES = {("tasks", "training")}
WORDS = 10.0  # personified words per 1,000, over all packages

LIMIT = 3.0  # personified words per 1,000, in each of these
PLAIN = (
    *("_version.py", "cache.py", "catalogue.py", "catalogue_row.py", "checks.py", "scores.py", "spec.py", "text.py"),
    *("transforms.py", "analysis", "data", "plots", "pretrained"),
    *(f"patterns/{name}.py" for name in ("__init__", "algebra", "density", "drawn", "edge_list", "fixed", "relative")),
    *(f"training/{name}.py" for name in ("atomic_files", "averaging", "checkpoints", "ctc", "graphed_step", "guided_loss")),
    *(f"training/{name}.py" for name in ("interrupts", "losses", "lr_schedule", "metrics_log", "prefetch", "progress")),
    *(f"training/{name}.py" for name in ("reinforce", "result", "rng", "run_weights")),
)


def test_no_public_name_is_defined_in_two_modules():
    assert set(house.homonyms(public=True)) <= SHARED_NAMES


def test_few_names_are_defined_in_two_modules():
    assert house.homonym_share() < 3


def test_no_file_name_occurs_twice():
    assert set(house.repeated_files()) <= SHARED_FILES


def test_every_package_has_a_place_in_the_order():
    parts = {path.relative_to(house.SOURCE).parts[0].removesuffix(".py") for path in house.modules(house.SOURCE)}
    assert parts == set(ORDER)


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package):
    """Imports inside functions and for type checkers count."""
    allowed = ORDER[: ORDER.index(package)]
    found = house.imports().get(package, {})
    open_ones = {name for cycle in CYCLES if package in cycle for name in cycle}
    assert {name: files for name, files in found.items() if name not in allowed and name not in open_ones} == {}


def test_no_cycles_between_packages():
    assert set(house.cycles()) <= CYCLES


def test_personified_words_are_rare():
    assert house.word_rate() < WORDS


@pytest.mark.parametrize("part", PLAIN)
def test_docstrings_and_comments_are_plain(part):
    assert house.word_rate(house.SOURCE / part) < LIMIT


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
