"""The tables of the real tasks, made of runs that say of themselves what real ones say: every setting, no training."""

import json
import re
import runpy
import sys
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from regard import tasks
from regard.arena.arena_catalogue import arena_task
from regard.arena.arena_task import ArenaBudget, ArenaModel
from regard.compare.cell_record import CellRecord
from regard.compare.cell_store import CellStore
from regard.models.translator import WIRINGS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import make_images  # noqa: E402
import make_lra  # noqa: E402
import tables_arena  # noqa: E402
import tables_bars  # noqa: E402
import tables_detection  # noqa: E402
import tables_features  # noqa: E402
import tables_hf  # noqa: E402
import tables_images  # noqa: E402
import tables_recipes  # noqa: E402
import tables_speech  # noqa: E402
import tables_speed  # noqa: E402
import tables_tasks as tables  # noqa: E402

NOT_YET = "Not measured yet"
MADE_WITH = {"torch": "2.0", "commit": "abc", "device": "a GPU"}
SPEED = {"name": "ctc", "way": "ready", "bleu": 30.0, "ms_per_sentence": 1.5, "tokens_per_second": 9000.0, "same": 0.995}
SPEED |= {"speedup_model_greedy": 5.0, "speedup_ready_greedy": None}
NO_SPEEDS = NO_FLOORS = NO_PRESETS = {"rows": []}
SPEEDS = (("eager", 1, 1, 50.0), ("captured", 1, 8, 2000.0), ("captured", 2, 4, 1500.0))
SCORES = {"ewt": ["accuracy", "words"], "imdb": ["accuracy", "texts"], "shakespeare": ["loss", "bits"]}
SCORES |= {"gum": ["f1", "sentences"], "go": ["top1", "positions"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What benchmarks/tasks.py would save of finished runs; the score of a run is its number, 30 and more."""
    work, path = tmp_path_factory.mktemp("runs"), list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        bench = runpy.run_path(str(ROOT / "benchmarks" / "tasks.py"))
    finally:
        sys.path[:] = path
    rows = []
    for number, row in enumerate(bench["rows"]()):
        before = str(work / bench["slug"](row.after)) if row.after else ""
        finished(work / bench["slug"](row.name), row, [text.replace("{after}", before) for text in row.sets], 30 + number)
        rows.append(bench["found"](work, row) | {"jobs": 4})
    return record(rows)


def record(rows):
    return {"settings": {"jobs": 4, "graphs": True}, "made_with": MADE_WITH, "rows": rows}


def finished(folder, row, sets, value):
    """A run's files, as training and `evaluate` leave them: scores of the same settings are replaced by the last."""
    folder.mkdir()
    config = tasks.config(row.task).set(sets)
    task = tasks.make_task(config)
    averaged = value + 0.5 if config.average > 1 else None
    result = {"steps": config.steps, "seconds": 60.0, "name": task.best[0], "best": float(value), "best_step": 100}
    result |= {"averaged": averaged, "chosen": "average" if averaged else "best"}
    names = SCORES.get(row.task, ["loss", "exact", "rouge_l", "oov_recall"])
    if row.task == "multi30k":
        names = ["exact", "bleu"] if config.lower else ["exact", "bleu", "bleu_cased"]
    kept = []
    for number, changes in enumerate(row.scored):
        asked = config.set(changes)
        told = {name: getattr(asked, name) for name in task.answering}
        scores = {name: 25_000.0 if name in tables.COUNTS else value + number / 10 for name in names}
        signatures = {name: f"case:lc|{name}" for name in names if name.startswith("bleu")}
        line = {"split": row.split, "settings": told, "scores": scores, "signatures": signatures}
        kept = [*(x for x in kept if x["settings"] != told), line]
    about = {"parameters": 9_000_000, **MADE_WITH}
    for name, data in {"result": result, "run": about, "config": config.to_json(), "scores": kept}.items():
        (folder / f"{name}.json").write_text(json.dumps(data))


def floor(task, value, split="test"):
    """Less than any run has, and without some of its scores."""
    names = {"multi30k": ["bleu", "exact"], "acl_titles": ["exact", "rouge_l"], "wikisql": ["exact", "rouge_l"]} | SCORES
    scores = {name: 25_000.0 if name in ("words", "texts") else value for name in names[task]}
    return {"task": task, "split": split, "floor": f"no network for {task}", "scores": scores}


FLOORS = {"rows": [floor(task, 10 + number) for number, task in enumerate(("multi30k", *tables.OTHERS))]}


def all_of(made, speeds=NO_SPEEDS, floors=FLOORS, presets=NO_PRESETS):
    parts = [tables.translation(made, floors), tables.parts(made), tables.decodings(made), tables.parallel(made, speeds)]
    text = "\n\n".join([*parts, tables.tasks(made, floors, presets), tables.boards(made)])
    for line, after in re.findall(r"^(\|.*)\n(?=(\|.*))", text, re.MULTILINE):
        cells = [x.replace(r"\|", "").count("|") for x in (line, after)]
        assert cells[0] == cells[1], "all lines of a table have as many cells"
    return text


def without(made, *names):
    return {**made, "rows": [row for row in made["rows"] if row["name"] not in names]}


def line_of(text, start):
    found = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    assert found, f"no line begins with {start}"
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_every_run_has_its_score_in_a_table_and_nothing_is_left_to_measure(made):
    text = all_of(made, record([SPEED]) | {"settings": {"sentences": 200}})
    assert NOT_YET not in text
    for row in made["rows"]:
        assert any(f"{value:.2f}" in text for value in tables.answered(row)["scores"].values()), row["name"]
    assert line_of(text, "ctc") == ["ctc", "ready", "30.00", "1.5", "9000", "99.5", "5.00 x"]
    assert "ready greedy" not in text, "nothing was compared with that"


def test_nothing_measured_is_one_sentence_for_each_table_that_says_how():
    text = all_of(NO_SPEEDS, floors=NO_FLOORS)
    assert "|" not in text
    assert text.count("python benchmarks/floors.py") == 1 + len(tables.OTHERS), "a floor for every task"
    groups = set(re.findall(r"[a-z]+", " ".join(re.findall(r"--only ([a-z ]+)`", text))))
    named = {"translate", "mixers", "parts", "tag", "sentiment", "language", "copy", "parse", "go", "boards", "parallel", "modes"}
    assert groups == named
    assert "python benchmarks/nat_speed.py" in text


def test_any_one_run_or_group_may_be_missing_and_any_one_may_be_alone(made):
    whole = all_of(made)
    for row in made["rows"]:
        assert all_of(without(made, row["name"])) != whole, f"{row['name']} stands nowhere"
        assert "|---|" in all_of({**made, "rows": [row]}, floors=NO_FLOORS), row["name"]


def test_scores_are_those_of_a_runs_own_settings_wherever_they_stand(made):
    row = next(row for row in made["rows"] if row["name"] == "multi30k softmax 1")
    assert [x["settings"]["length_penalty"] for x in row["scores"]] == [1.0, 0.0, 1.0, 2.0, 1.0], (
        "beam=5 was asked twice and kept once"
    )
    assert tables.answered(row)["settings"] == {"beam": 5, "length_penalty": 1.0, "max_new_tokens": 100}
    with pytest.raises(ValueError, match="its own settings"):
        tables.answered({**row, "scores": row["scores"][:1]})


def test_seeds_have_a_mean_and_one_seed_has_none(made):
    text = tables.translation(made, FLOORS)
    assert line_of(text, "mean of 3 ± their deviation")[1] == "31.10 ± 0.85"  # 30.3, the last one asked, 31 and 32
    assert "mean of 3" in tables.tasks(made, FLOORS, NO_PRESETS)
    alone = without(
        made,
        *(
            f"{task} {seed}"
            for task in ("multi30k softmax", "multi30k rdrop", "ewt", "imdb", "imdb softmax", "gum")
            for seed in (2, 3)
        ),
    )
    text = tables.translation(alone, FLOORS) + tables.tasks(alone, FLOORS, NO_PRESETS)
    assert "mean" not in text
    assert "±" not in text


def test_every_task_has_its_floors_under_its_runs_with_the_scores_that_they_have(made):
    text = all_of(made)
    assert line_of(text, "floor: no network for multi30k") == ["floor: no network for multi30k", "10.00", "", "10.00", "", "", ""]
    assert line_of(text, "floor: no network for ewt") == ["floor: no network for ewt", "11.00", "25,000", "test", "", "", ""]
    assert line_of(text, "floor: no network for shakespeare")[1:3] == ["13.0000", "13.0000"]
    assert line_of(text, "floor: no network for wikisql")[1:5] == ["", "15.00", "15.00", ""], "it has no loss"
    several = {"rows": [floor("ewt", 20), floor("ewt", 21) | {"floor": "another"}]}
    assert line_of(tables.tasks(made, several, NO_PRESETS), "floor: another")[1] == "21.00"


def test_the_preset_for_a_cpu_stands_beside_the_runs_of_its_task(made):
    row = {"task": "gum", "split": "test", "minutes": 31.4, "threads": 1, "updates": 4000, "parameters": 1_234_567}
    row["scores"] = {"f1": 69.18, "sentences": 1464.0, "floor": 12.7}
    cells = line_of(tables.tasks(made, FLOORS, {"rows": [row]}), "`--preset cpu`")
    assert cells == ["`--preset cpu`", "69.18", "1,464", "test", "1.23 M", "4,000", "1884 (CPU, 1 thread)"]
    untrained = tables.tasks(NO_SPEEDS, FLOORS, {"rows": [row]})
    assert line_of(untrained, "`--preset cpu`")[1] == "69.18" and "--only parse" in untrained


def test_floors_are_shown_before_anything_is_trained_and_missed_when_they_are_not_there(made):
    untrained = all_of(NO_SPEEDS)
    for row in FLOORS["rows"]:
        assert f"| floor: {row['floor']} |" in untrained
        part = {"rows": [other for other in FLOORS["rows"] if other is not row]}
        assert all_of(made, floors=part).count("Floors: Not measured yet: `python benchmarks/floors.py`") == 1
    assert "benchmarks/tasks.py" in untrained and "benchmarks/floors.py" not in untrained


def test_mixers_are_compared_with_the_softmax_that_had_as_few_updates(made):
    rows = {row["name"]: row for row in made["rows"]}
    text = tables.translation(made, FLOORS)
    assert "had the settings of `teacher_forcing` and 1,000 updates instead of the 3,000 above" in text
    cells, difference = line_of(text, "`conv`"), tables.bleu(rows["multi30k conv"]) - tables.bleu(rows["multi30k softmax"])
    assert cells == ["`conv`", f"{tables.bleu(rows['multi30k conv']):.2f}", f"{difference:+.2f}", "9.00 M", "60"]
    assert line_of(text, "`softmax`")[2] == ""
    assert line_of(tables.translation(without(made, "multi30k softmax"), FLOORS), "`conv`")[2] == "", "not with the seeds"
    assert "multi30k conv" not in tables.decodings(made), "the average over all of a short run is of no interest"


def test_parts_are_compared_with_the_model_as_it_is_after_as_many_updates(made):
    rows = {row["name"]: row for row in made["rows"] if row["group"] == "parts"}
    plain, text = rows["multi30k as it is"], tables.parts(made)
    assert text.startswith("800 updates each. (a GPU, ")
    lines = [line.split(" | ")[0][3:-1] for line in text.splitlines() if line.startswith("| `")]
    positions = [f"positions={kind}" for kind in ("learned", "rotary", "relative", "alibi", "none")]
    wirings = [f"wiring={wiring}" for wiring in WIRINGS if wiring != "last"]
    assert lines == ["positions=sinusoidal wiring=last norm=pre mixer=softmax", *positions, *wirings, "norm=post", "mixer=relu"]
    cells, bleu = line_of(text, "`wiring=both`"), tables.bleu(rows["multi30k wiring=both"])
    watched = tables.watched(rows["multi30k wiring=both"])
    assert cells == ["`wiring=both`", f"{bleu:.2f}", f"{bleu - tables.bleu(plain):+.2f}", f"{watched:.2f}", "9.00 M", "60"]
    assert line_of(text, f"`{lines[0]}`")[2] == "", "it is what the others are compared with"
    assert line_of(tables.parts(without(made, plain["name"])), "`norm=post`")[2] == "", "not with a softmax of another group"
    assert "wiring=both" not in tables.decodings(made), "the average over all of a short run is of no interest"
    assert tables.parts({"rows": []}) == f"{NOT_YET}: `python benchmarks/tasks.py --work runs/tasks --only parts`."


def test_networks_over_a_board_are_compared_with_convolutions_of_the_same_seed(made):
    rows = {row["name"]: row for row in made["rows"] if row["group"] == "boards"}
    text = tables.boards(made)
    assert text.startswith("Width 32, 6 blocks, 3,000 updates of 32 boards")
    top1 = {name: tables.answered(row)["scores"]["top1"] for name, row in rows.items()}
    away = [f"{top1[f'go small pooled {seed}'] - top1[f'go small conv {seed}']:+.2f}" for seed in (1, 2)]
    cells = line_of(text, "`net=pooled`")
    assert cells[1] == "2" and cells[-2] == ", ".join(away)
    assert line_of(text, "`net=conv`")[-2] == ""
    assert line_of(tables.boards(without(made, "go small conv 2")), "`net=pooled`")[-2] == away[0], "seed 2 has nothing beside it"


def test_seeds_of_each_settings_have_a_mean_of_their_own(made):
    text = tables.tasks(made, FLOORS, NO_PRESETS)
    for name, how in (("imdb", ""), ("imdb softmax", ", `mixer=softmax`")):
        found = [
            tables.answered(row)["scores"]["accuracy"] for row in made["rows"] if re.fullmatch(rf"{name} [123]", row["name"])
        ]
        cells = [
            line for line in text.splitlines() if line.startswith(f"| mean of 3 ± their deviation{how} | {sum(found) / 3:.2f} ±")
        ]
        assert len(found) == 3 and len(cells) == 1, name


def test_floors_that_a_run_records_are_in_their_own_lines_alone(made):
    go = next(row for row in made["rows"] if row["name"] == "go conv")
    beside = [{**x, "scores": {**x["scores"], "floor": 77.77, "floor_drawn": 0.42}} for x in go["scores"]]
    text = tables.tasks({**made, "rows": [{**go, "scores": beside}]}, FLOORS, NO_PRESETS)
    assert "77.77" not in text and text == tables.tasks({**made, "rows": [go]}, FLOORS, NO_PRESETS)


def test_rows_of_several_machines_are_each_told_where_they_were_made(made):
    first, other = made["rows"][0], made["rows"][1] | {"device": "cpu", "torch": "3.0", "jobs": 1}
    other |= {"commit": "0123456" + "f" * 33 + "+changes"}
    assert tables.made_with([other]) == "(cpu, torch 3.0, commit 0123456+changes.)"
    assert tables.made_with([first, other, first]).startswith("(a GPU, cpu, torch 2.0, 3.0, commit abc, 0123456+changes; up to 4")
    other |= {"data": {"examples": 29_000, "tokens": 400_000}}
    assert tables.learned_from([first, other]) == ", 29,000 examples an epoch"
    assert tables.learned_from([first]) == ""


def test_a_signature_is_said_once_and_shared_machines_are_told(made):
    text = tables.translation(made, FLOORS)
    assert text.count("`case:lc|bleu`") == 1
    assert "up to 4 runs at a time" in text
    alone = [row | {"jobs": 1} for row in made["rows"]]
    assert "at a time" not in tables.translation(record(alone), FLOORS)
    later = {**made, "settings": {"jobs": 1, "graphs": False}, "made_with": {**MADE_WITH, "device": "another"}}
    assert tables.translation(later, FLOORS) == text, "a later call on another machine changes nothing about earlier rows"


def test_further_training_is_compared_with_the_run_it_began_from(made):
    rows = {row["name"]: row for row in made["rows"]}
    began, then = rows["multi30k rdrop 1"], rows["multi30k then two_pass"]
    cells = line_of(tables.decodings(made), "`two_pass`")
    assert cells[1] == "multi30k rdrop 1"
    assert cells[3] == f"{tables.bleu(then) - tables.bleu(began):+.2f}"
    assert cells[5] == f"{then['val']['bleu'] - began['val']['averaged']:+.2f}", "it began from the average, which was chosen"
    cells = line_of(tables.decodings(without(made, "multi30k rdrop 1")), "`two_pass`")
    assert cells[1:6:2] == ["multi30k-rdrop-1", "", ""]


def test_answers_at_once_are_compared_with_greedy_ones(made):
    text = tables.parallel(made, NO_SPEEDS)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [line[2] for line in lines[:4]] == ["beam=1", "beam=5", "one pass", "one pass"]
    assert "iterations=4" in lines[4][2]
    assert [line[1] for line in lines[2:]] == ["distilled targets", "the data", *["distilled targets"] * 3]
    assert lines[0][4] == ""
    assert lines[2][4] == f"{float(lines[2][3]) - float(lines[0][3]):+.2f}"


def test_random_features_have_a_line_for_each_estimate_and_size():
    rows = [
        {"what": what, "by": by, "size": size, "features": f, "equal": 0.8, "error": size / f, "largest": 0.3}
        for what, by in (("softmax", "performer"), ("cosines", "rfa"))
        for size in (1.0, 2.0)
        for f in (4, 8)
    ]
    settings = {"draws": 3, "n": 512, "heads": 4, "dim": 64, "dtype": "float64", "largest_value": 4.5}
    text = tables_features.random_features(record(rows) | {"settings": settings})
    assert line_of(text, "2 | performer") == ["2", "performer", "0.50", "0.25", "0.80"]
    assert "`rfa` at any scale is 0.30, the largest value 4.50" in text
    assert tables_features.random_features({"rows": []}).startswith(NOT_YET)


def timed(by, spec="Local(8)", **more):
    found = {"by": by, "spec": spec, "causal": True, "level": "core", "pass": "forward", "n": 4096, "batch": 8, "ms": 3.0}
    return found | {"launches": 2, "peak_bytes": 3 << 20, "fraction": 0.25, "floor_of": "bytes"} | more


def both_passes(*rows):
    return [row | {"pass": name} for name in ("forward", "forward + backward") for row in rows]


def test_tables_of_speed():
    """Graph times are compared where both have one, a peer that failed is listed with its reason, a set without a file too."""
    rows = [timed("SDPA", "softmax", graph_ms=4.0), timed("regard", graph_ms=0.5), timed("local-attention", ms=6.0)]
    failed = {key: value for key, value in timed("FlexAttention", reason="out of memory").items() if key != "ms"}
    crossed = [{"spec": "Local(8)", "causal": True, "level": "core", "pass": "forward + backward", "from": 2048.0}]
    setting = {"heads": 8, "dim": 64, "dtype": "bf16", "tokens": 32768, "depth": 6, "width": 512}
    with_what = {"device": "a GPU", "torch": "2.0", "commit": "abc"}
    record = {"settings": setting, "made_with": with_what, "rates": {"bytes": 4e12, "flops": 7e14}, "crossovers": crossed}
    results = {name: {"rows": []} for name in tables_speed.NAMES}
    peers = {"linformer": "not installed: pip install linformer"}
    results["windows"] = record | {"rows": both_passes(*rows, failed), "peers": peers}
    model = {"spec": "softmax", "model": "decoder", "compiled": False, "n": 4096, "ms": 20.0}
    model |= {"tokens_per_second": 1.6e6, "peak_bytes": 1 << 30}
    slow = {key: value for key, value in model.items() if key != "ms"} | {"compiled": True, "reason": "out of memory"}
    results["models"] = record | {"rows": [model, model | {"spec": "linear", "ms": 5.0}]}
    results["lengths"] = record | {"rows": [slow | {"n": 8192, "compiled": False}]}
    compiled = model | {"spec": "linear", "ms": 2.5, "compiled": True, "dynamic": True}
    results["compiled"] = record | {"rows": [slow, compiled | {"n": 9999, "dynamic": False}, compiled]}
    text = tables_speed.speed(results)
    line = next(line for line in text.splitlines() if line.startswith("| `Local(8)` | causal, operation"))
    peers = "SDPA 4 / 4: **8.00** / **8.00** x; local-attention 6 / 6: **2.00** / **2.00** x; FlexAttention: out of memory"
    assert line.endswith(f"| {peers} |")
    assert "| 3 / 3 | 0.5 / 0.5 | 2 / 2 | 3 / 3 | 25 % bytes / 25 % bytes |" in line
    assert "faster than SDPA over all pairs: `Local(8)` from n = 2,048 (causal, operation)." in text
    assert "Not installed in this run: linformer." in text
    assert "| mechanism | n = 4,096 | n = 8,192 |" in text
    assert "| `softmax` | 1,600 / 1.0 | out of memory |" in text and "| `linear` | 1,600 (4.00 x) / 1.0 |  |" in text
    assert "| `linear` | 1,600 (2.00 x) / 1.0 | 1,600* / 1.0 |" in text
    assert "| `softmax` | out of memory |  |" in text
    assert text.count(NOT_YET) == len(tables_speed.NAMES) - 4


def test_the_error_of_advice_is_a_table():
    assert NOT_YET in tables_speed.advise_error({"rows": []})
    model = {"depth": 12, "width": 768, "heads": 12, "tokens": 1024, "dtype": "bf16"}
    row = {"spec": "Local(8) | Global(first=1)", "n": 512, "predicted_ms": 9.0, "measured_ms": 10.0, "error": -0.1}
    made = record([row, {"spec": "fnet", "n": 512, "reason": "out of memory"}])
    made["settings"] = {"model": model, "base": "softmax"}
    text = tables_speed.advise_error(made)
    assert "| `Local(8) \\| Global(first=1)` | 9 / 10 (-10.0 %) |" in text and "| `fnet` | out of memory |" in text
    assert "The largest error is 10.0 %." in text


def test_scores_of_comparisons_are_joined_into_one_file(tmp_path):
    """A cell that is in two folders counts once, as the tested one; what was stopped or refused has a place."""
    cells = [
        cell("a", "softmax", 0.01, val=0.8),
        cell("a", "softmax", 0.01, val=0.8, final=True, test=0.9, test_count=100),
        cell("b", "softmax", 0.1, val=0.7),
        cell("c", "Local(4) | Global(first=2)", 0.1, val=0.2, final=True, test=0.15, test_count=100),
        cell("d", "linear", 0.1, val=0.5),
        cell("e", "fnet", 0.1, status="refused", reason="fnet cannot do causal: it can do padding"),
    ]
    cells.append(replace(cells[-1], key="f", task="induction"))  # nothing of it was trained: it is left out
    for number, record in enumerate(cells):
        CellStore(tmp_path / str(number % 2)).save(record)
    bench = benchmark("arena_results")
    made = json.loads(json.dumps(bench["arena_record"]("x", bench["joined"]([tmp_path / "0", tmp_path / "1"]))))
    assert made["settings"]["cells"] == 5 and made["made_with"]["torch"] == "2.0"
    assert [task["task"] for task in made["settings"]["tasks"]] == ["recall(pairs=4)"]
    text = tables_arena.arena_scores(made, "x")
    assert "| best floor |  | 20.0 |" in text and "| `softmax` | softmax | **90.0 ± 6.0** |" in text
    assert "| `Local(4) \\| Global(first=2)` | softmax | (15.0 ± 7.0) |" in text
    assert "Without a score: `fnet` (cannot do causal); `linear` (not finished)." in text
    assert "2 layers of width 64, 2 heads, feed-forward layers of 128; 7 steps of 64: `recall(pairs=4)`" in text
    rates = tables_arena.arena_rates(made, "recall")
    assert "|  | 0.01 | 0.1 |" in rates and "| `softmax` | **80.0** | 70.0 |" in rates
    assert all(make({"rows": []}, "x").startswith(NOT_YET) for make in (tables_arena.arena_scores, tables_arena.arena_rates))


def cell(key, mixer, lr, **more):
    budget = {**asdict(ArenaBudget()), "steps": 7}
    settings = {"model": asdict(ArenaModel()), "budget": budget, "dtype": "fp32", "made_with": {"torch": "2.0", "commit": "abc"}}
    return CellRecord(key, "recall(pairs=4)", mixer, "softmax", lr, 0, settings=settings, floors={"chance": 0.2}, **more)


def benchmark(name):
    path = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))
    finally:
        sys.path[:] = path


