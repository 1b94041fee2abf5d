"""One decoding step of any model in static buffers: the same scores, constant shapes, nothing read by the host."""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import DEVICE, PATHS, WIDTH
from regard.blocks import Block, Stack
from regard.blocks.feedforward import FeedForward
from regard.config import Config
from regard.decoding import Constraints, GraphedDecoder, Sample, StaticDecoder, beam, fast_decoder, generate, generate_stream
from regard.mixers.base import Can, Dims, Places
from regard.mixers.kv_cache import KVCache, RollingKVCache, StaticCursor, StaticKVCache
from regard.mixers.places import position_bound, positions_below
from regard.mixers.state import CrossState
from regard.models import LanguageModel, NextToken, Tokens, guided_translator, language_model, pointer_generator, translator
from regard.positions import Learned, Sinusoidal
from regard.runtime.cuda_graph import CapturedGraph
from regard.runtime.decode_graph import DecodeGraph
from regard.runtime.packed_linear import fuse_qkv
from regard.runtime.state_buffers import StateBuffers, buffer_key, cache_groups, context_room, own_caches, spare_room
from test_graphed_step import blind

VOCAB, END = 23, 3
STREAMS = [case for case in PATHS if case.can(Can.STREAM, causal=True)]
# states without constant shapes, and steps that read the device: the model itself decodes
GROWING = ("gmlp", "compressed")
HOST_READS = ("gat", "bigbird(block=8, globals=1, random=2)", "longformer(window=4, dilation=3, dilated_heads=2, at=[0, 5])")


class Replay:
    """All that a CUDA graph does, kernel by kernel: results go where those of the capture are."""

    def __init__(self, run):
        self.run, self.out = run, run()

    def replay(self):
        self.out.copy_(self.run())


def captured_on_any_device(run, _device, *, warm, pool):
    assert pool is None
    for _ in range(2):
        warm()
    graph = Replay(run)
    return CapturedGraph(graph, graph.out, [])


@pytest.fixture(params=["replay", *(["graph"] if DEVICE.type == "cuda" else [])])
def decoder(request, monkeypatch):
    """How a step is repeated: kernel by kernel in the same buffers, or as a CUDA graph."""
    if request.param == "replay":
        monkeypatch.setattr("regard.runtime.decode_graph.capture_graph", captured_on_any_device)

    def make(model, room=16, **options):
        fast = GraphedDecoder(model, room=room, graphs=request.param == "graph", **options)
        fast.graphs = True
        return fast

    return make


def language(case, depth=2, positions=None):
    blocks = [Block(case.build(causal=True), FeedForward(WIDTH, 40)) for _ in range(depth)]
    torch.manual_seed(5)
    embed = Tokens(VOCAB, WIDTH, positions=positions)
    return LanguageModel(embed, Stack(blocks), NextToken(WIDTH, VOCAB)).to(DEVICE, torch.float64).eval()


