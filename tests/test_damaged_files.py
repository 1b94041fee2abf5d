"""Damaged files, by the hundred and always the same ones: every reader takes a file as it is, or answers with its name."""

from __future__ import annotations

import json
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from regard import load, pretrained
from regard.data import datasets
from regard.data.strict_json import JsonError, read_value
from regard.data.vocabulary import vocabulary
from regard.data.wikisql import read_wikisql
from regard.training import checkpoints, metrics_log
from regard.training.result import finished
from regard.training.run_weights import run_weights
from small_task import Small, small
from test_cli import run
from test_data import CONLLU, QUERY

TAGGER = ["width=8", "heads=2", "depth=1", "ffn=8", "steps=2", "batch_tokens=256", "spelling=8"]
DEEP, LONG = "[" * 200_000, "1" * 5_000
PARTS = [
    "\0",
    "\ufeff",
    "\t",
    "\n",
    "\r\n",
    " ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    '"\\ud800"',
    "-",
    "1e999",
    "NaN",
    DEEP,
    LONG,
]
VALUES = [None, True, -1, 0, 1e308, 10**400, "", "x", "\ud800", "1" * 50, [], [[]], {}, {"a": 1}, [None], float("nan")]


def damaged(whole: bytes, dice: random.Random, times: int) -> Iterator[bytes]:
    """Cut, flipped, with something in between, and, where it is JSON, with another value somewhere inside."""
    yield b""
    for number in range(times):
        at = dice.randrange(len(whole) + 1)
        cut = whole[:at], whole[at:], whole[dice.randrange(at, len(whole) + 1) :]
        part = dice.choice(PARTS).encode()
        ways = [
            cut[0],
            cut[0] + bytes([dice.randrange(256)]) + cut[1][1:],
            cut[0] + part + cut[1],
            cut[0] + part,
            cut[0] + cut[2],
        ]
        yield ways[number % 5]
        try:
            value = json.loads(whole)
        except ValueError:
            continue
        yield json.dumps(_changed(value, dice)).encode()
    for part in (DEEP, LONG):  # as a value where one is
        yield whole.replace(b": ", f": {part}".encode(), 1)


def _changed(value, dice: random.Random):
    """With one value, somewhere inside, replaced or left out."""
    if not isinstance(value, list | dict) or not value or dice.random() < 0.2:
        return dice.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = dice.choice(keys)
    changed = dict(value) if isinstance(value, dict) else list(value)
    if dice.random() < 0.2:
        del changed[key]
    else:
        changed[key] = _changed(changed[key], dice)
    return changed


def survive(path: Path, read: Callable[[], object], named: str, times: int = 40) -> int:
    """How many damages of the file were refused: each with a ValueError that names it, or another file of its run."""
    whole, refused = path.read_bytes(), 0
    for content in damaged(whole, random.Random(path.name), times):
        path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                read()
        except ValueError as error:
            refused += 1
            assert named in str(error) and "Exceeds the limit" not in str(error), (str(error)[:300], content[:300])
        except BaseException as error:
            raise AssertionError(f"{path.name}: {type(error).__name__} for {content[:300]!r}") from error
    path.write_bytes(whole)
    read()
    assert refused >= times // 4
    return refused


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


DATA = {
    "wikisql.json": (json.dumps([QUERY, QUERY], indent=1).encode(), lambda path: read_wikisql(path.parent)),
    "reviews.jsonl": (lines(*({"text": "a b", "label": n % 2} for n in range(3))), datasets._reviews),
    "papers.jsonl": (lines(*({"abstract": "a b", "title": "b"} for _ in range(3))), datasets._papers),
    "en.conllu": (CONLLU.encode(), datasets.conllu),
    "a.en": ("ä b\nc d\n".encode(), lambda path: datasets._captions(path, path)),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name, tmp_path):
    content, read = DATA[name]
    path = tmp_path / name
    path.write_bytes(content)
    if name == "a.en":  # any text is two languages: what is not text is refused
        for damage in (b"\xff", b"\0", b"a\xc3"):
            path.write_bytes(damage)
            with pytest.raises(ValueError, match=r"a\.en, line 1"):
                read(path)
        return
    survive(path, partial(read, path), name)


