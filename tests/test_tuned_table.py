"""Tables of kernel configurations: the shipped one, merging, REGARD_TUNED, refusals, writing."""

import ast
import json
import os
from pathlib import Path

import pytest
import torch

from regard.bench import tune_candidates
from regard.bench.tune import table_writer
from regard.bench.tune_workloads import TUNE_CASES
from regard.cli.tune_command import KERNEL_FAMILIES
from regard.ops.triton_support import kernel_config, read_tables_again, trial_configs
from regard.ops.tuned_table import (
    DEFAULT_CARD,
    LAUNCH_OPTIONS,
    OWN_TABLE,
    TUNED,
    TableError,
    check_table,
    current_table,
    find_config,
    kernel_fields,
    merge_tables,
    read_table,
    shipped_table,
    table_text,
)
from regard.training.atomic_files import RunError

pytestmark = pytest.mark.usefixtures("shipped_tables")
CPU = torch.device("cpu")
SHIPPED = shipped_table()
GOOD = {"BM": 16, "BN": 32, "num_warps": 2, "num_stages": 1}
ENTRY = ("tile_forward", "half 64")
CONSTANTS = "_constants", "block_constants", "_score_constants", "_parts"  # functions that ask for a configuration


def test_the_shipped_table_has_the_fields_of_every_kernel():
    check_table(SHIPPED, SHIPPED, TUNED.name)
    assert all("any" in keys for keys in SHIPPED[DEFAULT_CARD].values())
    assert table_text(SHIPPED) == TUNED.read_text()


def kernels_in_code():
    """Names that the launches request: first arguments of functions that return configurations."""
    found = set()
    for path in TUNED.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("kernel_config", "_config", "config", "tiles", *CONSTANTS):
                found.add(node.args[0].value)
    return found


def test_every_kernel_in_the_code_has_a_default_and_candidates():
    named = kernels_in_code()
    assert {
        "tile_forward",
        "linear_sums",
        "delta_walk",
        "bucket_forward",
        "window_step",
        "few_keys_forward",
        "balance_parts",
    } <= named
    assert named == set(SHIPPED[DEFAULT_CARD])
    assert named == {kernel for case in TUNE_CASES for kernel in case.candidates}
    assert {case.family for case in TUNE_CASES} == set(KERNEL_FAMILIES)


@pytest.mark.parametrize("case", TUNE_CASES, ids=lambda case: f"{case.family}, {case.name}")
def test_candidates_change_fields_of_their_kernel(case):
    for kernel, candidates in case.candidates.items():
        assert len({str(changes) for changes in candidates}) == len(candidates) > 1
        for changes in candidates:
            assert set(changes) <= {*kernel_fields(SHIPPED, kernel), *LAUNCH_OPTIONS}


def test_grids_and_tiles_of_candidates():
    assert tune_candidates.grid(BE=(16, 32), num_warps=(2,)) == ({"BE": 16, "num_warps": 2}, {"BE": 32, "num_warps": 2})
    assert tune_candidates.tiles("BN", "BM", ((64, 32, 4, 1),)) == ({"BN": 64, "BM": 32, "num_warps": 4, "num_stages": 1},)


def test_merging_replaces_entries_and_keeps_the_rest():
    merged = merge_tables(SHIPPED, {"card": {"tile_forward": {"half 64": GOOD}}, DEFAULT_CARD: {"linear_scan": {"new": GOOD}}})
    assert find_config(merged, "card", *ENTRY) == GOOD
    assert find_config(merged, "card", "tile_forward", "half 128") == SHIPPED[DEFAULT_CARD]["tile_forward"]["any"]
    assert find_config(merged, "other", *ENTRY) == SHIPPED[DEFAULT_CARD]["tile_forward"]["half 64"]
    assert set(merged[DEFAULT_CARD]["linear_scan"]) == {"any", "new"}
    assert shipped_table() == SHIPPED
    assert "new" not in SHIPPED[DEFAULT_CARD]["linear_scan"]
    with pytest.raises(KeyError, match="no configuration of nothing for half 64"):
        find_config(SHIPPED, "card", "nothing", "half 64")


def test_a_file_of_the_environment_comes_before_the_shipped_table(tmp_path, monkeypatch):
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"interpreter": {"tile_forward": {"half 64": GOOD}}}))
    before = kernel_config(*ENTRY, CPU)
    monkeypatch.setenv(OWN_TABLE, str(own))
    read_tables_again()
    assert kernel_config(*ENTRY, CPU) == GOOD != before
    assert kernel_config("tile_forward", "half 128", CPU) == before
    assert kernel_config("tile_key_gradients", "half 64", CPU) == SHIPPED["interpreter"]["tile_key_gradients"]["any"]


