"""The norm and the gate behind the heads of retention, gated linear attention and the delta rule."""

import pytest
import torch

from conftest import DEVICE, close, data
from regard import Dims, core, layer
from regard.config import Config
from regard.decoding import Constraints, GraphedDecoder, generate
from regard.models import language_model
from regard.runtime.fused_step import fused_mixer
from regard.runtime.packed_linear import fuse_qkv

NAMES = ("gla", "retention", "delta", "delta(gated=True)")


def with_options(name: str, **options: bool) -> str:
    inside = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{name[:-1]}, {inside})" if name.endswith(")") else f"{name}({inside})"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("norm", "gate"), [(True, False), (False, True), (True, True)])
def test_the_layer_is_its_definition(name, norm, gate):
    """Heads, then their norm, then the gate, then the last map, in float64; every weight of them is learned."""
    torch.manual_seed(0)
    sizes = {"width": 32, "heads": 4, "value_dim": 6, "causal": True}
    m = layer(with_options(name, output_norm=norm, output_gate=gate), **sizes).to(DEVICE, torch.float64)
    plain = layer(name, **sizes).to(DEVICE, torch.float64)
    plain.load_state_dict({key: value for key, value in m.state_dict().items() if not key.startswith("readout")})
    plain.out, out = torch.nn.Identity(), m.out
    x = data(13, b=2)
    y = plain(x).unflatten(-1, (4, 6))
    if norm:
        with torch.no_grad():
            m.readout.weight.uniform_(0.5, 2)
        y = m.readout.weight * y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = y.flatten(2)
    if gate:
        asked = m.readout.gate(x)
        y = y * asked * asked.sigmoid()
    close(m(x), out(y))
    m(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in m.readout.parameters())


def test_parts_that_are_not_asked_for_are_not_there():
    assert layer("gla", width=16, heads=2).readout is None
    names = [name for name, _ in layer("gla(output_norm=True)", width=16, heads=2).readout.named_parameters()]
    assert names == ["weight"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: core("gla(output_norm=True)", Dims(16, 2)), "output_norm of gla belong to a whole layer, and a core has none"),
        (lambda: core("delta(output_gate=True)", Dims(16, 2)), "output_gate of delta"),
        (lambda: layer("hybrid(far='gla(output_gate=True)')", width=16, heads=2), "far is a part of one"),
        (lambda: layer("retention(output_norm=1)", width=16, heads=2), "output_norm must be True or False, not 1"),
    ],
)
def test_where_there_is_no_layer_they_are_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_decoding_has_them():
    """The fused step of one token has no norm and gate of heads: such layers decode by their own step."""
    torch.manual_seed(1)
    spec = "gla(output_norm=True, output_gate=True)"
    model = language_model(Config(mixer=spec, width=32, heads=2, depth=2, ffn=32), vocab=20).eval().to(DEVICE)
    block = next(iter(fuse_qkv(model).stack))
    assert fused_mixer(block.mixer_norm, block.mixer) is None
    prompt, limits = torch.randint(1, 20, (2, 5), device=DEVICE), Constraints(eos=0, max_new_tokens=6)
    fast = GraphedDecoder(model, room=16)
    slow = generate(model, model.start(2), prompt, constraints=limits)
    assert generate(fast, fast.start(2), prompt, constraints=limits) == slow