def test_steps_a_second_of_a_card():
    rows = [{"mixer": "softmax", "mode": mode, "processes": p, "models": n, "steps_per_s": x} for mode, p, n, x in SPEEDS]
    made = {
        "settings": {"task": "recall", "changes": ["batch=64"]},
        "made_with": {"device": "a GPU", "torch": "2.0", "commit": "abc"},
    }
    text = tables_arena.grid_speed(made | {"rows": [*rows, {"mixer": "gla", "mode": "failed", "note": "x"}]})
    assert "|  | eager, 1 | captured, 8 | captured, 2 x 4 | best against the first |" in text
    assert "| `softmax` | 50 | 2000 | 1500 | 40.0 x |" in text and "gla" not in text
    assert tables_arena.grid_speed({"rows": []}).startswith(NOT_YET)


def test_table_of_aims():
    """The worst number of an aim comes first, and every case below it is named; without results nothing is claimed."""
    nothing = {name: {"rows": []} for name in (*tables_speed.NAMES, "decode_step")}
    assert tables_bars.bars(nothing).startswith(NOT_YET)
    rows = [
        timed(by, "Local(128)", n=n, graph_ms=ms) for n in (4096, 16384) for by, ms in (("regard", 1.0), ("FlexAttention", 2.0))
    ]
    rows[2]["graph_ms"] = 1.6
    text = tables_bars.bars(nothing | {"windows": {"rows": rows}})
    missed = "missed in 1 of 2: `Local(128)` causal, n = 16,384, forward: 1.25"
    assert f"| windows against FlexAttention, forward | at least 1.5 | 1.25 to 2 | {missed} |" in text
    assert text.count("not measured") == len(tables_bars.BARS) - 1


