"""Peers of the benchmark: an adapter computes what the mechanism of the catalogue computes, where the mathematics is the same."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from conftest import DEVICE
from regard.bench.peer import InLayer
from regard.bench.peers import PEERS, chosen_peers, installed, peer_names, peers_of
from regard.bench.speed import _answer, _peer_workload
from regard.bench.workload import LAYER, OPERATION, Setting, build_mixer, layer_input, operation_inputs, own_workload
from regard.spec import Spec

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own, and FlexAttention's without its compiler
PERFORMER = "performer(features=32, kind='positive', max_norm=None)"
SAME = [
    ("SDPA", "softmax", True, 1e-6),
    ("SDPA", "softmax", False, 1e-6),
    ("FlexAttention", "Local(9)", True, 1e-5),
    ("FlexAttention", "Local(9) | Global(first=2)", False, 1e-5),
    ("FlexAttention", "bigbird(block=8, random=2)", True, 1e-5),
    ("FlexAttention", "bigbird(block=8, random=2, special='ends')", False, 1e-5),
    ("FlexAttention", "sparse_transformer(stride=8)", True, 1e-5),
    ("FlexAttention", "longformer(window=9, first=2, shared=True)", False, 1e-5),
    ("local-attention", "Local(17)", True, 1e-5),
    ("local-attention", "Local(17)", False, 1e-5),
    ("linear-attention-transformer", "efficient", False, 1e-5),
    ("linformer", "linformer(rank=8, share='head')", False, 1e-5),
    ("transformers Longformer", "longformer(attention_window=16, first=2)", False, 1e-5),
    ("transformers Longformer", "longformer(attention_window=16, first=2, shared=True)", False, 1e-5),
    ("transformers FNet", "fnet", False, 1e-5),
    ("transformers FNet", "fnet(norm='none')", False, 1e-5),
    ("flash-linear-attention", "linear", True, 1e-2),
    ("flash-linear-attention", "retention(norm=False)", True, 1e-2),
    ("flash-linear-attention", "gla", True, 1e-2),
    ("flash-linear-attention", "delta", True, 1e-2),
]
OTHERS = [
    ("reformer-pytorch", "reformer(rounds=2, buckets=8, chunk=16)"),
    ("routing-transformer", "routing(clusters=4, window=16)"),
    ("sinkhorn-transformer", "sinkhorn(block=16)"),
    ("transformers Reformer", "reformer(rounds=2, buckets=8, chunk=16)"),
    ("transformers BigBird", "bigbird(block=8, random=1)"),
]


def setting(causal, heads=2, batch=2, n=128):
    return Setting(n, batch, heads, 16, causal, DEVICE.type)


def made(name, text, where):
    """The layer of a spec, the adapter of a peer, and the inputs of both; skipped where the package is not there."""
    (peer,) = peers_of(Spec.parse(text), where.causal, [name])
    if why := peer.missing(where.device):
        pytest.skip(f"{name}: {why}")
    mixer = build_mixer(Spec.parse(text), where).eval()
    module = peer.build(mixer, where, peer.level).eval()
    if name == "FlexAttention":
        module.attention = flex_attention  # without the compiler
    inputs = (layer_input(where),) if peer.level == LAYER else operation_inputs(mixer.core, where)
    return peer, mixer, module, inputs


def distance(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(("name", "text", "causal", "near"), SAME, ids=lambda x: str(x))
def test_a_peer_computes_the_same(name, text, causal, near):
    where = setting(causal)
    peer, mixer, module, inputs = made(name, text, where)
    assert peer.same(Spec.parse(text), causal)
    ours = own_workload(mixer, where, peer.level, inputs).forward()
    plain = [x.detach() for x in inputs]
    with torch.no_grad():
        theirs = module(*plain)
    assert distance(theirs, ours) < near
    assert distance(theirs, ours.roll(1, -2)) > 0.1  # the measure notices another answer


@pytest.mark.parametrize("name", ["local-attention", "linear-attention-transformer", "reformer-pytorch"])
def test_what_is_timed_is_the_whole_peer(name):
    text = {"local-attention": "Local(17)", "linear-attention-transformer": "efficient"}.get(name, OTHERS[0][1])
    torch.manual_seed(0)
    _, _, module, inputs = made(name, text, setting(False))
    torch.manual_seed(1)
    timed = module.finish(_answer(_peer_workload(module, inputs), module))
    torch.manual_seed(1)
    with torch.no_grad():
        torch.testing.assert_close(timed, module(*inputs))


@pytest.mark.parametrize(("name", "text"), OTHERS, ids=lambda x: str(x))
def test_other_peers_run_forward_and_backward(name, text):
    """Their hashes, clusters and sorts are their own: shapes and gradients are all there is to compare."""
    peer, mixer, module, inputs = made(name, text, setting(False))
    assert not peer.same(Spec.parse(text), False)
    work = _peer_workload(module.train(), inputs)
    ours = own_workload(mixer, setting(False), peer.level, inputs).forward()
    out = work.forward()
    assert (module.finish(out) if peer.level == OPERATION else out).shape == ours.shape
    grads = [x for x in work.both() if x is not None]
    assert all(x.isfinite().all() for x in grads)
    assert any(x.abs().sum() > 0 for x in grads)


def test_the_performer_package_is_ours_without_its_epsilon(monkeypatch):
    where = setting(False)
    _, mixer, module, inputs = made("performer-pytorch", PERFORMER, where)
    package = pytest.importorskip("performer_pytorch.performer_pytorch")
    kernel = package.softmax_kernel
    monkeypatch.setattr(package, "softmax_kernel", lambda x, **options: kernel(x, **options, eps=0.0))
    ours = own_workload(mixer, where, OPERATION, inputs).forward()
    with torch.no_grad():
        assert distance(module(*inputs), ours) < 1e-5


def test_the_nystrom_package_is_ours_for_one_matrix():
    """It scales the pseudo-inverses of all heads and rows alike: with one of each both are equal."""
    where = setting(False, heads=1, batch=1)
    _, mixer, module, inputs = made("nystrom-attention", "nystrom(landmarks=8, iterations=6)", where)
    ours = own_workload(mixer, where, LAYER, inputs).forward()
    with torch.no_grad():
        assert distance(module(*inputs), ours) < 1e-4


NAIVE = {
    "linear": ("fla.ops.linear_attn", "chunk_linear_attn", "fla.ops.linear_attn.naive", "naive_recurrent_linear_attn"),
    "gla": ("fla.ops.gla", "chunk_gla", "fla.ops.gla.naive", "naive_recurrent_gla"),
}


@pytest.mark.parametrize("text", NAIVE)
def test_the_inputs_of_flash_linear_attention_without_a_gpu(text, monkeypatch):
    """The package's own slow definitions, in the place of its kernels, get the same tensors."""
    pytest.importorskip("fla", reason="pip install flash-linear-attention, to compare with it")
    from importlib import import_module

    place, fast, slow_place, slow = NAIVE[text]
    monkeypatch.setattr(import_module(place), fast, getattr(import_module(slow_place), slow))
    where = Setting(64, 2, 2, 16, True, "cpu")
    mixer = build_mixer(Spec.parse(text), where).eval()
    (peer,) = peers_of(Spec.parse(text), True, ["flash-linear-attention"])
    inputs = operation_inputs(mixer.core, where)
    ours = own_workload(mixer, where, OPERATION, inputs).forward()
    with torch.no_grad():
        theirs = peer.build(mixer, where, OPERATION)(*inputs)
    assert distance(theirs, ours) < 1e-5


