"""Kernels compile for a card that this machine does not have, see absent_card.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import DEVICE
from regard.ops.triton_support import has_triton

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="a card is there: other tests compile the kernels for it"),
    pytest.mark.skipif(not has_triton(), reason="needs the package triton: pip install triton"),
]


FAMILIES = {"delta_": 9, "unit_": 2, "linear_": 5, "exp_": 2, "non": 11, "mix_": 1, "block_": 1}


def test_kernels_compile_for_a_card_that_is_not_there() -> None:
    """The interpreter finds no error of types: queries that are None in a loop of no turns were one."""
    script = Path(__file__).with_name("absent_card.py")
    done = subprocess.run([sys.executable, script], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = done.stdout.rpartition("kernels: ")[2].split(", ")
    counts = {family: sum(name.startswith(family) for name in names) for family in FAMILIES}
    assert counts == FAMILIES