def test_the_aim_of_memory_has_every_linear_row():
    """Random features are linear attention too, and lie among other records."""
    spec = ("SDPA", "softmax", 2), ("regard", "performer", 5), ("regard", "efficient", 2), ("regard", "reformer", 9)
    rows = [timed(by, text, n=16384, peak_bytes=size) | {"pass": "forward + backward"} for by, text, size in spec]
    nothing = {name: {"rows": []} for name in tables_speed.NAMES}
    found = tables_bars.memory(nothing | {"others": {"rows": rows}})
    assert [(label.partition(" ")[0], value) for label, value in found] == [("`performer`", 2.5), ("`efficient`", 1.0)]


def test_the_aim_of_low_ranks_is_part_of_a_floor():
    rows = [timed("regard", text, n=4096, fraction=0.4) for text in ("nystrom(iterations=6)", "sinkhorn", "reformer")]
    nothing = {name: {"rows": []} for name in (*tables_speed.NAMES, "decode_step")}
    settings = {"tokens": 32768, "heads": 8, "dim": 64}
    text = tables_bars.bars(nothing | {"others": {"rows": rows, "settings": settings}})
    assert "| at least 0.5 | 0.4 to 0.4 | missed in 2 of 2: `nystrom(iterations=6)` causal, n = 4,096, forward: 0.4;" in text


