"""Check a mechanism: every law with its outcome, and for a broken one the smallest case that shows it."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import getsourcefile
from typing import Any

import torch

from regard.laws.law_case import LAW_HEADS, LAW_MAX_LEN, LAW_WIDTH, Case
from regard.laws.law_table import LAWS, Law
from regard.laws.verdicts import DoesNotApply, LawBroken
from regard.mixers.estimation import PoorEstimate
from regard.ops.backend import SlowBackend
from regard.spec import Named
from regard.text import unknown

PASS, FAILED, UNFIT = "pass", "failed", "does not apply"
_SMALL = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 72, 100)  # lengths that a broken law is tried at again
_SCALED = ("n", "t", "before")  # counts of tokens among the sizes of a law


@dataclass(frozen=True)
class Finding:
    """Hold the outcome of one law: "pass", "failed" or "does not apply", and why.

    `law` is the law, `outcome` the verdict, `reason` why it failed or does not apply, `smallest` the smallest case as a line of
    Python, `built` how the layer was built, `raised` an error that was raised, `seconds` how long it took.

    >>> from regard.laws import check_laws
    >>> (finding,) = check_laws("fnet", ["future_is_unseen"])
    >>> finding.failed, finding.reason
    (False, 'it does not claim causal')
    """

    law: Law
    outcome: str
    reason: str = ""  # what is broken, with numbers; or why the law does not apply
    smallest: str = ""  # a broken law: a Python line that shows it again
    built: str = ""  # a broken law: how the layer was built
    raised: str = ""  # a law that is broken by an exception: its kind, and the line of the mechanism
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.outcome == FAILED

    @property
    def advice(self) -> str:
        """What to do next."""
        return "correct the code that raises: what it is called with here is allowed" if self.raised else self.law.advice

    def to_json(self) -> dict[str, Any]:
        found = {"law": self.law.name, "sentence": self.law.sentence, "outcome": self.outcome, "seconds": round(self.seconds, 3)}
        if self.reason:
            found["reason"] = self.reason
        if self.failed:
            found |= {"built": self.built, "smallest": self.smallest, "next": self.advice}
        return found


def check_laws(
    mechanism: Named,
    laws: Iterable[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    report: Callable[[Finding], None] | None = None,
) -> list[Finding]:
    """Check laws, all unless named, for a mechanism: a name, a text, a Spec, a pattern or a class.

    `report` gets each outcome at once. Layers are 32 wide with 4 heads, sequences up to 160 tokens long, and options must fit to
    that. Random numbers outside of the check stay as they are.

    `mechanism` is checked against `laws`, their names, on a `device`.

    >>> from regard.laws import check_laws
    >>> [finding.outcome for finding in check_laws("linear", ["empty_inputs", "dropout_keeps_the_mean"])]
    ['pass', 'does not apply']
    """
    names = list(LAWS) if laws is None else list(laws)
    for name in names:
        if name not in LAWS:
            raise ValueError(unknown("there is no law", name, LAWS))
    case, found = Case(mechanism, device=device), []
    devices = [case.device] if case.device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore", PoorEstimate)
        warnings.simplefilter("ignore", SlowBackend)
        _check_builds(case)
        for name in names:
            found.append(_checked(LAWS[name], case))
            if report is not None:
                report(found[-1])
    return found


def _check_builds(case: Case) -> None:
    """Refuse what cannot be built at all, in its own words; an error that is no refusal gets a sentence with its place."""
    try:
        case.build()
    except (ValueError, TypeError, MemoryError):
        raise
    except Exception as error:
        name, first = case.row.make.__name__, str(error).partition("\n")[0]
        place = _place(error, case) or _last_place(error)
        raise ValueError(f"{name} cannot be built: it raises {type(error).__name__}: {first} ({place})") from error


def _checked(law: Law, case: Case) -> Finding:
    started = time.perf_counter()
    if not law.fits(case):
        return Finding(law, UNFIT, law.why_not(case))
    outcome, reason, smallest, built, raised = PASS, "", "", "", ""
    for given in law.given:
        sizes = law.sizes(given)
        try:
            broken = _broken(law, case, sizes)
        except DoesNotApply as why:
            outcome, reason = UNFIT, str(why)
            break
        if broken is not None:
            sizes, broken, built = _shrunk(law, case, sizes, broken)
            outcome, reason, smallest, raised = FAILED, str(broken), _again(law, case, sizes), broken.raised
            break
    return Finding(law, outcome, reason, smallest, built, raised, time.perf_counter() - started)


def _broken(law: Law, case: Case, given: dict[str, Any]) -> LawBroken | None:
    """Return how a mechanism breaks a law with these sizes; an exception of its own code breaks it too."""
    case.latest = {}
    try:
        law.holds(case, **given)
    except LawBroken as broken:
        return broken
    except DoesNotApply:
        raise
    except Exception as error:  # noqa: BLE001 - the code of a mechanism may raise anything
        kind, place = f"it raises {type(error).__name__}", _place(error, case)
        first = str(error).partition("\n")[0]
        return LawBroken(kind, f"{first}{f' ({place})' if place else ''}", raised=f"{kind}, {place}" if place else kind)
    return None


def _shrunk(law: Law, case: Case, given: dict[str, Any], broken: LawBroken) -> tuple[dict[str, Any], LawBroken, str]:
    """Find the smallest of a few lengths where the same is broken; returns the sizes, what is broken, and how it was built."""
    built = _layer_text(case)
    for n in (n for n in _SMALL if n < given.get("n", 0)):
        fewer = {name: value * n // given["n"] if name in _SCALED else value for name, value in given.items()}
        try:
            found = _broken(law, case, fewer)
        except DoesNotApply:
            continue
        if found is not None and found.what == broken.what:
            return fewer, found, _layer_text(case)
    return given, broken, built


def _place(error: Exception, case: Case) -> str:
    """Return the line of the mechanism's own file where an error was raised."""
    try:
        own = getsourcefile(case.row.make)
    except (TypeError, OSError):  # a class without a file
        own = None
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if own is not None and frame.filename == own]
    return _frame_text(lines[-1]) if lines else ""


def _last_place(error: Exception) -> str:
    """Return the line where an error was raised, of any file."""
    return _frame_text(traceback.extract_tb(error.__traceback__)[-1])


def _frame_text(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}"


def _layer_text(case: Case) -> str:
    """Write the call that built the layer last."""
    latest = {"width": LAW_WIDTH, "heads": LAW_HEADS, "max_len": LAW_MAX_LEN, **case.latest}
    dtype = latest.pop("dtype", torch.float64)
    options = "".join(f", {name}={value!r}" for name, value in latest.items() if value is not False)
    return f"layer({str(case.spec)!r}{options}).to({dtype})"


def _again(law: Law, case: Case, given: dict[str, Any]) -> str:
    """Write the Python line that checks one law with these sizes."""
    sizes = "".join(f", {name}={value!r}" for name, value in given.items())
    torch_too = "import torch; " if any(isinstance(value, torch.dtype) for value in given.values()) else ""
    return f"{torch_too}from regard.laws import Case, {law.name}; {law.name}(Case({str(case.spec)!r}){sizes})"
