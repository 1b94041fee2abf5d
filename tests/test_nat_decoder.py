"""NatDecoder generates the tokens of its model: room for longer sources and for longer answers changes nothing."""

import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import regard.decoding.nat_decoder
from conftest import DEVICE
from regard.config import Config
from regard.decoding import NatDecoder
from regard.decoding.nat_decoder import SOURCE_MULTIPLE, NatGraph
from regard.decoding.nat_decoding import generate_nat
from regard.models.nat import LengthSlots, nat_translator
from regard.runtime.cuda_graph import ExternalReads
from regard.tasks.translation import ReverseTask
from regard.tasks.translation_config import reverse_config

VOCAB, LONGEST = 14, 40
KINDS = ["ctc", "ctc(upsample=2)", "length", "length(copy='uniform')", "masked", "fixed(count=11)"]
SETTINGS = [
    {},
    {"positions": "learned", "depth": 1},
    {"positions": "rotary", "norm": "post", "depth": 1},
    {"mixer": "linear", "depth": 1},
]
FORMS = ["plain", "walked", "graph"] if DEVICE.type == "cuda" else ["plain", "walked"]


class Walked(NatGraph):
    """All that a CUDA graph would do, kernel by kernel."""

    def captured(self, _device):
        self.graph = self
        return self.run()

    def replay(self, source, valid):
        self.source.copy_(source)
        self.valid.copy_(valid)
        return self.run()


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    if request.param == "walked":
        monkeypatch.setattr(regard.decoding.nat_decoder, "NatGraph", Walked)

    def make(model):
        fast = NatDecoder(model, graphs=request.param == "graph")
        fast.graphs = request.param != "plain"
        return fast

    return make


def made(kind, dtype=torch.float64, **changes):
    torch.manual_seed(2)
    config = Config(**{"width": 16, "heads": 2, "depth": 2, "ffn": 24, "dropout": 0.3, "max_len": LONGEST, **changes})
    model = nat_translator(config, VOCAB, kind=kind).to(DEVICE, dtype).eval()
    with torch.no_grad():  # opinions
        for weight in model.parameters():
            weight.mul_(2)
    return model


def sources(b, n, ragged):
    x = torch.randint(5, VOCAB, (b, n), generator=torch.Generator().manual_seed(n)).to(DEVICE)
    return x, torch.arange(n, device=DEVICE) < torch.arange(n, n - b, -1, device=DEVICE)[:, None] if ragged else None


@lru_cache
def answered(kind, changes):
    """A model, and what it generates for sources of several lengths: once for all forms of its decoder."""
    model, answers = made(kind, **dict(changes)), []
    options = [{}, {"lengths": 3, "iterations": 3}] if isinstance(model.slots, LengthSlots) else [{}]
    for n in (1, 5, SOURCE_MULTIPLE, LONGEST - 1):  # the longest rounds up to more than the model takes
        for x, valid in (sources(1, n, ragged=False), sources(3, n, ragged=n > 3)):
            answers += [(x, valid, option, generate_nat(model, x, valid, **option)) for option in options]
    return model, answers


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_ready_says_what_the_model_says_whatever_room_it_has(kind, changes, form):
    if kind == "masked" and changes.get("positions") == "rotary":
        pytest.skip("slots that are all alike, and nothing that tells them apart: the least sure one is chosen by rounding")
    model, answers = answered(kind, tuple(changes.items()))
    fast = form(model)
    for x, valid, option, wanted in answers:
        assert fast(x, valid, **option) == wanted
    assert len({tuple(row) for *_, wanted in answers for row in wanted}) > 5


def test_few_graphs_do_for_many_lengths_and_the_newest_are_kept(monkeypatch):
    monkeypatch.setattr(regard.decoding.nat_decoder, "NatGraph", Walked)
    monkeypatch.setattr(regard.decoding.nat_decoder, "MAX_GRAPHS", 2)
    fast = NatDecoder(made("ctc"))
    fast.graphs = True
    for n in range(1, SOURCE_MULTIPLE + 1):
        fast(sources(1, n, ragged=False)[0])
    assert list(fast.passes) == [(1, SOURCE_MULTIPLE, 1, 1)]
    fast(sources(1, SOURCE_MULTIPLE + 1, ragged=False)[0])
    fast(sources(1, LONGEST, ragged=False)[0])
    assert list(fast.passes) == [(1, 2 * SOURCE_MULTIPLE, 1, 1), (1, LONGEST, 1, 1)]