def test_table_of_speech():
    """Digits by voice with their mean, voices with both error rates, and what was not run."""

    def ran(name, group, **scores):
        return {"name": name, "group": group, "scores": [{"scores": scores}]}

    rows = [
        ran(f"fsdd {voice} {seed}", "digits", accuracy=right) for voice, seed, right in (("theo", 1, 80.0), ("theo", 2, 90.0))
    ]
    rows += [
        ran("fsdd lucas 1", "digits", accuracy=95.0),
        ran("fsdd without trimming", "front", accuracy=70.5),
        ran("fsdd_speaker a b", "voices", accuracy=99.0, eer=1.5, eer_new=40.0),
    ]
    rows += [
        {"name": f"floor fsdd {voice}, {how}", "group": "floors", "accuracy": 60.0}
        for voice in ("theo", "lucas")
        for how in ("ridge", "ridge of fifths")
    ]
    rows.append({"name": "floor fsdd_speaker a b", "group": "floors", "accuracy": 100.0, "eer_new": 30.0})
    made_with = {"device": "a CPU", "threads": 1, "torch": "2.0"}
    text = tables_speech.speech({"made_with": made_with, "rows": rows})
    assert "| theo | 2 | 85.0 | 60.0 | 60.0 |" in text and "| mean of 2 voices |  | 90.0 | 60.0 | 60.0 |" in text
    assert "| a and b | 99.0 | 1.5 | 40.0 | 100.0 / 30.0 |" in text and "--only an4 ahead strings" in text
    assert "| without trimming | 70.5 |" in text
    assert tables_speech.speech({"rows": rows[5:]}).startswith(NOT_YET)


