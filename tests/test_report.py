"""The report of a comparison without a browser: intervals, lengths, words, numbers, names, pictures of matrices, files."""

import json
import math
import re
import struct
import zlib
from dataclasses import fields
from html.parser import HTMLParser

import pytest
import torch

from regard.compare import report
from regard.compare.cell_record import CellRecord
from regard.compare.comparison import alike_best, compare_records, score_interval, wilson
from regard.compare.recommendation import recommendations
from regard.compare.report import write_report
from regard.compare.report_data import plain, script_json
from regard.compare.report_figures import slice_values
from regard.compare.report_page import report_html
from regard.compare.small_png import SHADE_LEVELS, matrix_png
from regard.compare.trained_layers import (
    TrainedLayer,
    TrainedLayers,
    cumulated_spectrum,
    pooled_matrix,
    spectrum_rank,
    trained_layers,
)
from regard.plots.colours import FAMILY_ORDER, FAMILY_SHADES, family_shades
from report_records import HOSTILE, finished, record, some_records, write_records
from small_arena import run_grid, settings

VOID = {"meta", "link", "br", "img", "input", "hr"}


def page(records, trained=None):
    return report_html(compare_records(records), trained or TrainedLayers())


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


class Reader(HTMLParser):
    """Checks that elements nest, and collects addresses, identifiers and text."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.ids, self.tags, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "srcset"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [] and len(set(reader.ids)) == len(reader.ids)
    return reader


# Summary


def test_intervals_are_those_of_the_seeds_or_of_the_test_set():
    low, high, how = score_interval([0.5, 0.6, 0.7], 10**6, "accuracy")
    half = 4.303 * 0.1 / math.sqrt(3)
    assert (low, high) == pytest.approx((0.6 - half, 0.6 + half)) and how == "3 seeds, Student's t"
    low, high, how = score_interval([0.8], 100, "accuracy")
    assert (low, high) == pytest.approx((0.7112, 0.8666), abs=1e-4) and "Wilson" in how  # a published example
    assert score_interval([0.9, 0.9], 50, "accuracy")[2] == "50 targets, Wilson"  # seeds that agree prove little
    assert score_interval([1.5], 100, "bits per token") == (None, None, "one seed: no interval")
    assert score_interval([0.9, 0.2], None, "accuracy")[:2] == (0.0, 1.0)
    assert wilson(1.0, 10)[1] == pytest.approx(1.0) and wilson(1.0, 10)[0] < 0.8


def test_rows_have_the_chosen_cells_and_the_lengths_from_which_they_win():
    found = compare_records(some_records(3))
    assert [row.mixer for row in found.rows] == ["softmax", "Local(16)", "linear", "sinkhorn"]
    first, second = found.rows[:2]
    assert len(first.scores) == 2 and first.score == pytest.approx(0.95 - 0.01 - 0.0015) and first.lr == 1e-3
    assert first.wins_from is None and second.wins_from == pytest.approx(600, rel=1e-3)  # n^2 / 1e4 = 6 n / 100
    assert [lr for lr, _, _ in second.rates] == sorted(lr for lr, _, _ in second.rates) and len(second.rates) == 5
    assert second.rates[-1][1:] == (None, "diverged")
    assert found.rows[-1].reason == "refused: it is not causal"
    assert second.slices["distance"]["8-15"][0] == pytest.approx(second.score - 0.008)
    assert found.tasks[0].best_floor == 0.25 and found.families == ["softmax", "sparse", "kernel", "sinkhorn"]


def test_an_earlier_choice_of_the_learning_rate_does_not_count():
    old = finished(record("task", "softmax", "softmax", 1e-2, 0, 0.5), 0)
    row = compare_records([old, *some_records(1, ("task",))]).rows[0]
    assert len(row.scores) == 2 and row.lr == 1e-3


def scored(mixer, score, speed, metric="accuracy", **more):
    made = finished(record("task", mixer, "kernel", 1e-3, 0, 1.0), 0)
    made.test, made.test_count, made.metric = score, 10**5, metric
    made.costs |= {"train_tokens_per_s": speed}
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_mechanisms_that_cannot_be_told_apart_are_found_in_both_directions():
    more = compare_records([scored("a", 0.900, 1), scored("b", 0.899, 1), scored("c", 0.8, 1)])
    assert [row.mixer for row in alike_best(more.rows)] == ["a", "b"]
    bits = compare_records([scored("a", 1.5, 1, "bits per token"), scored("b", 1.2, 1, "bits per token")])
    assert [row.mixer for row in bits.rows] == ["b", "a"] and [row.mixer for row in alike_best(bits.rows)] == ["b"]


def test_the_recommendation_follows_from_the_numbers():
    cells = [
        scored("softmax", 0.900, 100.0),
        scored("quick", 0.8995, 250.0),
        scored("rough", 0.7, 900.0),
        scored("slow", 0.5, 10.0),
    ]
    line = recommendations(compare_records(cells))[0]
    assert "take quick, 90.0 %; the fastest of 2 mixers that cannot be told apart from the best (softmax, 90.0 %)" in line
    assert "trains 2.50 times as fast as softmax" in line and "Faster, with worse scores: rough (3.60 x, 70.0 %)." in line
    assert "slow" not in line
    low = recommendations(compare_records([scored("softmax", 0.2, 1.0)]))[0]
    assert "nothing was learned: the best score, 20.0 % of softmax, does not reach the floor of 25.0 %" in low
    short = some_records(1)
    for one in short:
        one.floors = {"chance": 0.99}
    assert "but nothing was learned on any task." in recommendations(compare_records(short))[-1]
    unsure = recommendations(compare_records([scored("softmax", 0.26, 1.0, test_count=100)]))[0]
    assert "cannot be told apart from the floor of 25.0 %" in unsure
    lengths = [
        line for line in recommendations(compare_records(some_records(3))) if line.startswith("For n = 4,096 on a small machine")
    ]
    words = "by time of a training step, among the best mixers of all tasks that were learned: softmax (1,678 ms)."
    assert lengths == [f"For n = 4,096 on a small machine: {words}"]
    assert recommendations(compare_records([scored("x", None, 1.0, final=False)])) == ["task (n = 128): no mixer has a score."]


def test_seeds_without_a_score_are_told():
    """Two of three seeds have a score: wherever the row is named as the best, it says so."""
    cells = [
        record("task", mixer, "kernel", 1e-3, seed, quality)
        for mixer, quality in (("gla", 0.95), ("softmax", 0.5))
        for seed in range(3)
    ]
    for place, one in enumerate(cells):
        finished(one, place)
    cells[1] = record("task", "gla", "kernel", 1e-3, 1, 0.0, status="diverged", reason="not finite", val=None, curve=[])
    cells.append(record("task", "gla", "kernel", 1e-2, 2, 0.0, status="crashed", val=None))  # of another learning rate
    found = compare_records(cells)
    row = found.rows[0]
    assert (row.mixer, len(row.scores), row.lost) == ("gla", 2, "1 of 3 seeds diverged") and row.lost in row.note
    lines = recommendations(found)
    assert "take gla (1 of 3 seeds diverged), " in lines[0]
    assert all("1 of 3 seeds diverged" in line for line in lines if "gla" in line)
    assert "2 (1 of 3 seeds diverged)" in "".join(read(page(cells)).text)
    assert found.rows[1].lost == ""


def test_readers_of_a_part_of_the_answer_are_no_floor():
    cells = [scored("softmax", 0.4, 1.0)]
    cells[0].floors = {"most frequent": 0.2, "levels of operators evaluated: 3": 0.8}
    found = compare_records(cells)
    assert found.tasks[0].best_floor == 0.2 and "take softmax, 40.0 %" in recommendations(found)[0]
    words = "Floors that need no attention: most frequent (20.0 %). Readers of a part: levels of operators evaluated: 3 (80.0 %)."
    assert words in page(cells)


# The page


def test_the_page_is_valid_and_loads_nothing():
    text = page(some_records(7, ("recall(length=128)", "copying")))
    reader = read(text)
    assert all(address.startswith("data:") for address in reader.addresses)
    assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z]", text) and "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text and {"bubble", "cost", "rates", "training", "slices", "spectrum", "advice"} <= set(
        reader.ids
    )


def test_all_numbers_of_the_records_are_on_the_page():
    records = some_records(4)
    rows = {row["mixer"]: row for row in data_of(page(records))["rows"]}
    for one in records:
        row = rows[one.mixer]
        expected = plain(one.to_json())
        if one.seed == 0:
            assert [expected["lr"], expected["val"], expected["status"]] in row["rates"]
        if not one.final:
            continue
        assert expected["test"] in row["scores"]
        if one.seed == 0:
            assert row["curve"] == expected["curve"] and row["by_length"] == expected["cost_by_length"]
            assert expected["costs"].items() <= row["costs"].items()
            assert row["parameters"] == expected["parameters"]
    shown = "".join(read(page(records)).text)
    assert "93.8 %" in shown and "25.0 %" in shown and "not up to" not in shown and "about 600" in shown


def test_lengths_from_which_a_mechanism_wins_are_those_that_were_compared():
    def row(mixer, times):
        lengths = [
            {"n": n, "batch": 1, "step_ms": ms, "forward_ms": ms, "peak_bytes": None, "reason": ""} for n, ms in times.items()
        ]
        return scored(mixer, 0.9, 1.0, cost_by_length=lengths)

    linear = row("linear", {1024: 6.0, 65536: 60.0})
    assert not re.search("not up to|or less|about [0-9]", page([linear, row("Local(8)", {1024: 5.0})]))
    assert "not up to" not in page([linear, row("softmax", {256: 5.0})])
    assert "not up to 1,024" in page([linear, row("softmax", {1024: 5.0, 65536: None})])
    assert "1,024 or less" in page([row("linear", {256: 1.0, 1024: 1.0}), row("softmax", {1024: 5.0})])


def test_tasks_on_which_nothing_was_learned_have_no_scale():
    """Between a floor and a best score below it the order is the other way round."""
    for metric, score, floors, learned in (
        ("accuracy", 0.48, {"chance": 0.5}, False),
        ("accuracy", 0.5, {"chance": 0.5}, False),
        ("accuracy", 0.6, {"chance": 0.5}, True),
        ("accuracy", 0.6, {}, True),
        ("bits per token", 2.1, {"unigrams": 2.0}, False),
        ("bits per token", 1.9, {"unigrams": 2.0}, True),
        ("bits per token", 1.9, {}, False),
    ):
        worse = score + 0.1 if metric == "bits per token" else score - 0.1
        text = page([scored(mixer, x, 1.0, metric, floors=floors) for mixer, x in (("softmax", score), ("linear", worse))])
        assert data_of(text)["tasks"][0]["learned"] is learned
    assert "if (!task.learned) continue;" in text


def test_hostile_names_stay_text():
    records = some_records(2, (HOSTILE,))
    records[0].mixer = records[0].family = HOSTILE
    records.append(record(HOSTILE, HOSTILE, HOSTILE, 1e-3, 0, 1.0, status="crashed", reason=HOSTILE, val=None))
    layers = TrainedLayers([TrainedLayer(HOSTILE, HOSTILE, HOSTILE, 1, 8, [torch.eye(8)], [0.5, 1.0])], [HOSTILE])
    text = page(records, layers)
    reader = read(text)
    assert reader.tags.count("script") == 2 and "b" not in reader.tags and "alert" not in "".join(reader.tags)
    assert data_of(text)["tasks"][0]["name"] == HOSTILE
    assert "<" not in script_json({"a": "<&>"}) and json.loads(script_json({"a": "<&>"})) == {"a": "<&>"}


def test_numbers_that_json_does_not_have_become_null():
    assert plain({"a": [math.nan, math.inf, 1 / 3]}) == {"a": [None, None, 0.333333]}
    records = some_records(2)
    records[0].curve = [(1, math.nan, math.inf, 1.0)]
    assert "NaN" not in page(records).split('id="data">')[1].split("</script>")[0]


@pytest.mark.parametrize(("layers", "heads"), [(2, 2), (2, 4), (6, 4)])
def test_forty_mechanisms_fit_one_megabyte(layers, heads):
    records = some_records(40)
    matrices = list(torch.rand(heads, 64, 64))  # random: nothing compresses worse
    found = [
        TrainedLayer(records[0].task, f"mixer_{i}", "kernel", layer + 1, 256, matrices, [0.1] * 32)
        for i in range(40)
        for layer in range(layers)
    ]
    text = page(records, TrainedLayers(found))
    assert len(text) < 1 << 20 and text.count("<img") in (40 * layers, 40 * layers * heads)


# Trained models


def test_pictures_of_matrices_are_whole_png_files():
    matrix = torch.tensor([[0.0, 0.25], [1.0, 0.0], [0.5, 0.5]])
    data = matrix_png(matrix)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + content)
        chunks[name] = content
        at += 12 + size
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (2, 3) and len(chunks[b"PLTE"]) == 3 * SHADE_LEVELS
    rows = zlib.decompress(chunks[b"IDAT"])
    assert list(rows) == [0, 0, round((SHADE_LEVELS - 1) / 2), 0, SHADE_LEVELS - 1, 0, 0, 22, 22]


def test_pooled_cells_show_their_largest_weight_and_spectra_their_rank():
    matrix = torch.zeros(128, 128)
    matrix[100, 3] = -0.7
    pooled = pooled_matrix(matrix)
    assert pooled.shape == (64, 64) and pooled[50, 1] == pytest.approx(0.7) and pooled.sum() == pytest.approx(0.7)
    one = torch.ones(2, 32, 32)
    assert cumulated_spectrum(one)[0] == pytest.approx(1.0) and spectrum_rank(cumulated_spectrum(one), 32) == 1
    whole = cumulated_spectrum(torch.eye(32)[None])
    assert whole == pytest.approx([(i + 1) / 32 for i in range(32)], abs=1e-5) and spectrum_rank(whole, 32) == 29


def test_a_real_comparison_shows_the_attention_of_its_models(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.compare.cell_costs.TIMED", 0.002)
    monkeypatch.setattr(report, "FIGURE_FORMATS", ("svg",))
    records = run_grid(tmp_path, settings("echo", mixers=["softmax", "Local(2)", "conv(kernel=3)"]))
    found = trained_layers(tmp_path, records)
    assert {(layer.mixer, layer.layer, len(layer.matrices), layer.tokens) for layer in found.layers} == {
        ("softmax", 1, 2, 8),
        ("Local(2)", 1, 2, 8),
    }
    assert found.notes == ["conv(kernel=3) on echo(tokens=8, steps=6, every=4): it has no attention weights"]
    for layer in found.layers:
        assert torch.allclose(layer.matrices[0].sum(-1), torch.ones(8), atol=1e-5) and not layer.matrices[0].triu(1).any()
    weights = tmp_path / next(one.weights for one in records if one.mixer == "softmax" and one.final)
    weights.write_bytes(weights.read_bytes()[:50])
    (tmp_path / "figures").mkdir()
    for name in ("cost_1_old.svg", "cost_1_old.txt", "mine.svg"):
        (tmp_path / "figures" / name).write_text("")
    text = write_report(tmp_path).read_text()
    assert "not a whole safetensors file" in text and text.count("<img") == 2
    files = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"cost_1_old.txt", "mine.svg"} <= files and "cost_1_old.svg" not in files
    assert {name.split("_")[0] for name in files - {"mine.svg", "cost_1_old.txt"}} == set(report.FIGURE_KINDS) - {"cost"}


# Files


def test_files_are_written_and_what_is_damaged_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FIGURE_FORMATS", ("png",))
    monkeypatch.setattr("regard.compare.report_figures.report_figures", lambda *_: [])
    folder = write_records(tmp_path / "run", some_records(2))
    (folder / "cells" / "torn.json").write_text("{")
    assert write_report(folder) == folder / "report.html"
    text = (folder / "report.html").read_text()
    assert "A record cannot be read" in text and "torn.json" in text
    with pytest.raises(ValueError, match="has no records of a comparison"):
        write_report(tmp_path / "nothing")


WRONG = (None, 5, -1.5, "x", [], {}, [5], {"a": 5}, {"a": {"b": 5}}, [[1]], [{"n": "x"}])


@pytest.mark.parametrize("name", [field.name for field in fields(CellRecord)])
def test_a_field_of_a_wrong_kind_damages_its_own_record_alone(name):
    good = [one.to_json() for one in some_records(2)]
    assert [CellRecord.from_json(one).to_json() for one in good] == good
    place = next(place for place, one in enumerate(good) if one["costs"])
    for wrong in WRONG:
        try:
            read = CellRecord.from_json(good[place] | {name: wrong})
        except ValueError:
            continue
        others = [CellRecord.from_json(one) for at, one in enumerate(good) if at != place]
        assert page([read, *others])


def test_the_page_is_written_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    for name in ("regard.compare.report_figures", "regard.plots.comparison_plot", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(__import__("sys").modules, name, None) if name.startswith("matplotlib") else monkeypatch.delitem(
            __import__("sys").modules, name, raising=False
        )
    text = write_report(write_records(tmp_path / "run", some_records(2))).read_text()
    assert "pip install &#x27;regard[draw]&#x27;" in text and not (tmp_path / "run" / "figures").exists()


def test_values_of_slices_are_in_the_order_of_their_numbers():
    row = compare_records(some_records(1)).rows[0]
    row.slices = {"at": {"64-127": (1, 1), "8-15": (1, 1), "16": (1, 1)}, "kind": {"b": (1, 1), "a": (1, 1)}}
    assert slice_values([row], "at") == ["8-15", "16", "64-127"] and slice_values([row], "kind") == ["b", "a"]


def test_families_of_the_catalogue_have_colours_of_their_own():
    shades = family_shades(FAMILY_ORDER)
    assert len(set(shades.values())) == len(FAMILY_ORDER) <= len(FAMILY_SHADES)
    assert family_shades(["kernel"])["kernel"] == shades["kernel"]


def test_names_in_a_bubble_plot_do_not_lie_over_each_other():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from regard.plots.comparison_plot import AxesWords, Bubble, bubble_plot

    bubbles = [Bubble(f"conv(kernel={n})", "conv", 1000 + n, 0.01, None, None, None) for n in range(6)]
    figure = bubble_plot(bubbles, AxesWords("", "speed", "score", log_x=True))
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert len(boxes) == 6 and not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])


@pytest.mark.parametrize("most", [90.0, 0.9])
def test_a_logarithmic_axis_within_a_decade_has_numbers(most):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from regard.plots.comparison_plot import AxesWords, Curve, curve_plot

    curve = Curve("softmax", "softmax", [64, 256], [most / 5, most])
    figure = curve_plot([curve], AxesWords("", "n", "ms", log_x=True, log_y=True, ticks=[(64, "64"), (256, "256")]))
    FigureCanvasAgg(figure).draw()
    axis = figure.axes[0].yaxis
    assert [text for text in (label.get_text() for label in axis.get_ticklabels(which="both")) if text]
    assert len(figure.axes[0].xaxis.get_ticklabels(which="both")) == 2


def test_dollars_in_names_are_no_mathematics():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from regard.plots.comparison_plot import AxesWords, Bubble, Curve, bubble_plot, curve_plot, layers_plot

    name = "own(text='$x_$')"
    words = AxesWords(name, name, name, ticks=[(1.0, name)])
    for figure in (
        curve_plot([Curve(name, name, [1.0], [1.0])], words),
        bubble_plot([Bubble(name, name, 1.0, 0.5, None, None, None)], words),
        layers_plot([(name, torch.eye(4))], name),
    ):
        FigureCanvasAgg(figure).draw()  # would not be able to read it


@pytest.mark.parametrize("kind", ["lines", "one matrix"])
def test_long_titles_stay_inside_of_their_figure(kind):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from regard.plots.comparison_plot import AxesWords, Curve, curve_plot, layers_plot

    title = "listops(train=96000, val=2000, test=2000, seed=1, length=2000, shortest=500, depth=10, arguments=10, shuffled=False)"
    curve = Curve("softmax", "softmax", [64, 256], [1.0, 2.0])
    figure = curve_plot([curve], AxesWords(title, "n", "ms")) if kind == "lines" else layers_plot([("a", torch.eye(4))], title)
    renderer = FigureCanvasAgg(figure).get_renderer()
    text = figure.axes[0]._left_title if kind == "lines" else figure.texts[0]
    box = text.get_window_extent(renderer)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1
