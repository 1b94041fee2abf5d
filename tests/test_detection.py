"""Detection: digits and their splits, scenes, boxes, matching, average precision, the task, and its benchmark."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from regard import load
from regard.data import digit_scenes
from regard.data.colour_images import pillow_image, read_image
from regard.data.detection_score import Objects, average_precision, detection_floors, detection_scores
from regard.data.digit_scenes import NO_DIGIT, Digits, SceneMaker, read_digits, split_digits
from regard.data.text_files import DataError
from regard.data.upright_image import read_upright
from regard.models.boxes import box_corners, box_iou, box_middles, generalised_iou, suppressed
from regard.models.detector import Detected, equal_convolutions
from regard.tasks import config, make_task
from regard.tasks.detection import nearest_cells
from regard.training.checkpoints import load_run
from regard.training.fit import fit
from regard.training.set_loss import SetWeights, match, match_cost, set_loss

pytest.importorskip("scipy", reason="sets are matched by SciPy: pip install 'regard[detection]'")

TINY = {
    "width": 16, "heads": 2, "depth": 2, "ffn": 16, "steps": 4, "batch_tokens": 4, "warmup": 1, "validate_every": 2,
    "save_every": 2, "scenes": 24, "held_out": 6, "canvas": 32, "objects": 3, "queries": 6, "dropout": 0.1,
    "stem": "conv(layers=3, stride=2, pool='none', norm='group')",
}  # fmt: skip


def drawn_digits(each=12):
    """Pictures that are no digits, each with ink of its own."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 17, (10 * each, 8, 8)).astype(np.uint8)
    pictures[:, 2:6, 3:5] = 16
    return Digits(pictures, np.arange(10 * each) % 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("data") / "digits"
    where.mkdir()
    digits = drawn_digits()
    rows = [",".join(map(str, [*picture.ravel().tolist(), label])) for picture, label in zip(*digits, strict=True)]
    (where / "digits.csv").write_text("\n".join(rows) + "\n")
    return where.parent


def tiny(folder, **changes):
    made = make_task(config("detect").replace({**TINY, **changes}))
    made.read(folder)
    return made


# data


def test_no_picture_is_in_two_splits_and_copies_stay_together():
    digits = drawn_digits()
    twice = Digits(np.concatenate([digits.pictures, digits.pictures[::-1]]), np.concatenate([digits.labels, digits.labels[::-1]]))
    parts = split_digits(twice)
    keys = {name: {picture.tobytes() for picture in part.pictures} for name, part in parts.items()}
    assert all(not keys[a] & keys[b] for a, b in itertools.combinations(keys, 2))
    assert [len(part.labels) for part in parts.values()] == [140, 60, 40] and all(
        set(p.labels) == set(range(10)) for p in parts.values()
    )
    once = split_digits(digits)
    assert all({p.tobytes() for p in once[name].pictures} == keys[name] for name in keys)


def test_digits_come_from_a_file_or_from_scikit_learn_or_there_is_a_sentence(folder, tmp_path, monkeypatch):
    assert len(read_digits(folder).labels) == len(read_digits(folder / "digits").labels) == 120
    (tmp_path / "digits.csv").write_text("1,2,3\n")
    with pytest.raises(DataError, match=r"digits.csv, line 1: not 64 pixels"):
        read_digits(tmp_path)
    monkeypatch.delenv("REGARD_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"regard\[detection\]"):
        read_digits()


def test_scikit_learn_has_1797_digits(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.delenv("REGARD_DATA", raising=False)
    parts = split_digits(read_digits())
    assert sum(len(part.labels) for part in parts.values()) == 1797
    assert abs(len(parts["train"].labels) / 1797 - 0.6) < 0.02


def test_a_scene_is_a_function_of_its_split_and_number():
    digits = drawn_digits()
    make = SceneMaker(digits, "train", side=32, most=3)
    many = make([3, 4, 5])
    again = make([4])
    assert all(np.array_equal(x[1:2], y) for x, y in zip(many, again, strict=True))
    other = SceneMaker(digits, "val", side=32, most=3)([4])
    assert not np.array_equal(other.images, again.images)


def test_boxes_are_around_the_ink_and_cover_little_of_each_other():
    make = SceneMaker(drawn_digits(), "train", side=64, most=4, clutter=False)
    scenes = make(range(60))
    counts = (scenes.labels != NO_DIGIT).sum(1)
    assert set(counts.tolist()) == {1, 2, 3, 4}
    for image, labels, boxes in zip(*scenes, strict=True):
        real = boxes[labels != NO_DIGIT]
        inside = np.zeros((64, 64), bool)
        for left, top, right, bottom in np.rint(64 * real).astype(int):
            inside[max(0, top - 3) : bottom + 3, max(0, left - 3) : right + 3] = True
            assert image[0, top:bottom, left:right].mean() > 40
        assert not image[0][~inside].any()
        for one, other in itertools.combinations(real, 2):
            assert digit_scenes._covered(one, other[None]) <= digit_scenes.COVERED


def test_clutter_has_no_label_and_covers_no_digit():
    plain, full = (SceneMaker(drawn_digits(), "train", side=64, most=2, clutter=clutter)(range(20)) for clutter in (False, True))
    assert np.array_equal(plain.labels, full.labels) and np.array_equal(plain.boxes, full.boxes)
    assert (full.images.astype(int) - plain.images > 60).any((1, 2, 3)).sum() > 10


# boxes


def test_overlaps_of_boxes_by_hand():
    one, half, far = (torch.tensor(x, dtype=torch.double) for x in ([0, 0, 2, 2], [1, 0, 3, 2], [4, 0, 6, 2]))
    assert box_iou(one, half).item() == pytest.approx(1 / 3) and box_iou(one, far).item() == 0
    assert generalised_iou(one, half).item() == pytest.approx(1 / 3) and generalised_iou(one, one).item() == pytest.approx(1)
    assert generalised_iou(one, far).item() == pytest.approx(-4 / 12)
    moved = far.clone().requires_grad_()
    generalised_iou(one, moved).backward()
    assert moved.grad[0] < 0  # nearer is better, though they do not meet
    boxes = torch.rand(5, 4)
    torch.testing.assert_close(box_middles(box_corners(boxes)), boxes)


def test_a_better_box_suppresses_those_that_it_covers_but_not_through_one_that_is_gone():
    boxes = torch.tensor([[[0, 0, 10, 10], [3, 0, 13, 10], [6, 0, 16, 10], [20, 0, 30, 10.0]]])
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1]])
    assert suppressed(boxes, scores, 0.5).tolist() == [[True, False, True, True]]
    order = torch.tensor([2, 0, 3, 1])
    assert suppressed(boxes[:, order], scores[:, order], 0.5)[0].tolist() == [True, True, True, False]


