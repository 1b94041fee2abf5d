"""`regard check`: mechanisms that are broken on purpose fail the right law, and the command prints what, where and what next."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from regard import CATALOGUE, Can, Core, Dims, Example, Row, Spec, per_query_head, register
from regard.cli import app
from regard.laws import LAWS, Case, LawBroken, check_laws, future_is_unseen, scan_is_the_loop
from regard.laws.verdicts import agree
from regard.mixers.softmax import Softmax


class Sum(NamedTuple):
    total: torch.Tensor  # (b g 1 e)
    count: torch.Tensor  # (b 1 1 1)


class Average(Core):
    """Every query gets the mean of all values."""

    can = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM
    positional = False
    ignores = ("q", "k")

    def empty(self, k, v):  # noqa: ARG002
        return Sum(v.new_zeros(*v.shape[:2], 1, v.shape[-1]), v.new_zeros(len(v), 1, 1, 1))

    def push(self, memory, k, v, places):  # noqa: ARG002
        real = torch.ones_like(places.at, dtype=torch.bool) if places.valid is None else places.valid
        real, v = real[:, None, None].to(v.dtype), v.masked_fill(~real[:, None, :, None], 0)
        return Sum(memory.total + real @ v, memory.count + real.sum(-1, keepdim=True))

    def read(self, memory, q, places):  # noqa: ARG002
        mean = memory.total / memory.count.clamp(min=1)
        return per_query_head(mean, q).expand(-1, -1, q.shape[2], -1)


class Ahead(Average):
    """A scan that reads before it is done writing."""

    def scan(self, memory, q, k, v, places):
        memory = self.push(memory, k, v, places)
        return self.read(memory, q, places), memory


class Trusting(Average):
    """Counts padding."""

    def push(self, memory, k, v, places):  # noqa: ARG002
        real = torch.ones(len(v), 1, 1, v.shape[2], dtype=v.dtype, device=v.device)
        return Sum(memory.total + real @ v, memory.count + real.sum(-1, keepdim=True))


class InPlace(Average):
    """Writes into the memory that it was given."""

    def push(self, memory, k, v, places):
        new = super().push(memory, k, v, places)
        with torch.no_grad():
            memory.total.copy_(new.total)
        return new


class Mixing(Average):
    """Adds the mean of the batch."""

    def read(self, memory, q, places):
        y = super().read(memory, q, places)
        return y + y.mean(0, keepdim=True)


class Ungrouped(Average):
    """Repeats key-value heads in the wrong order."""

    def read(self, memory, q, places):
        wide = memory.total.repeat(1, q.shape[1] // memory.total.shape[1], 1, 1)
        return super().read(Sum(wide, memory.count), q, places)


class Detached(Average):
    """The right outputs of scan, and half of its gradients."""

    def scan(self, memory, q, k, v, places):
        y, memory = super().scan(memory, q, k, v, places)
        return (y + y.detach()) / 2, memory


class Forgetting(Average):
    """Chunks of 64 tokens, each of which begins with an empty memory."""

    def scan(self, memory, q, k, v, places):
        found = []
        for first in range(0, max(1, q.shape[2]), 64):
            here = slice(first, first + 64)
            memory = self.empty(k, v) if first else memory
            part = places.part(first, min(first + 64, q.shape[2]))
            y, memory = super().scan(memory, q[:, :, here], k[:, :, here], v[:, :, here], part)
            found.append(y)
        return torch.cat(found, 2), memory


class Peeking(Average):
    """Adds the last value of all where there are more than 64 tokens."""

    def scan(self, memory, q, k, v, places):
        y, memory = super().scan(memory, q, k, v, places)
        return (y + per_query_head(v[:, :, -1:], q) if q.shape[2] > 64 else y), memory


class Undefined(Average):
    """Has gradients that are NaN in float16, where a square underflows."""

    def read(self, memory, q, places):
        y = super().read(memory, q, places)
        return y + 0 * (y * 1e-5).square().sum(-1, keepdim=True).sqrt()


class Widening(Average):
    """Answers in float32."""

    def read(self, memory, q, places):
        return super().read(memory, q, places).float()


class Positional(Average):
    """Says that positions matter, which they do not."""

    positional = True


class Numbered(Average):
    """Says that positions do not matter, which they do."""

    def read(self, memory, q, places):
        return super().read(memory, q, places) * (places.at[:, None, :, None] + 1)


class Frozen(Average):
    """A weight that nothing reads."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.unused = nn.Parameter(torch.ones(2, 2))


class Drawn(Average):
    """Draws in evaluation."""

    def read(self, memory, q, places):
        return super().read(memory, q, places) * torch.rand(())


class Deaf(Average):
    """Gives nothing: no token reaches another."""

    def read(self, memory, q, places):
        return 0 * super().read(memory, q, places)


class Overflowing(Average):
    """An exponential without a maximum."""

    def read(self, memory, q, places):
        return super().read(memory, q, places).exp()


