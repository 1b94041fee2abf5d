"""The plot of a training run: loss, score, the chosen checkpoint."""

from regard.plots.training_plot import training_plot

LINES = [
    {"step": 50, "time": 1.0, "loss": 2.0},
    {"step": 100, "time": 2.0, "loss": 1.0, "val": {"bleu": 10.0}},
    {"step": 200, "time": 4.0, "loss": 0.5, "val": {"bleu": 30.0}},
]


def test_a_curve_shows_the_loss_and_the_score_and_circles_what_was_kept(tmp_path):
    left, right = training_plot(LINES, "bleu", "a run", chosen=200).axes
    assert left.lines[0].get_xydata().tolist() == [[50, 2], [100, 1], [200, 0.5]]
    assert [line.get_xydata().tolist() for line in right.lines] == [[[100, 10], [200, 30]], [[200, 30]]]
    assert left.get_ylabel() == "loss in training" and right.get_ylabel() == "bleu on validation"
    training_plot(LINES, "bleu", "a run").savefig(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_run_without_a_score_is_a_loss_alone():
    figure = training_plot(LINES[:1], "bleu", "a run")
    assert len(figure.axes) == 1
    assert "50 updates in 1 s" in [text.get_text() for text in figure.texts]