BAD_TABLES = [
    ("{", "own.json is not JSON: .* at line 1"),
    ("[]", "own.json has list where an object should be, with a card for every name"),
    ('{"card": 1}', "own.json at 'card' has int where an object should be, with a kernel for every name"),
    ('{"card": {"tile_forward": []}}', "'card' / 'tile_forward' has list where .* with a key"),
    ('{"card": {"tile_forward": {"any": 4}}}', "'card' / 'tile_forward' / 'any' has int where .* with a configuration"),
    (
        '{"card": {"tile_froward": {}}}',
        "own.json: 'card' / 'tile_froward' is no kernel of this version; kernels are",
    ),
    ('{"card": {"tile_forward": {"half 64": {"BM": 64}}}}', "own.json: 'card' / 'tile_forward' / 'half 64' lacks BN; its fields"),
    ('{"card": {"delta": {"any": {"chunk": 64, "BM": 1}}}}', "'card' / 'delta' / 'any' has BM, which its kernel does not take"),
    ('{"card": {"delta": {"any": {"chunk": 0}}}}', "'delta' / 'any' has chunk = 0; fields are integers of at least 1"),
    ('{"card": {"delta": {"any": {"chunk": true}}}}', "chunk = True"),
    ('{"card": {"delta": {"any": {"chunk": 16.0}}}}', "chunk = 16.0"),
]


@pytest.mark.parametrize(("text", "sentence"), BAD_TABLES, ids=range(len(BAD_TABLES)))
def test_a_bad_table_is_refused_with_file_and_key(text, sentence, tmp_path, monkeypatch):
    own = tmp_path / "own.json"
    own.write_text(text)
    with pytest.raises(TableError, match=sentence):
        read_table(own, SHIPPED)
    monkeypatch.setenv(OWN_TABLE, str(own))
    with pytest.raises(TableError, match=sentence):
        kernel_config(*ENTRY, CPU)


def test_a_table_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(OWN_TABLE, str(tmp_path / "none.json"))
    with pytest.raises(TableError, match=r"REGARD_TUNED names .*none\.json, which does not exist: unset it, and `regard tune"):
        current_table()
    with pytest.raises(TableError, match=f"{tmp_path} cannot be read: Is a directory"):
        read_table(tmp_path, SHIPPED)


def test_launch_options_may_be_left_to_triton():
    without = {name: value for name, value in GOOD.items() if name not in LAUNCH_OPTIONS}
    check_table({"card": {"tile_forward": {"any": without}}}, SHIPPED, "t")


def test_tables_are_written_whole_and_keep_other_cards(tmp_path, monkeypatch):
    path = tmp_path / "own.json"
    table_writer(path, "one")({ENTRY: GOOD})
    table_writer(path, "two")({("delta", "half"): {"chunk": 32}})
    table_writer(path, "one")({("tile_forward", "any"): GOOD})
    expected = {"one": {"tile_forward": {"half 64": GOOD, "any": GOOD}}, "two": {"delta": {"half": {"chunk": 32}}}}
    assert read_table(path, SHIPPED) == expected
    renamed = []

    def broken(source, target):
        renamed.append((Path(source).parent, Path(source).name != path.name, Path(target)))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(RunError, match=r"own\.json: No space left"):
        table_writer(path, "three")({ENTRY: GOOD})
    assert renamed == [(tmp_path, True, path)]
    assert read_table(path, SHIPPED) == expected
    assert [found.name for found in tmp_path.iterdir()] == ["own.json"]


def test_what_was_written_is_used_at_once(tmp_path, monkeypatch):
    path = tmp_path / "own.json"
    path.write_text("{}")
    monkeypatch.setenv(OWN_TABLE, str(path))
    assert kernel_config(*ENTRY, CPU) != GOOD
    table_writer(path, "interpreter")({ENTRY: GOOD})
    assert kernel_config(*ENTRY, CPU) == GOOD


def test_trials_replace_configurations_for_a_while_and_record_what_was_used():
    before = kernel_config(*ENTRY, CPU)
    with trial_configs({ENTRY: GOOD}) as trial:
        assert kernel_config(*ENTRY, CPU) == GOOD
        with trial_configs({}):
            assert kernel_config(*ENTRY, CPU) == before
        other = kernel_config("delta", "half", CPU)
    assert kernel_config(*ENTRY, CPU) == before
    assert trial.used == {ENTRY: GOOD, ("delta", "half"): other}