BROKEN = {
    Ahead: "future_is_unseen no_gradient_from_the_future stream_is_the_whole_pass scan_is_the_loop",
    Trusting: "padding_is_absent prompts_stream_together",
    InPlace: "states_are_values",
    Mixing: "rows_are_independent",
    Ungrouped: "grouped_heads_are_repeated",
    Detached: "scan_is_the_loop",
    Forgetting: "stream_is_the_whole_pass scan_is_the_loop",
    Peeking: "future_is_unseen no_gradient_from_the_future stream_is_the_whole_pass scan_is_the_loop",
    Undefined: "low_precision_is_close",
    Widening: "low_precision_is_close",
    Numbered: "positions_are_declared permuted_queries",
    Frozen: "shape_and_gradients",
    Drawn: "rows_are_independent weights_are_loaded",
    Deaf: "one_batch_is_fitted",
    Overflowing: "large_inputs_stay_finite",
}
OTHERS = ("any_strides", "future_is_unseen", "padded_rows_are_zero", "cross_attention")  # which most of them keep


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_broken_mechanism_fails_the_right_law(make: Any) -> None:
    broken = BROKEN[make].split()
    found = {finding.law.name: finding for finding in check_laws(make, broken)}
    assert [name for name, finding in found.items() if not finding.failed] == []
    for finding in found.values():
        assert finding.reason and not finding.raised and finding.advice == finding.law.advice
        assert make.__name__ in finding.built and finding.law.name in finding.smallest


def test_a_broken_mechanism_keeps_the_other_laws() -> None:
    """What fails is one thing: sound laws are not blamed."""
    for make, names in ((InPlace, OTHERS), (Detached, OTHERS), (Positional, OTHERS), (Trusting, OTHERS[:2]), (Ungrouped, OTHERS)):
        assert [finding.reason for finding in check_laws(make, names) if finding.outcome != "pass"] == [], make


def test_the_smallest_case_shows_the_same_again() -> None:
    (finding,) = check_laws(Ahead, ["future_is_unseen"])
    sizes = re.search(r"n=(\d+), t=(\d+), b=3\)$", finding.smallest)
    assert sizes is not None and (int(sizes[1]), int(sizes[2])) == (2, 0)
    with pytest.raises(LawBroken, match=r"token 0 changes by .* when tokens from 1 on do"):
        future_is_unseen(Case(Ahead), n=2, t=0)
    with pytest.raises(LawBroken, match="gradients of v of scan differ from the loop: off by"):
        scan_is_the_loop(Case(Detached), n=2)
    (finding,) = check_laws(Forgetting, ["scan_is_the_loop"])
    assert "n=72" in finding.smallest  # the first length behind a chunk


def test_growth_is_checked_where_it_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    growth = ["cost_grows_as_claimed", "memory_grows_as_claimed"]
    monkeypatch.setattr("regard.laws.growth_laws._LOOP_LENGTHS", (16, 64))
    cost, memory = check_laws(Average, growth)
    assert "measured: n ** 1.00" in cost.reason and "measured: t ** 0.00" in memory.reason
    register(Row("average", Average, "own", "The mean.", "", (Example(cost=2, memory=1),)))
    found = check_laws("average", growth)
    assert [finding.outcome for finding in found] == ["failed", "failed"]
    assert "n ** 1.00 for n ** 2: " in found[0].reason and "t ** 0.00 for t ** 1: " in found[1].reason


def test_declarations_are_judged_at_lengths_that_a_row_is_for() -> None:
    """A window of 256 tokens depends on positions, which 40 tokens do not show."""
    for spec in (Positional, "Local(256)"):
        (finding,) = check_laws(spec, ["positions_are_declared"])
        assert finding.outcome == "does not apply" and "right if its options are for longer sequences" in finding.reason
    assert check_laws("sinkhorn", ["shape_and_gradients"])[0].reason == (
        "core.sort has no gradient in 40 tokens: these options are for longer sequences"
    )
    register("said", Positional)
    (finding,) = check_laws("said", ["positions_are_declared"])
    assert finding.failed and finding.reason == "it says positional = True, and moved queries get the same answers"


def test_claims_that_cannot_be_built_are_broken() -> None:
    class Choosy(Softmax):
        def __init__(self, dims: Dims) -> None:
            super().__init__(dims)
            if dims.causal:
                raise ValueError("not today")

    (finding,) = check_laws(Choosy, ["unclaimed_is_refused"])
    assert finding.reason == "it claims causal, and cannot be built for it"


def test_a_mechanism_that_is_not_built_at_all_is_no_pass() -> None:
    class Refusing(Softmax):
        def __init__(self, dims: Dims) -> None:
            super().__init__(dims)
            raise ValueError("not with these sizes")

    with pytest.raises(ValueError, match="not with these sizes"):
        check_laws(Refusing)


def test_random_numbers_outside_stay_as_they_are() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    check_laws("identity", ["rows_are_independent"])
    assert torch.equal(torch.rand(2), wanted)