def test_recognisers_are_scored_by_how_they_answer_and_by_how_far_they_look_ahead():
    def ran(name, group, wer, latency=None, mixer="softmax", **settings):
        about = {"parameters": 2_000_000, "steps": 6000, "seconds": 600.0, "val": {"wer": 14.0}, "settings": {"mixer": mixer}}
        scores = [{"settings": settings, "scores": {"wer": wer, "cer": wer / 2}}]
        return {"name": f"an4 {name}", "group": group, "scores": scores, "latency_s": latency, **about}

    rows = [ran("conformer 1", "an4", 12.0, decode="ctc", beam=10), ran("conformer 2", "an4", 14.0, decode="ctc", beam=10)]
    rows += [ran("conformer 1", "an4", 20.0, decode="joint", beam=1), ran("ctc softmax 1", "ahead", 9.0, beam=10)]
    rows.append(ran("ctc Truncated(32, 8) 1", "ahead", 10.0, 1.665, "Truncated(32, 8)", beam=10))
    rows.append({"name": "floor an4, nearest utterance", "group": "floors", "wer": 90.0, "cer": 60.0})
    text = tables_speech.speech({"made_with": {"device": "a CPU", "threads": 1, "torch": "2.0"}, "rows": rows})
    assert "| conformer | ctc, 10 beams | 2 | 2.0 M | 6,000 | 10 | 14.0 ± 0.0 | 13.0 ± 1.4 | 6.5 ± 0.7 |" in text
    assert "| conformer | joint, greedy | 1 |" in text and "| floor: nearest utterance |  |  |  |  |  |  | 90.0 | 60.0 |" in text
    near, whole = "| `Truncated(32, 8)` | 1.67 s | 1 | 14.0 | 10.0 |", "| `softmax` | the whole recording | 1 | 14.0 | 9.0 |"
    assert text.index(near) < text.index(whole)


