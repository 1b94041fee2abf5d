"""Is attention the bottleneck? Parts of a model over n, the end-to-end time with other mechanisms, and the error of predictions.

A model of `depth` layers is composed: one of 1 and one of 3 layers are measured, which gives the cost of a layer and of all
else. With another mechanism it is composed in the same way, from two models that have it. A model from a factory, which has its
own depth, is changed by the difference of two parts, each timed alone on the same tokens. What is subtracted is measured in
turns, and how much these differ, multiplied in the same way, is the spread of a prediction.
Time of the host and time of the device are composed apart, and the longer one is the prediction (`regard.bench.step_time`).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.bench.advised_model import (
    AdviceRequest,
    CannotCall,
    Runnable,
    factory_model,
    own_model,
    substitute,
    with_substitutes,
)
from regard.bench.machine import made_with
from regard.bench.model_parts import (
    ATTENTION,
    IN_EVERY_LAYER,
    OPTIMISER,
    PART_KINDS,
    PROJECTIONS,
    REST,
    Part,
    part_call,
    projection_call,
    recorded_parts,
    saved_bytes,
)
from regard.bench.record import Report, Save
from regard.bench.speed import FAILURES, Measured, failure_text
from regard.bench.step_time import NO_TIME, StepTime, deeper, real_time, step_time, times_in_turns
from regard.bench.summary import crossing
from regard.bench.timing import Call, light_collections
from regard.bench.workload import spec_text
from regard.spec import Spec

SHALLOW = 3  # layers of the second model that is measured
WEIGHT_COPIES = 4  # of all weights in training: weights, gradients, and two moments of AdamW


@dataclass
class Frame:
    """Hold one length of the model: its composed time, and its parts alone."""

    whole: StepTime
    optimiser: StepTime
    times: dict[str, StepTime]  # by kind of part, all of its occurrences
    saved: dict[str, float]  # bytes kept for the backward pass, by kind; REST is what no part has
    parts: list[Part]
    weights: int  # bytes of all weights


def advice_record(request: AdviceRequest, report: Report, save: Save) -> dict[str, Any]:
    """Measure a request. `report` is called before every job, `save` with the record after every length."""
    record: dict[str, Any] = {"benchmark": "advise", "settings": request.to_json(), "made_with": made_with()}
    record |= {"shares": [], "predictions": [], "checks": []}
    lengths, mixers = request.models.lengths, request.models.mixers
    total = len(lengths) * (1 + len(mixers)) + request.checks
    done = 0
    with light_collections():
        for n in lengths:
            report(done, total, f"parts at n = {n:,}")
            done += 1
            frame = _frame_or_reason(request, n, record)
            for spec in mixers:
                report(done, total, f"{spec_text(spec)} at n = {n:,}")
                done += 1
                if frame is not None:
                    record["predictions"].append(_prediction(request, frame, spec, n))
            save(record)
        for spec, n in checked_models(request, record["predictions"]):
            report(done, total, f"whole model with {spec_text(spec)}, n = {n:,}")
            done += 1
            record["checks"].append(_check(request, spec, n, record["predictions"]))
            save(record)
    report(total, total, "done")
    record["attention_from"] = attention_from(record["shares"])
    record["error"] = worst_error(record["checks"])
    save(record)
    return record


def _frame_or_reason(request: AdviceRequest, n: int, record: dict[str, Any]) -> Frame | None:
    row: Measured = {"n": n, "batch": request.batch_at(n)}
    try:
        frame = measured_frame(request, n)
    except (torch.OutOfMemoryError, CannotCall) as error:
        record["shares"].append(row | {"reason": failure_text(error)})
        return None
    finally:
        _release(request)
    record["shares"].append(row | share_row(frame))
    return frame


def share_row(frame: Frame) -> Measured:
    """Milliseconds and bytes by part, on the clock that limits the model."""
    total = frame.whole
    bound = total.host_bound
    ms = {kind: 1e3 * frame.times[kind].of_bound(bound) for kind in PART_KINDS if kind in frame.times}
    ms[OPTIMISER] = 1e3 * frame.optimiser.of_bound(bound)
    ms[REST] = max(0.0, 1e3 * total.total - sum(ms.values()))
    held = frame.saved | {OPTIMISER: float(frame.weights)}
    return {"ms": 1e3 * total.total, "bound": "host" if bound else "device", "parts_ms": ms, "parts_bytes": held}


def measured_frame(request: AdviceRequest, n: int) -> Frame:
    """Measure the model at one length."""
    if request.factory:
        return _factory_frame(request, n)
    depth, wanted = _depths(request)
    one, many = _shallow_models(request, request.base, n)
    whole = _composed(request, one, many)
    optimiser = deeper(_optimiser_time(one, request), _optimiser_time(many, request), depth, wanted)
    saved = _extrapolated(_held(one, request), _held(many, request), depth, wanted)
    sizes = _extrapolated(_weight_bytes(one.model), _weight_bytes(many.model), depth, wanted)
    del many
    parts = recorded_parts(one.model, one.loss)
    return _framed(request, parts, (whole, optimiser), saved, sizes, wanted)


def _depths(request: AdviceRequest) -> tuple[int, int]:
    """Return the layers of the second model that is measured, and those of the model that is asked about."""
    return min(SHALLOW, request.models.depth), request.models.depth


def _shallow_models(request: AdviceRequest, spec: Spec, n: int) -> tuple[Runnable, Runnable]:
    """Build the two models of a mechanism from which a deeper one is composed."""
    return own_model(request, spec, n, 1), own_model(request, spec, n, _depths(request)[0])


def _composed(request: AdviceRequest, one: Runnable, many: Runnable) -> StepTime:
    """Measure both shallow models, and compose the time of the whole one."""
    layer, more = _step_times(request, one, many)
    return deeper(layer, more, *_depths(request))


def _factory_frame(request: AdviceRequest, n: int) -> Frame:
    made = factory_model(request, n)
    (whole,) = _step_times(request, made)
    optimiser = _optimiser_time(made, request)
    parts = recorded_parts(made.model, made.loss, request.attention)
    return _framed(request, parts, (whole, optimiser), _held(made, request), _weight_bytes(made.model), 1)


def _step_times(request: AdviceRequest, *made: Runnable) -> list[StepTime]:
    steps = [one.step(request.training, request.optimiser) for one in made]
    return times_in_turns(steps, request.device, request.models.seconds)


def _framed(
    request: AdviceRequest,
    parts: list[Part],
    measured: tuple[StepTime, StepTime],
    saved: float,
    weights: float,
    repeats: int,
) -> Frame:
    times: dict[str, StepTime] = {}
    held: dict[str, float] = {}
    for part in parts:
        count = part.count * (repeats if part.kind in IN_EVERY_LAYER else 1)
        alone = step_time(_own_call(part, request), request.device, request.models.seconds)
        if part.kind == ATTENTION:
            projected = projection_call(part, request.precision, request.training)
            if projected is not None:
                maps = step_time(projected, request.device, request.models.seconds)
                alone = alone.plus(maps, -1)
                times[PROJECTIONS] = times.get(PROJECTIONS, NO_TIME).plus(maps, count)
        times[part.kind] = times.get(part.kind, NO_TIME).plus(alone, count)
        held[part.kind] = held.get(part.kind, 0.0) + count * _part_held(part, request)
    held[REST] = max(0.0, saved - sum(held.values()))
    copies = WEIGHT_COPIES if request.training else 1
    return Frame(*measured, times, held, parts, int(weights * copies))


def _own_call(part: Part, request: AdviceRequest) -> Call:
    return part_call(part.module, part.args, part.kwargs, request.precision, request.training)


def _prediction(request: AdviceRequest, frame: Frame, spec: Spec, n: int) -> Measured:
    row: Measured = {"spec": spec_text(spec), "n": n}
    try:
        predicted = predicted_total(request, frame, spec, n)
    except FAILURES as error:
        return row | {"reason": failure_text(error)}
    finally:
        _release(request)
    if predicted.total <= predicted.spread:
        return row | {"reason": "times differ too much between turns: give more --seconds, on a machine without other programs"}
    now = frame.whole.total
    found = {"ms": 1e3 * predicted.total, "spread_ms": 1e3 * predicted.spread, "gain": now / max(predicted.total, 1e-9)}
    return row | found | {"bound": "host" if predicted.host_bound else "device"}


def predicted_total(request: AdviceRequest, frame: Frame, spec: Spec, n: int) -> StepTime:
    """Compose the time of the whole model with another mechanism."""
    total = frame.whole
    if not request.factory:
        if spec == request.base:
            return total
        return _composed(request, *_shallow_models(request, spec, n))
    for part in (part for part in frame.parts if part.kind == ATTENTION):
        mixer = substitute(request, part, spec, n)
        call = part_call(mixer, (part.tokens,), {}, request.precision, request.training)
        own, other = times_in_turns([_own_call(part, request), call], request.device, request.models.seconds)
        total = total.plus(other.minus(own), part.count)
    return total


def checked_models(request: AdviceRequest, predictions: Sequence[Measured]) -> list[tuple[Spec, int]]:
    """Choose whole models to measure: the fastest by prediction, the model's own, the slowest.

    Each at the longest and at the shortest length first: the device limits one, the host may limit the other.
    """
    ranked: dict[int, list[Spec]] = {}
    for row in sorted((row for row in predictions if "ms" in row), key=lambda row: row["ms"]):
        ranked.setdefault(row["n"], []).append(Spec.parse(row["spec"]))
    longest, *others = sorted(ranked, reverse=True) or [0]
    lengths = [longest, *others[::-1]]
    ways = (lambda own: own[:1], lambda own: [spec for spec in own if spec == request.base], lambda own: own[-1:])
    found = [(spec, n) for way in ways for n in lengths for spec in way(ranked.get(n, []))]
    return list(dict.fromkeys(found))[: request.checks]


def measured_whole(request: AdviceRequest, spec: Spec, n: int) -> float:
    """Measure the seconds of a step of the whole model with a mechanism, as deep as it is."""
    if request.factory:
        made = factory_model(request, n)
        parts = recorded_parts(made.model, made.loss, request.attention)
        made = with_substitutes(request, made, parts, spec, n)
    else:
        made = own_model(request, spec, n, request.models.depth)
    return real_time(made.step(request.training, request.optimiser), request.device, request.models.seconds)


def _check(request: AdviceRequest, spec: Spec, n: int, predictions: Sequence[Measured]) -> Measured:
    text = spec_text(spec)
    row: Measured = {"spec": text, "n": n}
    predicted = next(x["ms"] for x in predictions if x["spec"] == text and x["n"] == n)
    try:
        measured = 1e3 * measured_whole(request, spec, n)
    except FAILURES as error:
        return row | {"reason": failure_text(error)}
    finally:
        _release(request)
    return row | {"predicted_ms": predicted, "measured_ms": measured, "error": predicted / measured - 1}


def attention_from(shares: Sequence[Measured]) -> dict[str, float | None]:
    """Return the length from which attention takes more time than any other part, and than all others together."""
    rows = [row for row in shares if "ms" in row]
    found: dict[str, float | None] = {}
    for name, rival in (("largest", _largest_other), ("half", _all_others)):
        pairs = [(row["n"], row["parts_ms"][ATTENTION] / max(rival(row["parts_ms"]), 1e-9)) for row in rows]
        usable = [(n, share) for n, share in pairs if share > 0]
        found[name] = crossing(sorted(usable)) if usable else None
    return found


def _largest_other(parts: dict[str, float]) -> float:
    return max(value for kind, value in parts.items() if kind != ATTENTION)


def _all_others(parts: dict[str, float]) -> float:
    return sum(value for kind, value in parts.items() if kind != ATTENTION)


def worst_error(checks: Sequence[Measured]) -> float | None:
    """Return the largest error of the checked predictions, without its sign."""
    errors = [abs(row["error"]) for row in checks if "error" in row]
    return max(errors, default=None)


def _optimiser_time(made: Runnable, request: AdviceRequest) -> StepTime:
    if not (request.training and request.optimiser):
        return NO_TIME
    update = made.update()
    for weight in made.model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    found = step_time(update.step, request.device, request.models.seconds)
    update.zero_grad()
    return found


def _held(made: Runnable, request: AdviceRequest) -> float:
    return float(saved_bytes(made.loss, made.model)) if request.training else 0.0


def _part_held(part: Part, request: AdviceRequest) -> float:
    if not request.training:
        return 0.0

    def forward() -> Any:
        with request.precision():
            return part.module(*part.args, **part.kwargs)

    return float(saved_bytes(forward, part.module))


def _weight_bytes(model: nn.Module) -> float:
    return float(sum(p.numel() * p.element_size() for p in model.parameters()))


def _extrapolated(one: float, many: float, depth: int, wanted: int) -> float:
    if depth == 1:
        return one
    return one + (many - one) * (wanted - 1) / (depth - 1)


def _release(request: AdviceRequest) -> None:
    gc.collect()
    if request.device.type == "cuda":
        torch.cuda.empty_cache()