def prompt(ragged, n=9):
    x = torch.randint(5, VOCAB, (3, n), generator=torch.Generator().manual_seed(6)).to(DEVICE)
    valid = torch.arange(n, device=DEVICE) < torch.tensor([[n], [n // 3], [n - 3]], device=DEVICE)
    return x, {"": None, "behind": valid, "before": valid.flip(1)}[ragged]


def compare(model, fast, begin, steps, ragged="", reorder=(), tol=1e-9):
    """Extend both by the same random tokens, and reorder their rows in some steps."""
    x, valid = prompt(ragged)
    dice = torch.Generator().manual_seed(7)
    rows = torch.tensor([1, 1, 2], device=DEVICE)
    with torch.no_grad():
        _, state = model.extend(model.start(*begin), x, valid)
        _, own = fast.extend(fast.start(*begin), x, valid)
        for i in range(steps):
            tokens = torch.randint(5, VOCAB, (3, 1), generator=dice).to(DEVICE)
            a, state = model.extend(state, tokens)
            b, own = fast.extend(own, tokens)
            torch.testing.assert_close(a, b, atol=tol, rtol=0)
            if i in reorder:
                state, own = state.select(rows, within=True), own.select(rows, within=True)
    return own


@pytest.mark.filterwarnings("ignore:a decoding step is not captured")
@pytest.mark.parametrize("case", STREAMS, ids=repr)
def test_every_mechanism_that_streams_decodes_in_static_buffers(case, decoder):
    """Through rooms that are filled, forgotten and doubled, with beams that change places."""
    growing = case.row.name in GROWING
    reads = any(repr(case).startswith(name) for name in HOST_READS) and DEVICE.type == "cuda"  # found before a capture fails
    for ragged in ("", "behind"):
        model = language(case)
        fast = decoder(model)
        own = compare(model, fast, (3,), 24, ragged, reorder=(4, 17, 18))
        assert bool(fast.steps) != growing or reads
        assert bool(fast.refused) == growing or reads
        assert isinstance(own.plain(), type(model.start(3)))


def on_meta(value):
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        parts = [on_meta(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def step_on_meta(model, state):
    """Run one step where no number can be read and none is sent."""
    model, state = copy.deepcopy(model).to("meta"), on_meta(state)
    buffers = StateBuffers(state, partial(spare_room, base=16, limit=None))
    graph = DecodeGraph(model, state, buffers, 64, None)
    with torch.no_grad():
        graph.run(True)  # tables that are made only once are made now
        with blind():
            graph.run(True)


@pytest.mark.parametrize("case", [case for case in STREAMS if case.row.name not in GROWING], ids=repr)
def test_a_step_in_static_buffers_reads_nothing_on_the_host(case):
    positions = None if case.positions else Sinusoidal(Dims(WIDTH, 4))
    model = language(case, positions=positions)
    with torch.no_grad():
        _, state = model.last(model.start(3), prompt("")[0])
    if any(repr(case).startswith(name) for name in HOST_READS):
        with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
            step_on_meta(model, state)
    else:
        step_on_meta(model, state)


def config(**changes):
    return Config(width=16, heads=4, depth=2, ffn=24, dropout=0.0, max_len=64).replace(changes)


def sharp(model):
    model = model.to(DEVICE, torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    return model


@pytest.mark.parametrize("ragged", ["", "before"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixer": "linear", "positions": "learned"},
        {"mixer": "delta", "positions": "none"},
        {"mixer": "sinks(window=5, first=2)", "norm": "post"},
        {"mixer": "Local(4)", "positions": "alibi"},
        {"mixer": "rnn"},
    ],
    ids=str,
)
def test_generate_and_beam_give_what_the_model_gives(changes, ragged, decoder):
    torch.manual_seed(5)
    model = sharp(language_model(config(**changes), VOCAB))
    fast = decoder(model, room=8)
    x, valid = prompt(ragged)
    constraints = Constraints(END, max_new_tokens=21, banned=(0, 1))
    for _ in range(2):  # the second time in the same buffers
        wanted = generate(model, model.start(3), x, constraints=constraints, valid=valid)
        assert generate(fast, fast.start(3), x, constraints=constraints, valid=valid) == wanted
        a = beam(model, model.start(3), x, constraints=constraints, width=4, best=4, valid=valid)
        b = beam(fast, fast.start(3), x, constraints=constraints, width=4, best=4, valid=valid)
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.scores, b.scores, atol=1e-9, rtol=0)
    choice = {"constraints": constraints, "valid": valid}
    some = [torch.stack(list(generate_stream(one, one.start(3), x, choice=Sample(seed=4), **choice)), 1) for one in (model, fast)]
    assert torch.equal(*some)


@pytest.mark.parametrize("source", [5, 9, 0])
@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (translator, {}),
        (translator, {"mixer": "linear", "cross": "linear"}),
        (translator, {"mixer": "Local(4)", "wiring": "each"}),
        (translator, {"wiring": "both"}),
        (partial(guided_translator, kind="monotonic"), {}),
        (pointer_generator, {}),
    ],
    ids=["softmax", "linear", "window", "both", "guided", "copying"],
)
def test_translators_decode_in_static_buffers(make, changes, source, decoder):
    if source == 0 and make is not translator:
        pytest.skip("these read a source with tokens")
    torch.manual_seed(5)
    model = sharp(make(config(**changes), VOCAB))
    fast = decoder(model, room=8)
    x = torch.randint(5, VOCAB, (3, source), device=DEVICE)
    valid = torch.arange(source, device=DEVICE) < torch.tensor([[source], [max(source - 3, 1)], [source]], device=DEVICE)
    first = torch.full((3, 1), 2, device=DEVICE)
    constraints = Constraints(END, max_new_tokens=12)
    for real in (None, valid) if source else (None,):
        begin = (x,) if real is None else (x, real)
        a = beam(model, model.start(*begin), first, constraints=constraints, width=3, best=3)
        b = beam(fast, fast.start(*begin), first, constraints=constraints, width=3, best=3)
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.scores, b.scores, atol=1e-9, rtol=0)
        assert generate(fast, fast.start(*begin), first, constraints=constraints) == generate(
            model, model.start(*begin), first, constraints=constraints
        )
    assert fast.steps and not fast.refused


def test_sources_of_similar_lengths_share_a_graph(decoder):
    model = sharp(translator(config(), VOCAB))
    fast, first = decoder(model, room=16), torch.full((2, 1), 2, device=DEVICE)
    for n in (3, 7, 20):
        x = torch.randint(5, VOCAB, (2, n), device=DEVICE)
        generate(fast, fast.start(x), first, constraints=Constraints(END, max_new_tokens=5))
    assert len(fast.steps) == 1 and [context_room(n) for n in (0, 1, 32, 33)] == [32, 32, 32, 64]


def test_a_state_in_buffers_goes_forwards_only_and_can_be_copied_out(decoder):
    model = language(PATHS[0])
    fast, (x, _) = decoder(model), prompt("")
    one = x[:, :1]
    with torch.no_grad():
        _, first = fast.extend(fast.start(3), x)
        _, second = fast.extend(first, one)
        kept = second.plain()
        _, third = fast.extend(second, one)
        for use in (lambda: fast.extend(second, one), second.plain, lambda: second.fan(2)):
            with pytest.raises(ValueError, match="extended before"):
                use()
        wanted, _ = model.extend(model.extend(model.start(3), x)[1], torch.cat([one, one], 1))
        found, _ = model.extend(kept, one)
        torch.testing.assert_close(found[:, -1], wanted[:, -1])
        caches = list(own_caches(kept))
        assert kept.start == 10 and caches[0].size == 10 and caches[0].places.at.shape == (3, 10)
        assert caches[0].places is caches[1].places  # layers share their masks again
        wide, _ = fast.extend(third.fan(2), one.repeat_interleave(2, 0))  # a chunk and a fan leave the buffers
        narrow, after = fast.extend(third, torch.cat([one, one], 1))
        torch.testing.assert_close(wide[::2], narrow[:, :1])
        assert after.graph is None and after.plain().start == 13
        with pytest.raises(ValueError, match="2 tokens for 3 rows"):
            fast.extend(fast.extend(first, one)[1], one[:2])


def test_the_longest_sequence_is_the_models_own_limit(decoder):
    torch.manual_seed(5)
    model = sharp(language_model(config(max_len=20, positions="learned"), VOCAB))
    fast, (x, _) = decoder(model, room=4), prompt("")
    assert fast.limit == 20
    with torch.no_grad():
        _, state = fast.extend(fast.start(3), x)
        for _ in range(11):
            _, state = fast.extend(state, x[:, :1])
        with pytest.raises(ValueError, match=r"max_len=20|20 positions"):
            fast.extend(state, x[:, :1])
    assert all(cache.size <= 20 for step in fast.steps.values() for cache in own_caches(step.buffers.state))


def test_tables_of_positions_end_where_the_bound_is(decoder, monkeypatch):
    monkeypatch.setattr("regard.runtime.graphed_decoder.MIN_POSITIONS", 16)
    case = next(case for case in STREAMS if case.row.name == "linear")
    model = language(case, positions=Sinusoidal(Dims(WIDTH, 4)))
    fast = decoder(model)
    fast.limit = None
    compare(model, fast, (3,), 40)
    assert sorted({bound for bound, _ in fast.steps}) == [16, 32, 64]
    table = Learned(Dims(WIDTH, 4, max_len=9))
    assert position_bound() is None
    with positions_below(9):
        assert position_bound() == 9 and table.rows(Places(torch.tensor([[3], [8]]))).shape == (2, 1, WIDTH)
    assert position_bound() is None


def test_caches_with_the_same_positions_share_their_mask():
    body = Stack.of(["softmax", "Local(4)", "softmax"], width=WIDTH, heads=4, causal=True)
    with torch.no_grad():
        state = body.start(2)
        for _ in range(2):
            _, state = body.extend(state, torch.randn(2, 40, WIDTH))
    assert cache_groups(state) == (0, 1, 0)  # the window has dropped what is out of sight
    buffers = StateBuffers(state, partial(spare_room, base=16, limit=None))
    first, second, third = (part.memory[0].memory for part in buffers.state.memory)
    assert first.valid is third.valid and first.valid is not second.valid and len(buffers.cursors) == 2
    with torch.no_grad():
        again = body.extend(body.start(2), torch.randn(2, 4, WIDTH))[1]
    assert buffer_key(again, partial(spare_room, base=128, limit=None)) != buffer_key(
        state, partial(spare_room, base=128, limit=None)
    )


def test_static_caches_are_written_in_place_and_refuse_padding():
    cursor = StaticCursor(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.bool))
    static = StaticKVCache.of(torch.zeros(2, 1, 4, 3), torch.zeros(2, 1, 4, 3), cursor)
    rolling = RollingKVCache.of(*(x.clone() for x in static[:4]))
    log = KVCache.empty(torch.zeros(2, 1, 0, 3), torch.zeros(2, 1, 0, 3))
    for i in range(3):
        k, v, places = torch.randn(2, 1, 1, 3), torch.randn(2, 1, 1, 3), Places(torch.tensor([[i], [i + 5]]))
        assert static.append(k, v, places) is static
        cursor.advance()
        rolling, log = rolling.append(k, v, places), log.append(k, v, places)
    for own, first in ((static, 0), (rolling, 1)):
        here = slice(first, first + 3)
        assert torch.equal(own.k[:, :, here], log.keys) and torch.equal(own.v[:, :, here], log.values)
        assert torch.equal(own.at[:, here], log.places.at)
        assert own.valid.sum() == 6 and own.valid[:, here].all() and own.size == 4
        with pytest.raises(ValueError, match="one real token"):
            own.append(k, v, Places(places.at, torch.ones(2, 1, dtype=torch.bool)))


def test_rooms_are_doubled_until_an_eighth_is_free():
    assert [spare_room(size, 16, None) for size in (0, 14, 15, 30, 100)] == [16, 16, 32, 64, 128]
    assert [spare_room(size, 16, 40) for size in (14, 31, 39, 40)] == [16, 40, 40, 41]


def test_one_entry_point_takes_the_special_decoder_where_there_is_one():
    soft, other = (sharp(language_model(config(mixer=mixer), VOCAB)) for mixer in ("softmax", "gla"))
    assert isinstance(fast_decoder(soft, room=9), StaticDecoder) and fast_decoder(soft, room=9).room == 9
    assert isinstance(fast_decoder(other), GraphedDecoder)
    with pytest.raises(ValueError, match="training mode"):
        fast_decoder(other.train())
    with pytest.raises(ValueError, match="no start"):
        fast_decoder(torch.nn.Linear(2, 2).eval())


@pytest.mark.skipif(DEVICE.type != "cpu", reason="weights are packed for a CPU")
def test_on_a_cpu_weights_are_packed_and_states_are_values():
    torch.manual_seed(5)
    model = language_model(config(mixer="gla"), VOCAB).eval()
    fast, (x, _) = GraphedDecoder(model), prompt("")
    assert not fast.graphs and type(fast.model.head.map).__name__ == "PackedLinear"
    with torch.no_grad():
        _, state = fast.last(fast.start(3), x)
        a, b = (fast.extend(state, x[:, :1])[0] for _ in range(2))
    assert torch.equal(a, b)
    torch.testing.assert_close(a[:, -1], model(torch.cat([x, x[:, :1]], 1))[:, -1], atol=1e-5, rtol=1e-5)
    constraints = Constraints(END, max_new_tokens=8)
    assert generate(fast, fast.start(3), x, constraints=constraints) == generate(
        model, model.start(3), x, constraints=constraints
    )


@pytest.mark.parametrize("spec", ["softmax", "gla", "reformer(rounds=2, buckets=4, chunk=6)", "synthesizer"])
def test_queries_keys_and_values_are_one_product(spec):
    body = Stack.of(spec, width=WIDTH, heads=4, depth=2, causal=True, max_len=64).to(DEVICE, torch.float64).eval()
    fused, x = fuse_qkv(body), torch.randn(2, 5, WIDTH, device=DEVICE, dtype=torch.float64)
    torch.testing.assert_close(fused(x), body(x))
    for one, other in ((a.mixer, b.mixer) for a, b in zip(fused, body, strict=True)):
        assert one.out.weight is other.out.weight and type(other.v) is torch.nn.Linear
        if type(other.q) is not torch.nn.Linear or type(other.k) is not torch.nn.Linear:
            assert type(one.v) is torch.nn.Linear  # some of the maps are not there
            continue
        assert one.q.fused is one.k.fused is one.v.fused
        for name in ("q", "k", "v"):
            torch.testing.assert_close(getattr(one, name)(x), getattr(other, name)(x))
            assert torch.equal(getattr(one, name).weight, getattr(other, name).weight)


def test_the_benchmark_of_steps_compares_every_way_with_the_model(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import decode_step

    for name, size in {"WIDTH": 16, "HEADS": 2, "DEPTH": 1, "VOCAB": 50, "PROMPT": 4}.items():
        monkeypatch.setattr(decode_step, name, size)
    monkeypatch.setenv("OUT", str(tmp_path))
    args = SimpleNamespace(device=DEVICE.type, new=5, rounds=1, mixers="softmax,gla", batches="2", dtypes="float32", older="")
    rows = decode_step.benchmark(args)
    ways = ["model.extend", "GraphedDecoder"]
    assert [row["by"] for row in rows] == [*ways, "StaticDecoder", *ways]
    assert all(row["same"] == 1 and row["tokens_per_second"] > 0 and not row["refused"] for row in rows)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="weights are packed for a CPU")
@pytest.mark.parametrize("case", {case.row.name: case for case in STREAMS}.values(), ids=repr)
def test_every_mechanism_decodes_with_packed_weights(case):
    model = language(case).float()
    compare(model, GraphedDecoder(model), (3,), 6, "behind", tol=1e-4)


def test_contexts_of_beams_stay_where_they_are():
    model = sharp(translator(config(), VOCAB))
    x = torch.randint(5, VOCAB, (2, 6), device=DEVICE)
    with torch.no_grad():
        _, state = model.extend(model.start(x).fan(2), torch.full((4, 1), 2, device=DEVICE))
    buffers = StateBuffers(state, partial(spare_room, base=8, limit=None))
    own, cross = buffers.state.memory[0].memory
    assert isinstance(cross, CrossState)
    assert id(own.memory.k) in buffers.moved and id(cross.memory.k) not in buffers.moved
    other = buffers.state.memory[1].memory[1]
    assert cross.memory.places is other.memory.places  # layers share the mask of a source, and every step makes it anew
    before = cross.memory.places
    buffers.begin()
    assert cross.memory.places is other.memory.places is not before


def test_a_graph_masks_the_source_that_was_loaded_last(decoder):
    model = sharp(translator(config(), VOCAB))
    fast, first = decoder(model, room=16), torch.full((2, 1), 2, device=DEVICE)
    constraints = Constraints(END, max_new_tokens=6)
    for n in (9, 3, 12):
        x = torch.randint(5, VOCAB, (2, n), device=DEVICE)
        valid = torch.arange(n, device=DEVICE) < torch.tensor([[n], [n - 2]], device=DEVICE)
        wanted = generate(model, model.start(x, valid), first, constraints=constraints)
        assert generate(fast, fast.start(x, valid), first, constraints=constraints) == wanted
    assert len(fast.steps) == 1
