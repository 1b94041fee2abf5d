"""The sheet shows every pattern and every mechanism, each in its place and none over another."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from regard.catalogue import CATALOGUE
from regard.mixers.base import Can
from regard.patterns import PATTERNS, And, Or
from regard.plots.gallery import ACROSS, SAMPLES, _all, _lines, sheet


@pytest.fixture(scope="module")
def whole() -> Figure:
    return sheet()


def written(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_every_pattern_and_every_mechanism_is_there(whole: Figure) -> None:
    texts = written(whole)
    assert {type(pattern) for pattern, _ in SAMPLES.values()} == {*PATTERNS.values(), Or, And}
    assert set(SAMPLES) <= set(texts)
    assert set(CATALOGUE) <= set(texts)
    assert {row.family.replace("_", " ") for row in CATALOGUE.values()} <= set(texts)


def test_it_is_a_picture_for_a_page(whole: Figure) -> None:
    file = BytesIO()
    whole.savefig(file)
    wide = whole.get_size_inches()[0] * whole.dpi
    assert 1600 <= wide <= 2400
    assert len(file.getvalue()) < 1_000_000


def test_no_words_run_into_others_or_off_the_page(whole: Figure) -> None:
    renderer = FigureCanvasAgg(whole).get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in whole.texts]
    wide, high = whole.get_size_inches() * whole.dpi
    for name, box in boxes:
        assert 0 <= box.x0 < box.x1 <= wide, name
        assert 0 <= box.y0 < box.y1 <= high, name
    for number, (name, a) in enumerate(boxes):
        for other, b in boxes[number + 1 :]:
            assert a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0, (name, other)


def test_nothing_of_the_future_is_shown() -> None:
    figure = sheet(["softmax", "Local(4)", "linear", "conv"], causal=True, patterns=False)
    images = [image for axes in figure.axes for image in axes.images]
    assert len(images) == 4
    for image in images:
        assert image.get_array().mask[torch.ones(40, 40, dtype=torch.bool).triu(1).numpy()].all()


def test_what_cannot_be_causal_is_left_out_or_refused() -> None:
    unable = {name for name, row in CATALOGUE.items() if Can.CAUSAL not in row.can}
    assert {spec.name for spec in _all(causal=True)} == set(CATALOGUE) - unable
    for name in sorted(unable)[:1]:
        with pytest.raises(ValueError, match="cannot do causal"):
            sheet([name], causal=True, patterns=False)


def test_options_of_ones_own_are_measured() -> None:
    texts = written(sheet(["Local(2)", "softmax(scale=2.0)", "Local(2) | Global(first=1) | Stride(3)"], patterns=False))
    assert texts[texts.index("Local(2)") + 1] == "time n, state 1"
    assert texts[texts.index("softmax(scale=2.0)") + 1] == "time n², state t"
    assert "Local(2) | Global(fir…" in texts


def test_heads_that_differ_are_all_shown() -> None:
    differ = sheet(["PerHead([Local(2), Stride(3)])"], patterns=False)
    alike = sheet(["Local(2)"], patterns=False)
    assert [sum(len(axes.images) for axes in figure.axes) for figure in (differ, alike)] == [4, 1]


def test_a_sheet_repeats_itself_and_leaves_the_dice_alone() -> None:
    before = torch.get_rng_state()
    files = [BytesIO(), BytesIO()]
    for file in files:
        sheet(["additive(hidden=4)", "conv"], patterns=False).savefig(file)
    assert files[0].getvalue() == files[1].getvalue()
    assert torch.equal(before, torch.get_rng_state())


@given(st.lists(st.integers(1, 20), max_size=12))
def test_families_lie_side_by_side_and_are_not_torn(sizes: list[int]) -> None:
    families = {str(number): size for number, size in enumerate(sizes)}
    lines = _lines(families)
    found = dict.fromkeys(families, 0)
    for line in lines:
        columns = [column for run in line for column in range(run.start, run.start + run.cells)]
        assert columns == list(range(len(columns)))
        assert len(columns) <= ACROSS
        for run in line:
            assert run.first == (found[run.family] == 0)
            found[run.family] += run.cells
    assert found == families
    for family, size in families.items():
        assert sum(any(run.family == family for run in line) for line in lines) == -(-size // ACROSS)
