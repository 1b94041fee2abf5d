"""What a first `import regard` and a first command load: no compiler, and no torch where none is needed."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.cli.mechanism_table import TABLE, make_mechanisms, read_mechanisms

SRC = Path(__file__).parents[1] / "src"


def python(script: str, *words: str) -> subprocess.CompletedProcess:
    return process("-c", script, *words)


def process(*words: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, check=False)


def test_the_package_loads_neither_torch_nor_a_compiler():
    script = """
import sys
import regard
assert "torch" not in sys.modules, "by import regard"
assert regard.__version__ and regard.text.unknown and "torch" not in sys.modules, "by a module that needs none"
built = regard.layer("softmax", width=8, heads=2)
assert "regard.tasks" not in sys.modules, "by a layer"
from regard import *
import torch
assert built(torch.zeros(1, 3, 8)).shape == (1, 3, 8) and Spec.parse("rnn").build(Dims(8, 2)) is not None
for row in CATALOGUE.values():
    row.can
assert "torch._dynamo" not in sys.modules, "by a forward pass, or by building every mechanism"
"""
    done = python(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["list"],
        ["list", "--json"],
        ["tasks"],
        ["tasks", "multi30k"],
        ["tasks", "--json"],
        ["train", "--help"],
    ],
)
def test_a_command_that_computes_nothing_does_not_load_torch(words):
    script = """
import sys
from regard_command import main
try:
    main()
except SystemExit as ended:
    sys.stderr.write(f"{ended.code} {'torch' in sys.modules} {'numpy' in sys.modules}")
"""
    done = python(script, *words)
    assert done.stderr in ("0 False False", "None False False"), done.stderr
    assert done.stdout


def test_the_command_is_a_module_too():
    asked, refused = process("-m", "regard", "list", "--json"), process("-m", "regard", "show", "nothing")
    assert asked.returncode == 0 and "softmax" in asked.stdout and asked.stderr == ""
    assert refused.returncode == 2 and "nothing" in refused.stderr and "Traceback" not in refused.stderr


def test_the_table_of_mechanisms_is_that_of_the_catalogue():
    assert read_mechanisms() == json.loads(json.dumps(make_mechanisms())), f"write {TABLE} again: python docs/make_list.py"


def test_every_public_name_is_there():
    for name in regard.__all__:
        assert getattr(regard, name) is not None and name in dir(regard)
    assert regard.patterns.Local is regard.Local
    for wrong in ("nothing", "_nothing"):
        with pytest.raises(AttributeError, match=f"module 'regard' has no attribute '{wrong}'"):
            getattr(regard, wrong)
    with pytest.raises(ImportError):
        from regard import nothing  # noqa: F401


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_without_its_extra_is_one_sentence(missing):
    done = python(f"import sys; sys.modules[{missing!r}] = None; import regard_command; regard_command.main()", "list")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"the command regard needs {missing}: pip install 'regard[cli]', or 'regard[train]' to train as well\n"


def test_the_library_needs_torch_and_numpy_alone():
    """Each of the other packages of the extras is imported in a function, in the command line, or with a sentence about it."""
    extras = {"typer", "rich", "click", "matplotlib", "safetensors", "tokenizers", "sacrebleu", "num2words", "torchdiffeq"}
    allowed = {"cli", "plots"}
    for path in (SRC / "regard").rglob("*.py"):
        if path.relative_to(SRC / "regard").parts[0] in allowed:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not extras & {name.partition(".")[0] for name in names}, f"{path} imports {names} at its top"