# matching and the loss


def answers(b=2, n=5, classes=3, layers=1, dtype=torch.double):
    torch.manual_seed(0)
    made = [Detected(torch.randn(b, n, classes + 1, dtype=dtype), torch.rand(b, n, 4, dtype=dtype)) for _ in range(layers)]
    labels = torch.tensor([[0, 2, 1], [1, NO_DIGIT, NO_DIGIT]])
    return made, labels, torch.rand(b, 3, 4, dtype=dtype)


def test_slots_are_matched_at_the_least_cost_of_all_ways():
    layers, labels, boxes = answers(layers=2)
    found = match(layers, labels, boxes, SetWeights())
    for layer, slots in zip(layers, found, strict=True):
        cost = match_cost(layer, labels, boxes, SetWeights())
        for row, count in enumerate((3, 1)):
            best = min(sum(cost[row, s, k] for k, s in enumerate(way)) for way in itertools.permutations(range(5), count))
            own = sum(cost[row, slots[row, k], k] for k in range(count))
            assert own.item() == pytest.approx(best.item()) and len(set(slots[row, :count].tolist())) == count


def test_the_loss_of_a_set_ignores_the_order_of_slots_and_padding():
    layers, labels, boxes = answers()
    weights = SetWeights()

    def loss(found, labels, boxes):
        return set_loss([found], match([found], labels, boxes, weights), labels, boxes, weights)

    whole, order = loss(layers[0], labels, boxes), torch.tensor([4, 2, 0, 1, 3])
    turned = Detected(*(x[:, order] for x in layers[0]))
    torch.testing.assert_close(loss(turned, labels, boxes).total, whole.total)
    swapped = torch.tensor([1, 0, 2])
    mixed = labels.clone()
    mixed[0], other = labels[0, swapped], boxes.clone()
    other[0] = boxes[0, swapped]
    torch.testing.assert_close(loss(layers[0], mixed, other).total, whole.total)
    alone = loss(Detected(*(x[1:] for x in layers[0])), labels[1:, :1], boxes[1:, :1])
    first = loss(Detected(*(x[:1] for x in layers[0])), labels[:1], boxes[:1])
    torch.testing.assert_close(alone.total + first.total, whole.total)
    assert int(whole.over) == 4