def test_table_of_training_speed():
    settings = {"precision": "bf16-mixed", "depth": 6, "width": 512, "window": 4096, "batch_tokens": 32768}
    speeds = {("softmax", "eager"): 1e6, ("linear", "eager"): 8e5, ("softmax", "graphs"): 1.5e6, ("linear", "graphs"): 3e6}
    rows = [{"mixer": mixer, "form": form, "tokens_per_second": speed} for (mixer, form), speed in speeds.items()]
    rows.append({"mixer": "rnn", "form": "graphs", "reason": "not captured"})
    made = {"settings": settings, "made_with": {"device": "a GPU", "torch": "2.0", "commit": "abc"}, "rows": rows}
    text = tables_speed.training(made)
    assert "| `linear` | 800 (0.80 x) | 3,000 (2.00 x) |" in text
    assert "| `softmax` | 1,000 | 1,500 |" in text and "| `rnn` |  | not captured |" in text
    assert tables_speed.training({"rows": []}).startswith(NOT_YET)


def test_the_table_of_recipes_names_what_was_on(tmp_path):
    """From the store of a comparison to its line: options of the task and of the model, steps, both scores, all floors."""
    bench = benchmark("recipes")
    model = {"depth": 4, "width": 128, "positions": "rotary", "conv": 0, "pooling": "mean"}
    settings = {"model": model, "budget": {"batch": 32, "buckets": 4}, "steps": 9000, "dtype": "bf16", "made_with": MADE_WITH}
    task = str(arena_task("text(length=2048, masked=0.3)"))
    tested = CellRecord("k", task, "Local(64)", "sparse", 1e-3, 0, settings=settings, final=True, parameters=600000)
    tested.val, tested.test, tested.train_seconds, tested.floors = 0.875, 0.861, 90.0, {"b": 0.81, "a": 0.5}
    (tmp_path / "text" / "cells").mkdir(parents=True)
    for record in (tested, CellRecord("j", task, "softmax", "softmax", 1e-3, 0)):
        (tmp_path / "text" / "cells" / f"{record.key}.json").write_text(json.dumps(record.to_json()))
    with tarfile.open(tmp_path / "all.tgz", "w:gz") as archive:
        archive.add(tmp_path / "text", "text")
    for source in (tmp_path, tmp_path / "all.tgz"):
        (found,) = (bench["row"](record) for record in bench["records"](source))
        assert found["techniques"] == ["masked=0.3", "positions=rotary", "buckets=4"]
        line = tables_recipes.recipes({"rows": [found]}).splitlines()[-1]
        assert line == (
            "| `text(length=2048)` | `Local(64)` | masked=0.3, positions=rotary, buckets=4 | 4 x 128, 600,000 weights "
            "| 0.001 | 9,000 of 32 | 1.5 | 87.5 | **86.1** | 50.0, 81.0 |"
        )
    assert tables_recipes.recipes({"rows": []}).startswith(NOT_YET)


