"""Tables of speech: digits and voices, recognition, synthesis."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from tables_base import Made, not_yet, table

READERS = {"plain": "softmax (`plain`)", "location": "location-aware (`location`)", "monotonic": "monotonic (`monotonic`)"}


def speech(made: Made) -> str:
    """Scores of digits by the voice that is held out, and of voices, beside floors."""
    trained = [row for row in made["rows"] if row["group"] != "floors"]
    if not trained:
        return not_yet("speech.py --work runs/speech")
    floors = {row["name"]: row for row in made["rows"] if row["group"] == "floors"}
    w = made["made_with"]
    source = f"({w['device']}, {w['threads']} thread; torch {w['torch']}; commits of the runs are in results/speech.json.)"
    parts = [_digits([row for row in trained if row["group"] == "digits"], floors)]
    parts.append(_front([row for row in trained if row["group"] == "front"]))
    parts.append(_voices([row for row in trained if row["group"] == "voices"], floors))
    parts.append(_recognised([row for row in trained if row["group"] == "an4"], floors))
    parts.append(_ahead([row for row in trained if row["group"] == "ahead"]))
    missing = [group for group in ("an4", "ahead", "strings") if not any(row["group"] == group for row in trained)]
    if missing:
        parts.append(not_yet(f"speech.py --work runs/speech --only {' '.join(missing)}"))
    return "\n\n".join([f"Weights are chosen on validation, test is scored once. {source}", *filter(None, parts)])


def _test(row: dict[str, Any]) -> dict[str, float]:
    return row["scores"][0]["scores"]


def _digits(rows: list[dict[str, Any]], floors: dict[str, dict[str, Any]]) -> str:
    """Accuracy for each voice that is held out: the mean over seeds, and the mean of all voices."""
    if not rows:
        return ""
    by: dict[str, list[float]] = {}
    for row in rows:
        by.setdefault(row["name"].split()[1], []).append(_test(row)["accuracy"])
    own = {voice: mean(values) for voice, values in sorted(by.items())}
    ridges = [{voice: floors[f"floor fsdd {voice}, {how}"]["accuracy"] for voice in own} for how in ("ridge", "ridge of fifths")]
    body = [[voice, len(by[voice]), *(f"{found[voice]:.1f}" for found in (own, *ridges))] for voice in own]
    body.append([f"mean of {len(own)} voices", "", *(f"{mean(found.values()):.1f}" for found in (own, *ridges))])
    head = ["`fsdd`, voice held out", "seeds", "digits right, %", "floor: ridge regression of means and spreads, %"]
    return table([*head, "floor: the same of the mean of each fifth and of spreads, %"], body)


def _front(rows: list[dict[str, Any]]) -> str:
    """Accuracy on two voices that are held out, without one of the settings of the task."""
    body = [[row["name"].removeprefix("fsdd "), f"{_test(row)['accuracy']:.1f}"] for row in rows]
    return table(["`fsdd`, lucas and nicolas held out, one seed", "digits right, %"], body) if body else ""


def _voices(rows: list[dict[str, Any]], floors: dict[str, dict[str, Any]]) -> str:
    """Accuracy among four voices, and equal error rates of pairs of recordings: of voices that are known, and of new ones."""
    body = []
    for row in rows:
        found, floor = _test(row), floors[f"floor {row['name']}"]
        scores = [f"{found[name]:.1f}" for name in ("accuracy", "eer", "eer_new")]
        body.append([" and ".join(row["name"].split()[1:]), *scores, f"{floor['accuracy']:.1f} / {floor['eer_new']:.1f}"])
    head = ["`fsdd_speaker`, voices held out", "voice right, %", "EER, known voices", "EER, new voices"]
    return table([*head, "floor: accuracy / EER of new voices"], body) if body else ""


def _named(row: dict[str, Any]) -> str:
    """Return the name of a run without its task and its seed."""
    return " ".join(word for word in row["name"].split()[1:] if not word.isdigit())


def _decoding(settings: dict[str, Any]) -> str:
    decode, beam = settings.get("decode", "ctc"), settings.get("beam", 1)
    return f"{decode}, {f'{beam} beams' if beam > 1 else 'greedy'}"


def _recognised(rows: list[dict[str, Any]], floors: dict[str, dict[str, Any]]) -> str:
    """Errors of words and characters by model and by how its answers are found: means over seeds, and their deviation."""
    if not rows:
        return ""
    by: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        for one in row["scores"]:
            by.setdefault((_named(row), _decoding(one["settings"])), []).append({**row, "test": one["scores"]})
    body = []
    for (name, how), own in by.items():
        scores = [_spread([row["test"][score] for row in own]) for score in ("wer", "cer")]
        val = _spread([row["val"]["wer"] for row in own])
        size, minutes = f"{own[0]['parameters'] / 1e6:.1f} M", f"{mean(row['seconds'] for row in own) / 60:.0f}"
        body.append([name, how, len(own), size, f"{own[0]['steps']:,}", minutes, val, *scores])
    for what in ("nearest utterance", "most frequent word"):
        if floor := floors.get(f"floor an4, {what}"):
            body.append([f"floor: {what}", "", "", "", "", "", "", f"{floor['wer']:.1f}", f"{floor['cer']:.1f}"])
    head = ["`an4`", "answers by", "seeds", "parameters", "updates", "minutes", "WER, validation, greedy", "WER", "CER"]
    return table(head, body)


def _spread(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _ahead(rows: list[dict[str, Any]]) -> str:
    """Errors by the look-ahead of CTC models, with the latency of their stream."""
    by: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["settings"]["mixer"], []).append(row)
    body = []
    for mixer, own in sorted(by.items(), key=lambda item: item[1][0]["latency_s"] or 1e9):
        scores = [f"{mean(_test(row)[score] for row in own):.1f}" for score in ("wer", "cer")]
        late = own[0]["latency_s"]
        val = f"{mean(row['val']['wer'] for row in own):.1f}"
        body.append([f"`{mixer}`", "the whole recording" if late is None else f"{late:.2f} s", len(own), val, *scores])
    head = ["`an4`, CTC alone", "latency of the stream", "seeds", "WER, validation, greedy", "WER", "CER"]
    return table(head, body) if body else ""


def synthesis(made: Made) -> str:
    """Failures by reader and guidance, over seeds."""
    if not made["rows"]:
        return not_yet("synthesis.py")
    by: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in made["rows"]:
        by.setdefault((row["reader"], row["guide"]), []).append(row)
    body = []
    for (reader, guide), own in by.items():
        scores = [row["scores"] for row in own]
        cells = [_range([x[name] for x in scores]) for name in ("failures", "skips", "repeats", "endless", "cer")]
        far = f"{mean(x['distance'] for x in scores):.2f}"
        half = _range([row["val"][0]["failures"] for row in own])
        body.append([READERS[reader], f"{guide:g}", len(own), *cells, far, half, f"{mean(row['seconds'] for row in own):.0f}"])
    first, s, w = made["rows"][0]["scores"], made["settings"], made["made_with"]
    for name, what in (("floor_nearest", "floor: the nearest text of train"), ("floor_mean", "floor: the mean frame")):
        body.append([what, "", "", "", "", "", "", "", f"{first[name]:.2f}", "", ""])
    early = made["rows"][0]["val"][0]["step"]
    head = ["reader", "guide", "seeds", "failures, %", "skips", "repeats", "no stop", "CER, %", "distance"]
    head += [f"failures after {early} updates", "seconds"]
    source = f"({w['device']}, {w['threads']} thread, shared with other work; torch {w['torch']}, commit {w['commit']}.)"
    what = f"`tones`, {s['steps']} updates of one block each way, width {s['width']}; 100 texts; mean over seeds (least to most)."
    return f"{what} {source}\n\n{table(head, body)}"


def _range(values: list[float]) -> str:
    """Mean, and between which numbers it lies."""
    return f"{mean(values):.0f}" + (f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else "")