def test_the_right_answer_has_no_loss():
    _, labels, boxes = answers()
    boxes = 0.2 + boxes / 2
    aim = torch.full((2, 5), 3)
    aim[0, :3], aim[1, 0] = labels[0], 1
    spread = torch.nn.functional.one_hot(aim, 4).double() * 50
    perfect = Detected(spread, torch.cat([boxes, torch.rand(2, 2, 4, dtype=torch.double)], 1))
    slots = match([perfect], labels, boxes, SetWeights())
    assert slots[0][0].tolist() == [0, 1, 2] and set_loss([perfect], slots, labels, boxes, SetWeights()).total < 1e-9


def test_objects_have_a_cell_each_the_nearest_unless_it_is_taken():
    boxes = torch.tensor([[[0.3, 0.3, 0.1, 0.1], [0.2, 0.2, 0.1, 0.1], [0.9, 0.1, 0.1, 0.1]]])
    cells = nearest_cells(boxes, np.array([[1, 2, 3]]), (2, 2))[0].tolist()
    assert len(set(cells)) == 3 and cells[1] == 0 and cells[2] == 1


# scores


def found(*rows):
    """Objects of one image: (label, left, score), each of side 1."""
    labels, lefts, scores = (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 3
    boxes = np.stack([lefts, 0 * lefts, lefts + 1, 0 * lefts + 1], 1).reshape(-1, 4)
    return Objects(labels, boxes, scores)


def test_average_precision_by_hand():
    truth = [found((1, 0, 1), (1, 5, 1)), found((1, 0, 1))]
    said = [found((1, 0, 0.9), (1, 0.01, 0.8)), found((1, 0.2, 0.7))]  # right, the same once more, IoU 2/3
    assert average_precision(said, truth, 0.5)[1] == pytest.approx((1 + 2 / 3) / 3)
    assert average_precision(said, truth, 0.75)[1] == pytest.approx(1 / 3)
    assert average_precision(truth, truth, 0.95) == {1: pytest.approx(1)}
    assert average_precision([found()] * 2, truth, 0.5) == {1: 0}
    other = [found((2, 0, 0.9)), found()]
    assert average_precision(other, truth, 0.5) == {1: 0}  # a class that has no objects is not counted
    late = [found((1, 9, 0.9), (1, 0, 0.8), (1, 5, 0.7)), found((1, 0, 0.6))]  # the first is wrong: 1/2, 2/3, 3/4, from above
    assert average_precision(late, truth, 0.5)[1] == pytest.approx(3 / 4)
    scores = detection_scores(truth, truth, 0.5)
    assert scores == {"map50": pytest.approx(100), "map": pytest.approx(100), "count": 100}
    assert detection_scores(said, truth, 0.75)["count"] == 50


def test_floors_see_no_image():
    rows = [found((1, 0, 1), (2, 5, 1)), found((1, 0, 1)), found((1, 0, 1))]
    floors = detection_floors(rows, rows)
    assert floors["the most frequent boxes, map50"] > 60 and floors["the most frequent number, count"] == pytest.approx(200 / 3)
    assert floors["true boxes with labels by frequency, map50"] == pytest.approx(100 * 2 / 3)  # (5 / 6 + 1 / 2) / 2


# the task


@pytest.mark.parametrize("changes", [{}, {"begin": "cells"}, {"head": "dense"}], ids=str)
def test_a_run_answers_and_draws_and_refuses_what_is_no_image(changes, folder, tmp_path):
    made = tiny(folder, **changes)
    whole = fit(made, tmp_path / "whole", accelerator="cpu", quiet=True)
    assert whole.steps == 4 and whole.name == "map50"
    run = load(tmp_path / "whole", device="cpu", sure=0.0, draw=str(tmp_path))
    scene = tmp_path / "scene.png"
    pillow_image().fromarray(made.made([0]).images[0, 0]).save(scene)
    answer = run.predict([str(scene), ""])
    assert answer[1] == "" and answer[0].count(" at ") >= 3
    with pillow_image().open(tmp_path / "scene_boxes.png") as picture:
        assert picture.size == (384, 384) and len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 10
    assert run.evaluate("test", folder).keys() == {"map50", "map", "count", "scenes"}
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"bad.png is not a whole image"):
        run.predict([str(tmp_path / "bad.png")])
    unsure = load(tmp_path / "whole", device="cpu", sure=1.0)
    assert unsure.predict([str(scene)]) == ["no digit"]