@pytest.mark.parametrize("part, reason", [(LONG, "an integer of 5,000 digits"), (DEEP, "nested too deeply")])
def test_a_number_of_5000_digits_and_deep_nesting_are_refused_with_file_and_line(part, reason, tmp_path):
    path = tmp_path / "wikisql.json"
    path.write_text('[\n{"sql": "[[[[",\n"b": ' + part + "\n}]")
    with pytest.raises(ValueError, match=rf"wikisql\.json, line 3: not JSON that can be read: {reason} at character \d+"):
        read_wikisql(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text('{"abstract": "a", "title": "b"}\n{"abstract": ' + part + "}\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: not JSON that can be read: {reason} at character"):
        datasets._papers(path)
    with pytest.raises(JsonError) as found:
        read_value(f'\n\n [{{"a\\"[": {part}')
    assert found.value.line == 3 and found.value.column >= 11
    assert read_value("1" * sys.get_int_max_str_digits()) and read_value(b"\xef\xbb\xbf[1]") == [1]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A small run, and one of the command line."""
    from regard.training.fit import fit

    folder = tmp_path_factory.mktemp("runs")
    fit(Small(small(steps=5)), folder / "small", accelerator="cpu", quiet=True)
    words = [word for text in TAGGER for word in ("--set", text)]
    done = run("train", "saw", *words, "--out", str(folder / "saw"), "--device", "cpu")
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize("name", ["config.json", "run.json", "result.json", "metrics.jsonl", "state.json"])
def test_files_of_a_run(name, made, tmp_path):
    out = Path(shutil.copytree(made / "small", tmp_path / "run"))
    if name == "state.json":
        (out / "result.json").unlink()
    read = {"result.json": partial(finished, out), "metrics.jsonl": partial(metrics_log.read_metrics, out / name)}.get(
        name, partial(run_weights, out)
    )
    survive(checkpoints.latest(out) / name if name == "state.json" else out / name, read, str(out), 20)


def test_a_run_of_the_command_line_without_its_seals(made, tmp_path):
    """Its vocabularies and labels, where no SHA-256 notices that they were changed."""
    out = Path(shutil.copytree(made / "saw", tmp_path / "run"))
    (out / "run.json").unlink()
    (out / "scores.json").write_text('[{"split": "test", "settings": {}, "scores": {}}]')
    for name in ("tags.json", "words.json", "characters.json"):
        for content in damaged((out / "assets" / name).read_bytes(), random.Random(name), 10):
            whole = (out / "assets" / name).read_bytes()
            (out / "assets" / name).write_bytes(content)
            try:
                load(out, device="cpu")
            except ValueError as error:
                assert str(out) in str(error), (name, content[:200])
            finally:
                (out / "assets" / name).write_bytes(whole)
    with pytest.raises(ValueError, match="not a vocabulary"):
        vocabulary('{"kind": ' + LONG + "}")
    (out / "scores.json").write_text(DEEP)
    done = run("evaluate", str(out), "--split", "val")
    assert done.exit_code == 2 and "scores.json is not as it was written" in done.stderr


def test_a_checkpoint_of_others(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_head=2, n_layer=1, n_positions=8)).save_pretrained(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "part.safetensors")
    for name in ("config.json", "generation_config.json"):
        path, whole = tmp_path / name, (tmp_path / name).read_bytes()
        for content in damaged(whole, random.Random(name), 15):
            path.write_bytes(content)
            try:
                pretrained.special_ids(tmp_path)
                pretrained.load_pretrained(tmp_path)
            except (ValueError, TypeError):
                pass
        path.write_bytes(whole)
    path = tmp_path / "model.safetensors"
    for content in damaged(path.read_bytes()[:400], random.Random(0), 15):  # the header is JSON too
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be read as safetensors|has no tensor|shape"):
            pretrained.load_pretrained(tmp_path)
    path.unlink()
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "part.safetensors"}}))
    for content in damaged(path.read_bytes(), random.Random(1), 15):
        path.write_bytes(content)
        with pytest.raises(ValueError):
            pretrained.load_pretrained(tmp_path)
