"""Low precision: never further from the truth than plain attention in the same type, and sums that do not stall."""

import pytest
import torch

from conftest import law_test
from regard import Dims, Places, core, laws
from regard.mixers.attention import no_autocast

test_as_close_to_the_truth_as_plain_attention = law_test(laws.low_precision_is_close)
test_works_under_autocast = law_test(laws.autocast_is_close)
test_half_precision_streams = law_test(laws.half_precision_streams)


def test_sums_do_not_stall_in_half_precision():
    """4,096 equal tokens: a sum kept in bfloat16 stops growing at 256."""
    made = core("linear", Dims(8, 1))
    k, v = torch.zeros(1, 1, 4096, 8, dtype=torch.bfloat16), torch.ones(1, 1, 4096, 8, dtype=torch.bfloat16)
    v[:, :, ::2] = -1.0
    v[:, :, :64] = 1.0
    memory = made.push(made.empty(k, v), k, v, Places.of(k[:, 0]))
    assert memory.z.dtype == torch.float32 and (memory.z == 4096).all() and (memory.s == 64).all()


def test_autocast_is_off_inside_of_a_core_and_on_again_behind_it():
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with no_autocast(x):
            assert not torch.is_autocast_enabled("cpu") and (x @ x.T).dtype == torch.float32
        assert (x @ x.T).dtype == torch.bfloat16
        with pytest.raises(ZeroDivisionError), no_autocast(x):
            raise ZeroDivisionError
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    with no_autocast(x):
        assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