@pytest.mark.parametrize(("width", "height"), [(200, 120), (90, 301), (64, 64), (20, 20)])
def test_boxes_are_in_pixels_of_the_file_and_drawn_into_all_of_it(width, height, folder, tmp_path, monkeypatch):
    made = tiny(folder, sure=0.1, draw=str(tmp_path))
    left, top, side = {200: (40, 0, 120), 90: (0, 105, 90), 64: (0, 0, 64), 20: (0, 0, 20)}[width]
    box = np.array([0.25, 0.5, 0.75, 1.0])
    objects = Objects(np.array([3, 4]), np.stack([box, box / 2]), np.array([0.9, 0.05]))
    monkeypatch.setattr(made, "answers", lambda *_: [objects])
    pillow_image().new("RGB", (width, height), "white").save(tmp_path / "photo.png")
    corners = [left + 0.25 * side, top + 0.5 * side, left + 0.75 * side, top + side]
    assert made.predict(made.model(), [str(tmp_path / "photo.png")]) == [f"3 0.90 at {' '.join(f'{x:.0f}' for x in corners)}"]
    with pillow_image().open(tmp_path / "photo_boxes.png") as picture:
        scale = -(-384 // max(width, height))
        assert picture.size == (scale * width, scale * height)
        for x, y in itertools.product(corners[::2], corners[1::2]):
            at = min(round(scale * x), picture.size[0] - 1), min(round(scale * y), picture.size[1] - 1)
            assert picture.getpixel(at) == (0x43, 0x63, 0xD8) or y == top + side == height  # below the last row
    assert not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("size", [(200, 120), (91, 300), (16, 16)])
def test_the_square_of_a_file_is_what_models_read(size, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    held = pillow_image().Exif()
    held[0x0112] = 6  # stored on its side
    for name, exif in (("a.png", pillow_image().Exif()), ("turned.png", held)):
        pillow_image().fromarray(noise).save(tmp_path / name, exif=exif)
        image = read_upright(tmp_path / name)
        assert image.pixels.shape[:2] == (size[::-1] if name == "a.png" else size)
        left, top, side = image.square
        assert (
            image.pixels[top : top + side, left : left + side] == read_image(tmp_path / name, side, False).transpose(1, 2, 0)
        ).all()
        assert image.placed(np.array([[0, 0, 1, 1]])).tolist() == [[left, top, left + side, top + side]]


def test_a_stopped_run_is_the_whole_run(folder, tmp_path, monkeypatch):
    fit(tiny(folder), tmp_path / "whole", accelerator="cpu", quiet=True)
    stopped = tiny(folder)
    scored = stopped.score
    monkeypatch.setattr(
        stopped, "score", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt) if calls.pop() else scored(*args)
    )
    calls = [True, False]
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, tmp_path / "parts", accelerator="cpu", quiet=True)
    fit(tiny(folder), tmp_path / "parts", accelerator="cpu", quiet=True)
    one, two = (load_run(tmp_path / name).weights for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("preset", [None, "cpu"])
def test_both_heads_have_about_as_many_weights(preset):
    sizes = []
    for head in ("queries", "dense"):
        made = make_task(config("detect", preset).replace({"head": head}))
        made.labels = [str(i) for i in range(10)]
        sizes.append(sum(p.numel() for p in made.model().parameters()))
    assert abs(sizes[1] / sizes[0] - 1) < 0.08, sizes
    assert equal_convolutions(config("detect").replace({"width": 128, "ffn": 512, "depth": 3})) == 9


def test_every_layer_of_the_decoder_has_a_loss_unless_it_is_switched_off(folder):
    made = tiny(folder, dropout=0.0)
    torch.manual_seed(0)
    model, batch = made.model().double(), made.batch(made.splits["train"][:4])
    layers = made.detected(model, batch.source)
    assert len(layers) == 2 and layers[0].boxes.shape == (4, 6, 4) and layers[0].scores.shape == (4, 6, 11)
    both = made.loss(model, batch, 1).total
    last = tiny(folder, dropout=0.0, auxiliary=False).loss(model, batch, 1).total
    first = set_loss(layers[:1], match(layers[:1], batch.target, batch.extra["boxes"], made.weights), batch.target,
                     batch.extra["boxes"], made.weights)  # fmt: skip
    torch.testing.assert_close(both, last + first.total)
    model.queries.data = model.queries.data[:1].expand_as(model.queries).contiguous()
    model.head.anchors.data = model.head.anchors.data[:1].expand_as(model.head.anchors).contiguous()
    same = made.detected(model, batch.source)[-1]
    torch.testing.assert_close(same.boxes[:, 0], same.boxes[:, 1])  # queries differ by their vectors alone


def test_a_decoder_that_begins_with_cells_takes_the_likeliest_and_their_boxes(folder):
    made = tiny(folder, dropout=0.0, begin="cells", auxiliary=False)
    torch.manual_seed(0)
    model, batch = made.model().double(), made.batch(made.splits["train"][:2])
    model.cells.boxes[-1].weight.data.normal_()
    cells, *layers = made.detected(model, batch.source)
    assert cells.scores.shape == (2, 16, 11) and [x.scores.shape for x in layers] == [(2, 6, 11)] * 2
    empty = cells.scores.softmax(-1)[..., -1]
    for row in range(2):  # boxes of the decoder are those of the cells at first
        best = empty[row].argsort()[:6]
        torch.testing.assert_close(layers[0].boxes[row], cells.boxes[row, best].clamp(1e-3, 1 - 1e-3))
    made.loss(model, batch, 1).total.backward()
    assert model.cells.classes.weight.grad.abs().sum() > 0


def test_scenes_of_several_splits_can_be_in_one_batch(folder):
    made = tiny(folder)
    rows = [0, 25, 1, 31]
    whole = made.batch(rows)
    parts = [made.batch([row]) for row in rows]
    assert torch.equal(whole.source, torch.cat([part.source for part in parts]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head": "boxes"}, "head"),
        ({"begin": "boxes"}, "begin"),
        ({"begin": "cells", "queries": 20}, "16 cells for 20 queries"),
        ({"queries": 2}, "2 queries cannot answer with 3 objects"),
        ({"head": "dense", "stem": "patches(side=32)"}, "1 dense cannot answer"),
        ({"sure": 2.0}, "sure must be from 0 to 1"),
        ({"draw": "/no/folder"}, "there is no such folder"),
        ({"smoothing": 0.1}, "smoothing is not a part"),
    ],
)
def test_settings_that_cannot_be(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_task(config("detect").replace({**TINY, **changes}))


def test_a_neighbourhood_of_another_grid_is_refused():
    made = make_task(config("detect").replace(TINY | {"mixer": "Neighbourhood(7, 1)"}))
    columns = made.grid[1]
    assert columns != 7
    with pytest.raises(ValueError, match=rf"grid of 7 columns, and this one has {columns}: use Neighbourhood\({columns}, 1\)"):
        made.model()


def test_settings_without_an_effect_are_named():
    assert "nms" in make_task(config("detect")).unused()
    dense = make_task(config("detect").replace({"head": "dense"})).unused()
    assert {"mixer", "heads", "queries", "auxiliary"} <= set(dense) and "decoder_depth" not in dense


def test_its_benchmark_goes_on_where_the_time_was_over(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import detection

    out = tmp_path / "detection.json"
    arguments = ["detection.py", "--tiny", "--seeds", "2", "--rates", "1e-3", "--data", str(folder), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(detection, "TINY", {**TINY, "dropout": 0.0})
    now = [0.0]
    monkeypatch.setattr(detection.time, "monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0])
    detection.main()
    whole = json.loads(out.read_text())
    out.rename(tmp_path / "whole.json")
    monkeypatch.setattr(sys, "argv", [*arguments, "--limit", "5"])
    for _ in range(12):
        detection.main()
    assert "is kept at update" in capsys.readouterr().out
    parts = json.loads(out.read_text())
    assert [row["test"] for row in parts["rows"]] == [row["test"] for row in whole["rows"]] and len(parts["rows"]) == 6


@pytest.mark.parametrize("preset", [None, "cpu"])
def test_its_benchmark_compares_three_heads_whatever_a_preset_begins_with(preset, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import detection

    made = [config("detect", preset).replace(changes) for changes in detection.HEADS.values()]
    assert [x.head for x in made] == ["queries", "queries", "dense"]
    assert [x.begin for x in made[:2]] == ["learned", "cells"]


def test_its_benchmark_counts_from_the_score_that_is_best_on_validation(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import detection

    task = make_task(config("detect").replace(TINY))
    task.read(folder)
    asked = []

    def score(model, split):  # noqa: ARG001
        asked.append((split, task.config.sure))
        return {"count": {0.3: 60.0, 0.4: 60.0, 0.5: 60.0}.get(task.config.sure, 10.0)}

    monkeypatch.setattr(task, "score", score)
    val, test, sure = detection.scored(task, None)
    assert sure == 0.4 and val == test == {"count": 60.0}
    assert [one for one in asked if one[0] == "test"] == [("test", 0.4)], "test is scored once, by the threshold of validation"