def test_an_operation_between_projections_is_a_layer():
    where = setting(True)
    peer = next(peer for peer in PEERS if peer.name == "SDPA")
    mixer = build_mixer(Spec.parse("softmax"), where).eval()
    module = peer.build(mixer, where, LAYER)
    assert isinstance(module, InLayer)
    x = layer_input(where)
    torch.testing.assert_close(module(x), mixer(x))


def test_a_peer_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("regard.bench.peer.find_spec", lambda _name: None)
    found = installed(["local-attention"], "cpu")
    assert found == {"local-attention": "not installed: pip install local-attention"}


def test_names_of_peers():
    assert chosen_peers("all") == peer_names()
    assert chosen_peers("none") == []
    assert chosen_peers("sdpa, FlexAttention") == ["SDPA", "FlexAttention"]
    with pytest.raises(ValueError, match=r"there is no peer 'flexatention'.*FlexAttention"):
        chosen_peers("flexatention")


def test_every_peer_is_for_a_mechanism_of_the_catalogue():
    texts = [text for _, text, *_ in SAME] + [text for _, text in OTHERS] + [PERFORMER, "nystrom(landmarks=8)"]
    for peer in PEERS:
        assert any(peer.fits(Spec.parse(text), causal) for text in texts for causal in (True, False)), peer.name