def test_packages_beside_ours_on_a_cpu_are_a_table():
    assert NOT_YET in tables_speed.peers_cpu({"rows": []})
    row = {"spec": "linear", "causal": True, "peer": "package", "n": 64, "peer_ms": 20.0, "ms": 10.0, "ratio": 2.1}
    rows = [
        row | {"level": "core"},
        {"spec": "fnet", "causal": False, "peer": "other", "n": 64, "level": "layer", "reason": "not installed"},
    ]
    made = record(rows)
    made["settings"] = {"heads": 8, "dim": 64, "dtype": "float32", "threads": 1, "clock": "cpu"}
    text = tables_speed.peers_cpu(made)
    assert "| `linear`, causal | package | 20 / 10 (2.10 x) |  |" in text and "| `fnet` | other |  | not installed |" in text


def test_rankings_beside_the_lra_paper():
    scores = {"softmax": 0.4, "Local(64)": 0.2, "linformer(rank=8)": 0.3, "fnet": 0.9}
    rows = [{"task": 1, "mixer": mixer, "score": score} for mixer, score in scores.items()] + [{"task": 0, "mixer": "linear"}]
    text = tables_arena.lra_ranking({"settings": {"tasks": [{"task": "text"}, {"task": "listops(train=9)"}]}, "rows": rows})
    assert "|  | listops | text |" in text and "| `softmax` | 40.0 / 36.4 |  |" in text and "fnet" not in text
    assert "| rank correlation | 1.00 |  |" in text
    assert tables_arena.rank_correlation([(1, 3), (2, 2), (3, 1)]) == -1
    assert tables_arena.rank_correlation([(1, 1), (1, 2), (2, 3)]) == pytest.approx(0.866, abs=1e-3)
    assert tables_arena.lra_ranking({"rows": []}).startswith(NOT_YET)


def test_presets_for_a_cpu_have_minutes_a_score_and_the_best_floor():
    floors = [{"floor": name, "scores": {"loss": loss}} for name, loss in (("unigram", 3.3), ("n-grams", 1.7))]
    row = {"task": "shakespeare", "split": "val", "minutes": 17.6, "updates": 4000, "parameters": 800_000, "threads": 2}
    made = record([row | {"scores": {"loss": 1.55, "bits": 2.2}, "floors": floors}])
    line = line_of(tables.cpu_presets(made), "`shakespeare`")
    assert line == ["`shakespeare`", "0.8 M", "4,000", "18", "loss, nats on val", "1.55", "1.70: n-grams"]
    assert "cpu_presets.py" in tables.cpu_presets({"rows": []}) and "|" not in tables.cpu_presets({"rows": []})


def test_decoders_are_set_beside_softmax():
    times = {"softmax": (20.0, 60.0), "linear": (10.0, 15.0), "fnet": (5.0,)}
    rows = [
        {"spec": spec, "model": "decoder", "compiled": False, "n": n, "ms": ms}
        for spec, own in times.items()
        for n, ms in zip((1024, 4096), own, strict=False)
    ]
    rows += [{**rows[0], "compiled": True, "ms": 1.0}, {**rows[0], "model": "encoder", "ms": 1.0}]
    part = {"depth": 6, "width": 512, "dtype": "bf16", "tokens": 32768}
    made = {"settings": {"parts": [part]}, "made_with": {"device": "a GPU", "torch": "2.0", "commit": "abc"}, "rows": rows}
    text = tables_speed.decoders(made)
    assert "| `linear` | 2.00 x | 4.00 x |" in text and "fnet" not in text and "32,768 tokens" in text
    assert tables_speed.decoders({"rows": []}).startswith(NOT_YET)


def test_a_table_of_bert_has_a_row_for_each_pass_and_attention():
    rows = [
        {"mechanism": name, "pass": "forward", "seconds": s, "processor_seconds": s}
        for name, s in (("sdpa", 2.0), ("linear", 0.5))
    ]
    rows = [row | {"peak_bytes": None, "mean_distance_to_sdpa": 0.1} for row in rows]
    settings = {"device": "cpu", "batch": 1, "length": 4096, "dtype": "float32", "repeats": 1, "threads": 1}
    text = tables_hf.bert({"settings": settings, "made_with": MADE_WITH, "rows": rows}, "hf_bert.py")
    assert "| forward | `linear` | 500 | 4.00 x |" in text
    assert NOT_YET in tables_hf.bert({"rows": []}, "hf_bert.py")


