"""Low precision: never further from the truth than plain attention in the same type, and sums that do not stall."""

from functools import partial

import pytest
import torch

from conftest import DEVICE, HEADS, claiming, data, every, every_core, modes
from regard import Dims, Places, attend, core
from regard.mixers.base import Can

# They decide by comparing, so that rounding can turn a near tie over, and whoever sees that token answers otherwise. Most tokens
# must still agree; that all do where the decisions are the same is tested in test_cluster.py.
CHOOSES = {"reformer": 0.5, "routing": 0.5}
LOW = [torch.float32, torch.bfloat16, torch.float16]


def plain(q, k, v, causal):
    """Softmax attention as anybody would write it, all of it in the type of its inputs."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    return s.softmax(-1) @ v


def fused(q, k, v, causal):
    """The same by PyTorch's fused kernels, with a bias."""
    mask = q.new_zeros(q.shape[2], k.shape[2])
    if causal:
        mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), -torch.inf)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


def run(f, inputs, dtype, up):
    """Output and gradients, in double precision, of f in the given one."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = f(*inputs)
    assert y.dtype == dtype
    grads = torch.autograd.grad((y * up.to(dtype)).sum(), inputs, allow_unused=True)
    return [x.double() for x in (y, *grads) if x is not None]


def worst(found, truth):
    return [(a - b).abs().max() / b.abs().max().clamp_min(1e-9) for a, b in zip(found, truth, strict=True)]


@every_core
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_as_close_to_the_truth_as_plain_attention(case, dtype):
    for mode in modes(case):
        g = torch.Generator().manual_seed(3)
        low, true = (case.build(dtype=t, **mode).core for t in (dtype, torch.float64))
        true.load_state_dict({name: x.double() for name, x in low.state_dict().items()})
        sizes = low.dims.d * low.streams, *low.sizes
        inputs = [torch.randn(1, HEADS, 80, x, generator=g).to(DEVICE, dtype).double() for x in sizes]
        up = torch.randn(1, HEADS, 80, low.dims.e, generator=g).to(DEVICE, dtype).double()
        asked = up[:, :, : -(-80 // low.rate)]
        causal = mode["causal"]
        ours = worst(
            run(partial(attend, core=low, causal=causal), inputs, dtype, asked),
            run(partial(attend, core=true, causal=causal), inputs, torch.float64, asked),
        )
        half = [x[..., : low.dims.d] for x in inputs[:2]] + [inputs[2][..., : low.dims.e]]
        theirs = worst(*(run(partial(plain, causal=causal), half, t, up) for t in (dtype, torch.float64)))
        if DEVICE.type == "cuda":  # the kernels that scores with a bias go through: worse than plain products in float32
            theirs += worst(*(run(partial(fused, causal=causal), half, t, up) for t in (dtype, torch.float64)))
        # writing the true result down costs two roundings; adding up 80 terms in float32, in whatever order, about sqrt(80)
        band = 2 * torch.finfo(dtype).eps + 80**0.5 * torch.finfo(torch.float32).eps
        assert max(ours) <= 2 * max(theirs) + band, (ours, theirs)


@every
def test_works_under_autocast(case):
    for mode in modes(case):
        m, x = case.build(dtype=torch.float32, **mode), data(40, dtype=torch.float32).requires_grad_()
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            y = m(x)
        y.float().square().sum().backward()
        assert x.grad.isfinite().all()
        far = (y.float() - m(x)).abs() >= 0.05 * m(x).abs().max()
        assert far.any(-1).float().mean() <= CHOOSES.get(case.row.name, 0)


@claiming(Can.STREAM, causal=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_streams(case, dtype):
    m, x = case.build(dtype=dtype, causal=True), data(40, dtype=dtype)
    with torch.no_grad():
        state, out = m.start(3), []
        for part in x.split([17, 1, 1, 21], 1):
            y, state = m.extend(state, part)
            out.append(y)
    far = ~torch.isclose(torch.cat(out, 1), m(x), rtol=0.05, atol=0.02)
    assert far.any(-1).float().mean() <= CHOOSES.get(case.row.name, 0)


def test_sums_do_not_stall_in_half_precision():
    """4,096 equal tokens: a sum kept in bfloat16 stops growing at 256."""
    made = core("linear", Dims(8, 1))
    k, v = torch.zeros(1, 1, 4096, 8, dtype=torch.bfloat16), torch.ones(1, 1, 4096, 8, dtype=torch.bfloat16)
    v[:, :, ::2] = -1.0
    v[:, :, :64] = 1.0
    memory = made.push(made.empty(k, v), k, v, Places.of(k[:, 0]))
    assert memory.z.dtype == torch.float32 and (memory.z == 4096).all() and (memory.s == 64).all()