def test_padded_slots_need_no_word_from_the_device(monkeypatch):
    """With room for the longest answer nobody asks how long it is."""
    monkeypatch.setattr(regard.decoding.nat_decoder, "NatGraph", Walked)
    model = made("masked")
    fast = NatDecoder(model)
    fast.graphs = True
    x = sources(1, 7, ragged=False)[0]
    one = fast._pass((1, SOURCE_MULTIPLE, 4, 2))
    assert one.run().shape == (1, min(SOURCE_MULTIPLE + model.slots.lengths.reach, LONGEST))
    assert fast(x, lengths=4, iterations=2) == generate_nat(model, x, lengths=4, iterations=2)


def test_a_source_that_is_too_long_and_a_wish_that_makes_no_sense_get_the_models_own_sentences(form):
    fast = form(made("ctc", positions="learned"))
    with pytest.raises(ValueError, match="positions were learned"):
        fast(sources(1, LONGEST + 1, ragged=False)[0])
    with pytest.raises(ValueError, match="ctc has a fixed number of slots"):
        fast(sources(1, 3, ragged=False)[0], iterations=2)
    with pytest.raises(ValueError, match="in training"):
        NatDecoder(made("ctc").train())


def test_what_a_pass_reads_from_outside_is_noted_and_what_it_makes_is_not():
    kept, own = torch.ones(3), ExternalReads()
    with own:
        y = (torch.zeros(3) + kept).mul_(2)
        y = y + y
    assert list(own.read) == [kept.untyped_storage().data_ptr()]
    model, x = made("ctc"), sources(1, 4, ragged=False)[0]
    with torch.no_grad():
        model(x)  # tables are made now, and found next time
        with ExternalReads() as noted:
            model(x)
    kept = [module._kept[1] for module in model.modules() if getattr(module, "_kept", None) is not None]
    assert len(kept) == 2 and {x.untyped_storage().data_ptr() for x in (*kept, *model.parameters())} <= noted.read.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device: run `make test-gpu` on one")
@pytest.mark.parametrize("kind", ["ctc", "masked", "length", "fixed(count=11)"])
def test_a_graph_outlives_the_tables_and_the_mode_it_was_made_in(kind):
    model = made(kind).cuda()
    fast, short = NatDecoder(model), torch.randint(5, VOCAB, (1, 6))
    with torch.inference_mode():
        wanted = fast(short)  # from the host
    for n in (17, LONGEST):  # tables of positions grow, the first ones are let go
        x = torch.randint(5, VOCAB, (1, n), device="cuda")
        assert fast(x) == generate_nat(model, x)
    torch.cuda.empty_cache()
    torch.full((1 << 22,), float("nan"), device="cuda")
    assert fast(short) == wanted == generate_nat(model, short.cuda())
    assert len(fast.passes) == 3
    with pytest.raises(ValueError, match="one precision"), torch.autocast("cuda"):
        fast(short)


def test_the_benchmark_compares_every_way_with_those_of_the_base(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    sys.modules.pop("nat_speed", None)
    import nat_speed

    runs, small = [], {"width": 16, "heads": 2, "depth": 1, "ffn": 16, "max_len": 64}
    for decoder in ("ctc", "masked(lengths=2, iterations=3)", "autoregressive"):
        task = ReverseTask(reverse_config().replace({**small, "decoder": decoder, "max_new_tokens": 5}))
        task.read()
        task.splits = {name: part[:4] for name, part in task.splits.items()}
        task.texts = {name: part[:4] for name, part in task.texts.items()}
        torch.manual_seed(0)
        runs.append(nat_speed.Run(decoder, task, task.model().to(DEVICE).eval(), [x for x, _ in task.splits["test"]]))
    every = [way for run in runs for way in nat_speed.ways(run, DEVICE)]
    scores = [nat_speed.scored(way.run, way.asked, "test") for way in every]
    chosen = nat_speed.readable(runs, 3)
    with torch.no_grad():
        said, times = nat_speed.clocked(every, chosen, DEVICE, nat_speed.Progress(10))
    rows = nat_speed.table(every, scores, said, times)
    assert [(row["decoder"], row["iterations"]) for row in rows[::2]][:4] == [
        ("ctc", None),
        ("masked", 1),
        ("masked", 3),
        ("masked", 4),
    ]
    assert all(row["same"] == 1 and row["bleu"] is None and row["exact"] >= 0 and row["ms_median"] > 0 for row in rows)
    for row in rows[-4:]:
        assert row[f"speedup_{row['way'].replace(' ', '_')}"] == 1
    assert chosen == [0, 1, 2] and runs[1].task.decoder.iterations == 3