def test_images_are_a_curve_by_number_of_images_and_mechanisms_best_first():
    def cell(part, model, share, test, mixer="softmax"):
        kept = {"part": part, "model": model, "share": share, "mixer": mixer, "test": test, "val": 50.0, "seconds": 9.0}
        return kept | {"train_images": round(45_000 * share), "parameters": 2_000_000, "steps": 6000, "config": {"decay": 0.3}}

    rows = [cell("curve", "cnn", 1.0, 90.0), cell("curve", "cnn", 0.01, 40.0), cell("curve", "cnn", 0.01, 42.0)]
    rows += [cell("curve", "vit", 1.0, 80.0), cell("best", "cnn", 1.0, 93.0)]
    rows += [cell("mechanisms", "vit", 1.0, 70.0), cell("mechanisms", "vit", 1.0, 75.0, "linear")]
    made = {"rows": rows, "floors": {"one label": 10.0}, "settings": {"data": "CIFAR-10, JPEG copy"}}
    made["made_with"] = {"device": "a GPU", "torch": "2.0", "commit": "abc"}
    text = tables_images.image_scores(made)
    assert (
        "JPEG copy" in text
        and "one label 10.0 %" in text
        and "| 450 | 41.00 |  |" in text
        and "| 45,000 | 90.00 | 80.00 |" in text
    )
    assert text.index("`linear`") < text.index("`softmax`")
    assert "| cnn | crop, flip | 0.3 | 1 | 2.0 M | 6,000 | 50.00 | 93.00 | 9 |" in text
    assert "python benchmarks/images.py" in tables_images.image_scores({"rows": []})
    assert make_images.curves(rows) == {"cnn": [(450, 41.0), (45_000, 90.0)], "vit": [(45_000, 80.0)]}
    other = cell("curve", "vit", 1.0, 85.0) | {"steps": 9000, "config": {"decay": 0.3, "trivial": True}}
    text = tables_images.image_scores(made | {"rows": [*rows, other]})  # another way of training is another table
    assert "| 45,000 | 90.00 | 80.00 |" in text and "| 45,000 | 85.00 |" in text and "TrivialAugment" in text
    assert make_images.curves([*rows, other]) == make_images.curves(rows)


def test_a_difference_by_attention_has_an_interval_over_seeds():
    def cell(head, seed, lr, map50):
        scores = {"map50": map50, "map": map50 / 2, "count": 50.0}
        kept = {"head": head, "seed": seed, "lr": lr, "val": scores, "test": scores}
        return kept | {"steps": 4000, "parameters": 200_000, "seconds": 60.0, "sure": 0.7}

    made_with = {"device": "a GPU", "torch": "2.0", "commit": "abc"}
    about = {"floors": {"the most frequent boxes": 0.3}, "settings": {"preset": "cpu"}, "made_with": made_with}
    rows = [cell("queries", 1, 1e-3, 70.0), cell("queries", 1, 3e-4, 60.0), cell("queries", 2, 1e-3, 74.0)]
    rows += [cell("dense", 1, 1e-3, 80.0), cell("dense", 2, 1e-3, 82.0)]
    text = tables_detection.detection({"rows": rows, **about})
    assert text.startswith("`--preset cpu`. Floors on test") and "| 0.7, 0.7 | 60 |" in text
    assert "| object queries (attention) | 2 | 0.20 M | 4,000 | 0.001 | 72.0 ± 2.8 |" in text and "boxes 0.3" in text
    assert "| -9.0 (-21.7 to +3.7) |" in text  # 12.706 * sqrt(2) / sqrt(2)
    assert NOT_YET in tables_detection.detection({"rows": []}) and NOT_YET in tables_detection.gan({"rows": []})

    sizes = {"generator": 1_000_000, "critic": 500_000}
    rows = [{"layer": "attention", "seed": 1, "distance": 2.0}, {"layer": "none", "seed": 1, "distance": 2.5}]
    rows = [row | {"steps": 100, "parameters": sizes, "seconds": 9.0} for row in rows]
    settings = {"data_set": "digits", "at": 16, "samples": 1000}
    floors = {"accuracy of the classifier": 97.0, "noise": 40.0}
    text = tables_detection.gan({"rows": rows, "floors": floors, "settings": settings, "made_with": made_with})
    assert "| attention | 1 | 1.00 + 0.50 M | 100 | 2.00 | -0.50 (one seed: no interval) | 9 |" in text and "noise 40.00" in text


def test_the_picture_of_long_texts_has_scores_and_speeds_of_the_same_mechanism():
    scores = {
        "settings": {"tasks": [{"task": "listops(length=2000)"}, {"task": "text(length=4096)"}]},
        "rows": [
            {"task": 0, "mixer": "softmax", "family": "softmax", "score": 0.3, "low": 0.2, "high": 0.4},
            {"task": 1, "mixer": "Local(64)", "family": "sparse", "score": 0.6, "low": 0.5, "high": 0.7},
            {"task": 1, "mixer": "linear", "family": "kernel", "reason": "diverged"},
            {"task": 1, "mixer": "fnet", "family": "free", "score": 0.6, "low": 0.5, "high": 0.7},
        ],
    }
    speeds = {"Local(256)": 2e6, "Local(128) | Global(first=2)": 1e6, "softmax": 3e6}
    rows = [{"spec": s, "model": "encoder", "n": 4096, "tokens_per_second": x, "peak_bytes": 5} for s, x in speeds.items()]
    (found,) = make_lra.bubbles(scores, {"rows": [*rows, rows[0] | {"n": 1024, "tokens_per_second": 9.0}]})
    assert found == ("Local", "sparse", 2.0, 60.0, 50.0, 70.0, 5)
