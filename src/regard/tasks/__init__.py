"""Every task in one table: what to learn, from which data, with which settings to begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from regard.config import Config
from regard.tasks.copying import CopyTask, acl_titles_config, wikisql_config
from regard.tasks.language_modeling import LanguageTask, shakespeare_config
from regard.tasks.sentiment import PolarityTask, ReviewTask, imdb_config, polarity_config
from regard.tasks.tagging import SawTask, TaggingTask, ewt_config, saw_config
from regard.tasks.task import Task
from regard.tasks.translation import NumbersTask, ReverseTask, SayAgainTask, TranslationTask
from regard.tasks.translation_config import copy_config, multi30k_config, numbers_config, reverse_config
from regard.text import unknown

__all__ = ["TASKS", "Entry", "Task", "task"]


class Entry(NamedTuple):
    """A row of the table."""

    config: Callable[[], Config]  # the settings it begins with
    task: Callable[..., Task]
    summary: str
    data: str | None = None  # the data set that it needs; None: it makes its own


TASKS: dict[str, Entry] = {
    "reverse": Entry(reverse_config, ReverseTask, "a string turned around"),
    "copy": Entry(copy_config, SayAgainTask, "a string said again"),
    "numbers": Entry(numbers_config, NumbersTask, "number words in another language"),
    "saw": Entry(saw_config, SawTask, "tags for words that have several: I saw a saw"),
    "polarity": Entry(polarity_config, PolarityTask, "good or bad, with negations"),
    "multi30k": Entry(multi30k_config, TranslationTask, "captions, English to German", "multi30k"),
    "ewt": Entry(ewt_config, TaggingTask, "part-of-speech tags of English", "ud_english_ewt"),
    "imdb": Entry(imdb_config, ReviewTask, "film reviews, good or bad", "imdb"),
    "shakespeare": Entry(shakespeare_config, LanguageTask, "the next character", "tinyshakespeare"),
    "acl_titles": Entry(acl_titles_config, CopyTask, "the title of an abstract, with copying", "acl_titles"),
    "wikisql": Entry(wikisql_config, CopyTask, "a query for a question, with copying", "wikisql"),
}


def config(name: str) -> Config:
    """The settings that a task begins with."""
    if name not in TASKS:
        raise ValueError(unknown("there is no task", name, TASKS))
    return TASKS[name].config()


def task(settings: Config) -> Task:
    """The task that these settings are of."""
    if settings.task not in TASKS:
        raise ValueError(unknown("there is no task", settings.task, TASKS))
    return TASKS[settings.task].task(settings)