OWN = '''
import torch
from regard.laws.verdicts import agree
from regard.mixers.softmax import Softmax

class Sound(Softmax):
    """Softmax attention."""

class Future(Softmax):
    """Softmax attention that is never causal."""
    def scan(self, memory, q, k, v, places):
        memory = self.push(memory, k, v, places)
        return self.read(memory, q, places), memory
    def scan_all(self, q, k, v, places):
        return self.scan(self.unwritten(k, v), q, k, v, places)[0]

class Raising(Softmax):
    def read(self, memory, q, places):
        return q.view(-1, 7)

class Boom(Softmax):
    def __init__(self, dims):
        super().__init__(dims)
        {}["lost"]
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_pkg.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["check", *words])


@pytest.mark.usefixtures("package")
def test_the_command_prints_every_law() -> None:
    names = ["rows_are_independent", "future_is_unseen", "dropout_keeps_the_mean"]
    laws = [word for name in names for word in ("--law", name)]
    done = run("checked_pkg:Sound", *laws)
    assert done.exit_code == 0 and [line.split()[:2] for line in done.stdout.splitlines()[:3]] == [["pass", n] for n in names]
    assert "checked_pkg:Sound: 3 kept, 0 broken, 0 not applicable" in done.stdout
    done = run("checked_pkg:Future", *laws)
    assert done.exit_code == 1 and "checked_pkg:Future: 2 kept, 1 broken, 0 not applicable" in done.stdout
    for part in (
        "broken  an output depends on a later token: token 0 changes by",
        "next  delete your `scan`",
        "again  from regard.laws",
    ):
        assert part in done.stdout
    assert "built  layer('checked_pkg:Future', width=32, heads=4, max_len=160, causal=True).to(torch.float64)" in done.stdout


@pytest.mark.usefixtures("package")
def test_the_command_names_the_line_that_raises_once() -> None:
    done = run("checked_pkg:Raising", "--law", "cross_attention", "--law", "positions_are_declared")
    assert done.exit_code == 1 and done.stdout.count("correct the code that raises") == 1
    where = f"checked_pkg.py, line {1 + OWN.splitlines().index('        return q.view(-1, 7)')}, in read"
    flat = re.sub(r"\s+", " ", done.stdout)
    assert flat.count(where) == 2 and "as in cross_attention" in flat


@pytest.mark.usefixtures("package")
def test_a_constructor_that_raises_gets_a_sentence() -> None:
    done = run("checked_pkg:Boom")
    line = 1 + OWN.splitlines().index('        {}["lost"]')
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert "Boom cannot be built: it raises KeyError: 'lost' (" in done.output
    assert f"checked_pkg.py, line {line}, in __init__)" in done.output


@pytest.mark.usefixtures("package")
def test_the_answer_in_json() -> None:
    done = run("checked_pkg:Future", "--json", "--law", "future_is_unseen", "--law", "weights_are_loaded")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["spec"] == "checked_pkg:Future" and found["broken"] == 1
    assert [law["outcome"] for law in found["laws"]] == ["failed", "pass"]
    assert set(found["laws"][0]) == {"law", "sentence", "outcome", "seconds", "reason", "built", "smallest", "next"}
    assert json.loads(run("conv", "--json", "--law", "cross_attention").stdout)["laws"][0]["reason"] == "it does not claim cross"


def test_names_specs_and_mistakes() -> None:
    done = run("Local(4) | Global(first=1)", "--law", "scan_is_the_loop")
    assert done.exit_code == 0 and "sparse(pattern=Local(4) | Global(first=1)): 1 kept" in done.stdout
    for words, message in (
        (["sofmax"], "did you mean"),
        (["softmax", "--law", "causality"], "there is no law 'causality'"),
        (["nowhere:Mine"], "there is no module nowhere"),
        (["mlp_mixer(hidden=0)"], "hidden"),
    ):
        wrong = run(*words)
        assert wrong.exit_code == 2 and message in wrong.output, wrong.output


def test_without_a_mechanism_the_laws_are_named() -> None:
    listed = run()
    assert listed.exit_code == 0 and all(name in listed.stdout for name in LAWS)
    assert [law["law"] for law in json.loads(run("--json").stdout)] == list(LAWS)


def test_a_row_is_registered_whole() -> None:
    row = Row("mean_of_all", Average, "own", "The mean.", "", (Example(cost=1, memory=0),))
    assert register(row) is row is CATALOGUE["mean_of_all"] and Spec.parse("mean_of_all").row is row
    with pytest.raises(ValueError, match="mean_of_all is taken"):
        register(row)
    with pytest.raises(TypeError, match="a Row has a class already"):
        register(row, Softmax)
    with pytest.raises(ValueError, match="needs an example"):
        register(Row("empty_one", Average, "own", "", "", ()))
    with pytest.raises(TypeError, match="a mechanism is a class"):
        register("no_class")


def test_another_type_is_another_result() -> None:
    ones = torch.ones(2)
    agree(ones, ones, "the same")
    for other in (ones.double(), torch.ones(2, 1), 2 * ones, ones * torch.nan):
        with pytest.raises(LawBroken, match="it differs: "):
            agree(other, ones, "it differs")
