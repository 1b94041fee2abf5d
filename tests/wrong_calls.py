"""Wrong calls, made for every row of the catalogue: what a user could pass by mistake. `refused` is what each must be."""

import linecache
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import regard
from conftest import HEADS, WIDTH, Case
from regard.mixers.base import Can, Dims, Mixer, State
from regard.spec import Spec, _spec_options

HOME = Path(regard.__file__).parent
BAD = (None, "x", -1, 0, 1.5, True, math.nan, math.inf, (), [], {}, [1, "x"], b"x", 1j, 10**30, object(), torch.ones(2))
Call = tuple[str, Callable[[], object]]


def refused(call: Callable[[], object], accepts: bool = False) -> str | None:
    """None if a call raises ValueError or TypeError from a `raise` of this library, else what happened instead.

    accepts: the call may also be fine after all.
    """
    try:
        call()
    except (ValueError, TypeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        first = linecache.getline(frame.filename, frame.lineno or 0).strip()
        own = HOME in Path(frame.filename).parents and first.startswith("raise ")
        return (
            None
            if own and len(str(error).split()) > 3
            else f"{type(error).__name__} from {frame.filename}:{frame.lineno}: {error}"
        )
    except Exception as error:  # noqa: BLE001 - whatever else comes is what this looks for
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None if accepts else "accepted"


def unwarned(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What torch makes only with a warning that its kind is in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


FLOATS = ("float64", "float16", "bfloat16", "another device")  # which a layer without weights may well mix


def wrong_tokens(n: int = 12) -> Iterator[tuple[str, object]]:
    """What is no (3, n, WIDTH) tensor of float32."""
    x = torch.randn(3, n, WIDTH)
    yield from {
        "None": None,
        "a list": x.tolist(),
        "numpy": x.numpy(),
        "a string": "tokens",
        "a number": 1.0,
        "float64": x.double(),
        "float16": x.half(),
        "bfloat16": x.bfloat16(),
        "int64": x.long(),
        "bool": x > 0,
        "complex": x.to(torch.complex64),
        "0-D": x[0, 0, 0],
        "1-D": x[0, 0],
        "2-D": x[0],
        "4-D": x[None],
        "too wide": torch.cat([x, x], -1),
        "too narrow": x[..., :-1],
        "no width": x[..., :0],
        "channels first": x.mT,
        "another device": x.to("meta"),
        "sparse": x.to_sparse(),
        "sparse rows": unwarned(lambda: x[0].to_sparse_csr()),
        "nested": unwarned(lambda: torch.nested.nested_tensor([x[0], x[1, :5]])),
    }.items()


def wrong_masks(n: int = 12) -> Iterator[tuple[str, object]]:
    """What is no (3, n) bool tensor."""
    valid = torch.ones(3, n, dtype=torch.bool)
    yield from {
        "a list": valid.tolist(),
        "numpy": np.ones((3, n), dtype=bool),
        "True": True,
        "int64": valid.long(),
        "float32": valid.float(),
        "0 and -inf": torch.zeros(3, n).masked_fill(~valid, -math.inf),
        "1-D": valid[0],
        "3-D": valid[..., None],
        "pairs": valid[:, None].expand(3, n, n),
        "another batch": valid[:2],
        "one row for all": valid[:1],
        "too short": valid[:, :-1],
        "too long": torch.cat([valid, valid], 1),
        "another device": valid.to("meta"),
        "sparse": valid.float().to_sparse(),
        "lengths": torch.tensor([3, 4, 5]),
    }.items()


def wrong_uses(m: Mixer, cross: bool) -> Iterator[Call]:
    """Wrong calls of a layer that was built rightly, in float32."""
    x, valid = torch.randn(3, 12, WIDTH), torch.ones(3, 12, dtype=torch.bool)
    read = {"context": x} if cross else {}
    for what, bad in wrong_tokens():
        if what in FLOATS and m.like() is None:
            continue
        yield f"x is {what}", lambda bad=bad: m(bad, **read)
        if cross and bad is not None:
            yield f"context is {what}", lambda bad=bad: m(x, context=bad)
    for what, bad in wrong_masks():
        yield f"valid is {what}", lambda bad=bad: m(x, valid=bad, **read)
        if cross:
            yield f"query_valid is {what}", lambda bad=bad: m(x, context=x, query_valid=bad)
    if cross:
        yield "no context", lambda: m(x)
        yield "a context of another batch", lambda: m(x, context=x[:2])
        yield "a mask of x for a context of another length", lambda: m(x, context=x[:, :5], valid=valid)
    else:
        yield "a context", lambda: m(x, context=x)
    if m.dims.causal and Can.STREAM in m.can:
        yield from wrong_streams(m)
    if m.dims.max_len is not None:
        long = torch.randn(1, m.dims.max_len + 1, WIDTH)
        yield "a sequence longer than max_len", lambda: m(long[:, :3], context=long) if cross else m(long)


def wrong_streams(m: Mixer) -> Iterator[Call]:
    """Wrong calls of start, extend, select and fan of a causal layer in float32."""
    x = torch.randn(3, 12, WIDTH)
    state = m.extend(m.start(3), x)[1]
    for bad in (None, -1, "3", 3.0, True, [3], torch.ones(3)):
        yield f"start({bad!r})", lambda bad=bad: m.start(bad)
    yield "start from a context", lambda: m.start(context=x)
    yield "start with a mask", lambda: m.start(3, valid=torch.ones(3, 1, dtype=torch.bool))
    for what, bad in wrong_tokens(1):
        yield f"extend by x that is {what}", lambda bad=bad: m.extend(state, bad)
    for what, bad in wrong_masks(12):
        yield f"extend with a mask that is {what}", lambda bad=bad: m.extend(state, x, bad)
    for batch in (0, 1, 2, 4, 6):
        yield f"a state of 3 by a batch of {batch}", lambda batch=batch: m.extend(state, torch.randn(batch, 1, WIDTH))
        other = m.extend(m.start(batch), torch.randn(batch, 2, WIDTH))[1]
        yield f"a state of {batch} by a batch of 3", lambda other=other: m.extend(other, x)
    for what, bad in {"None": None, "a tuple": tuple(state), "its memory": state.memory, "a text": "state"}.items():
        yield f"a state that is {what}", lambda bad=bad: m.extend(bad, x)
    yield "a state without a maker", lambda: m.extend(State(state.memory, state.t, state.start), x)
    yield "the state of a stack", lambda: m.extend(State((state,), state.t, state.start), x)
    yield "a state on another device", lambda: m.extend(state._replace(t=state.t.to("meta")), x)
    wrong = {
        "None": None,
        "a list": [0, 1],
        "a number": 1,
        "float": torch.tensor([0.0]),
        "bool": torch.tensor([True, False, True]),
        "2-D": torch.tensor([[0, 1]]),
        "0-D": torch.tensor(1),
        "too large": torch.tensor([0, 3]),
        "negative": torch.tensor([-1]),
        "another device": torch.tensor([0]).to("meta"),
    }
    for what, rows in wrong.items():
        yield f"select rows: {what}", lambda rows=rows: state.select(rows)
    for k in (0, -1, True, 1.5, "2", None):
        yield f"fan({k!r})", lambda k=k: state.fan(k)


def wrong_builds(case: Case) -> Iterator[Call]:
    """Layers with one wrong word each. Some of them may be right after all: the layer then has to work."""
    good = {"width": WIDTH, "heads": HEADS, "max_len": 16}

    def tried(spec: Spec, **dims: object) -> Callable[[], object]:
        def call() -> object:
            m = spec.build(Dims(**{**good, **dims}), positions=case.positions)  # type: ignore[arg-type]
            x = torch.randn(2, 5, m.dims.width)
            return m(x, context=torch.randn(2, 7, m.dims.context_width or m.dims.width)) if m.dims.cross else m(x)

        return call

    for name in ("width", "heads", "kv_heads", "key_dim", "value_dim", "context_width", "causal", "cross", "max_len", "dropout"):
        for bad in BAD:
            yield f"{name}={bad!r}"[:60], tried(case.spec, **{name: bad})
    for name in _spec_options(case.row.name):
        for bad in BAD:

            def call(name: str = name, bad: object = bad) -> object:
                return tried(Spec(case.row.name, **{**case.example.options, name: bad}))()

            yield f"{case.row.name}({name}={bad!r})"[:60], call
    yield "an unknown option", lambda: Spec(case.row.name, **{**case.example.options, "colour": 1})
    for bad in (1, None, "x", [True]):
        yield f"shared_qk={bad!r}", lambda bad=bad: case.spec.build(Dims(**good), shared_qk=bad)  # type: ignore[arg-type]
    for bad in (1, "x", "rotary(", "relative(clip=-1)", b"x", [], 1.5, "floater", "learned"):
        yield f"positions={bad!r}", lambda bad=bad: case.spec.build(Dims(**good), positions=bad)  # type: ignore[arg-type]
