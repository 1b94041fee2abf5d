"""A text may have one of any number of labels, and answers are called what the data calls them, from training to prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard import tasks
from regard.data.datasets import LabelledText
from regard.data.text_files import DataError
from regard.tasks.sentiment import SentimentTask
from regard.tasks.sentiment_config import polarity_config
from test_cli import run

TEXTS = {
    "sport": "the match was won",
    "science": "the cell was seen",
    "trade": "the share was sold",
    "world": "the vote was held",
}
SETTINGS = ["units=words", "width=16", "heads=2", "depth=1", "ffn=16", "steps=60", "warmup=5", "batch_tokens=256", "dropout=0"]


def told(labels: dict[str, int | str]) -> list[LabelledText]:
    return [LabelledText(f"{text} {i}", labels[name]) for i in range(6) for name, text in TEXTS.items()]


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> type[SentimentTask]:
    """A task of its own, in the table with the others."""

    class Topics(SentimentTask):
        labels_of: dict[str, int | str] = {name: name for name in TEXTS}  # noqa: RUF012

        def examples(self, folder):  # noqa: ARG002
            return [told(self.labels_of)] * 3

    monkeypatch.setitem(
        tasks.TASKS, "polarity", tasks.Entry(polarity_config, Topics, ("accuracy", "max"), "what a text is about")
    )
    return Topics


@pytest.mark.parametrize("kind", ["names", "integers", "one"])
def test_any_number_of_labels_trains_and_answers_by_the_names_of_the_data(
    kind: str, topics: type[SentimentTask], tmp_path: Path
) -> None:
    labels = {
        "names": {name: name for name in TEXTS},
        "integers": {n: i + 3 for i, n in enumerate(TEXTS)},
        "one": dict.fromkeys(TEXTS, 0),
    }
    topics.labels_of = labels[kind]  # type: ignore[attr-defined]
    out = str(tmp_path / "run")
    done = run("train", "polarity", *(w for text in SETTINGS for w in ("--set", text)), "--out", out, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "accuracy" in run("evaluate", out).stdout
    asked = tmp_path / "asked.txt"
    asked.write_text("".join(f"{text}\n" for text in TEXTS.values()))
    assert run("predict", out, str(asked)).stdout.splitlines() == [str(label) for label in labels[kind].values()]


def test_a_label_that_no_training_text_has_and_labels_of_two_kinds_are_sentences(topics: type[SentimentTask]) -> None:
    made = topics(polarity_config())
    made.examples = lambda _: [told({n: n for n in TEXTS}), [LabelledText("a", "scince")], []]  # type: ignore[method-assign]
    with pytest.raises(DataError, match="no training text has the label 'scince': did you mean 'science'"):
        made.read()
    topics.labels_of = dict(zip(TEXTS, [1, 2, "x", "y"], strict=True))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="all integers or all texts"):
        topics(polarity_config()).read()
