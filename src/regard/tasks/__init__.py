"""Every task in one table: what to learn, from which data, with which settings to begin with.

The table imports neither torch nor the tasks: a row names its class, which is imported when a task is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from regard.config import Config
from regard.tasks.copying_config import acl_titles_config, wikisql_config
from regard.tasks.detection_config import DETECTION_PRESETS, detect_config
from regard.tasks.go_config import go_config
from regard.tasks.graph_config import communities_config, cora_config, motifs_config, tox21_config
from regard.tasks.image_config import IMAGE_PRESETS, cifar10_config, cifar10_gray_config
from regard.tasks.language_modeling_config import shakespeare_config
from regard.tasks.masked_config import MLM_PRESETS, mlm_config
from regard.tasks.own_data_config import (
    OWN_IMAGE_PRESETS,
    classify_config,
    images_config,
    tag_config,
    text_config,
    translate_config,
)
from regard.tasks.parsing_config import gum_config
from regard.tasks.pointing_config import hull_config, sorting_config
from regard.tasks.presets import CPU_PRESETS, Preset
from regard.tasks.sentiment_config import imdb_config, polarity_config
from regard.tasks.speech_config import an4_config, fsdd_config, fsdd_speaker_config, fsdd_strings_config
from regard.tasks.synthesis_config import fsdd_tts_config, tones_config, tts_config
from regard.tasks.tagging_config import ewt_config, saw_config
from regard.tasks.translation_config import copy_config, multi30k_config, numbers_config, reverse_config
from regard.text import unknown

if TYPE_CHECKING:
    from regard.tasks.task import Task

__all__ = ["TASKS", "Entry", "config", "entry_of", "make_task"]


class Entry(NamedTuple):
    """Describe a task: a row of the table.

    `config` makes the settings that it begins with, `kind` is its class or where that is, `best` the validation score that
    selects weights with "min" or "max", `summary` one line. `data` names the data set that it needs, `file` the options of
    `regard train` for a user's own files, `presets` settings by name, `package` one that reading its data needs.

    >>> from regard.tasks import TASKS
    >>> TASKS["saw"].best, TASKS["multi30k"].data
    (('accuracy', 'max'), 'multi30k')
    """

    config: Callable[[], Config]  # the settings it begins with
    kind: str | Callable[..., Task]  # its class, or where it is: "package.module:Class"
    best: tuple[str, str]  # the validation score that selects weights, and "min" or "max": the same as `Task.best`
    summary: str
    data: str | None = None  # the data set that it needs; None: it makes its own, or reads `file`
    file: str = ""  # the options of `regard train` that name a file of the user, which it reads
    presets: Mapping[str, Preset] = {}  # settings by name, for `regard train --preset`
    package: str = ""  # a package that its data needs, beside those of training

    def make(self, config: Config) -> Task:
        """Make the task, importing its class first where only its place is given."""
        if not isinstance(self.kind, str):
            return self.kind(config)
        module, _, name = self.kind.partition(":")
        return getattr(import_module(module), name)(config)


_EXACT, _ACCURACY, _BLEU = ("exact", "max"), ("accuracy", "max"), ("bleu", "max")
_ROUGE, _LOSS, _AUC = ("rouge_l", "max"), ("loss", "min"), ("roc_auc", "max")
_TRANSLATION, _TAGGING, _COPYING = "regard.tasks.translation", "regard.tasks.tagging", "regard.tasks.copying"
_WER = ("wer", "min")
_SYNTHESIS, _DISTANCE = "regard.tasks.synthesis_sets", ("distance", "min")
_RECOGNITION, _SPOKEN = "regard.tasks.recognition", "regard.tasks.spoken_labels"
_SENTIMENT, _LANGUAGE, _OWN = "regard.tasks.sentiment", "regard.tasks.language_modeling", "regard.tasks.own_data"
_NODES, _MOLECULES = "regard.tasks.node_labels", "regard.tasks.molecule_labels"

#: Every task by its name; `config(name)` makes its settings.
#:
#: >>> from regard.tasks import TASKS
#: >>> TASKS["copy"].summary
#: 'the same string again'
TASKS: dict[str, Entry] = {
    "reverse": Entry(reverse_config, f"{_TRANSLATION}:ReverseTask", _EXACT, "a string turned around"),
    "copy": Entry(copy_config, f"{_TRANSLATION}:RepeatTask", _EXACT, "the same string again"),
    "numbers": Entry(numbers_config, f"{_TRANSLATION}:NumbersTask", _EXACT, "number words in another language"),
    "saw": Entry(saw_config, f"{_TAGGING}:SawTask", _ACCURACY, "tags for words that have several: I saw a saw"),
    "polarity": Entry(polarity_config, f"{_SENTIMENT}:PolarityTask", _ACCURACY, "good or bad, with negations"),
    "sorting": Entry(sorting_config, "regard.tasks.pointing:SortingTask", _EXACT, "numbers sorted, by pointing at them"),
    "hull": Entry(hull_config, "regard.tasks.pointing:HullTask", _EXACT, "corners of a convex hull, by pointing"),
    "communities": Entry(communities_config, f"{_NODES}:CommunitiesTask", _LOSS, "groups of the nodes of a graph"),
    "motifs": Entry(motifs_config, f"{_MOLECULES}:MotifsTask", _AUC, "what drawn molecules have", package="rdkit"),
    "tones": Entry(tones_config, f"{_SYNTHESIS}:TonesTask", _DISTANCE, "speech of letters that are chords"),
    "multi30k": Entry(multi30k_config, f"{_TRANSLATION}:TranslationTask", _BLEU, "captions, English to German", "multi30k"),
    "ewt": Entry(ewt_config, f"{_TAGGING}:TaggingTask", _ACCURACY, "part-of-speech tags of English", "ud_english_ewt"),
    "imdb": Entry(imdb_config, f"{_SENTIMENT}:ReviewTask", _ACCURACY, "film reviews, good or bad", "imdb"),
    "shakespeare": Entry(shakespeare_config, f"{_LANGUAGE}:LanguageTask", _LOSS, "the next character", "tinyshakespeare"),
    "acl_titles": Entry(acl_titles_config, f"{_COPYING}:CopyTask", _ROUGE, "title of an abstract, with copying", "acl_titles"),
    "wikisql": Entry(wikisql_config, f"{_COPYING}:CopyTask", _EXACT, "a query for a question, with copying", "wikisql"),
    "cora": Entry(cora_config, f"{_NODES}:NodeLabelsTask", _LOSS, "topics of papers, by words and citations", "planetoid"),
    "gum": Entry(gum_config, "regard.tasks.parsing:ParsingTask", ("f1", "max"), "a tree for a sentence, in brackets", "gum"),
    "go": Entry(go_config, "regard.tasks.go_task:GoTask", ("top1", "max"), "the next move of a professional", "go_fox_pro"),
    "an4": Entry(an4_config, f"{_RECOGNITION}:An4Task", _WER, "spelled words and numbers, recognised", "an4"),
    "fsdd": Entry(fsdd_config, f"{_SPOKEN}:SpokenDigitTask", _ACCURACY, "digits of another voice", "fsdd"),
    "fsdd_speaker": Entry(fsdd_speaker_config, f"{_SPOKEN}:SpeakerTask", _ACCURACY, "voices, named and verified", "fsdd"),
    "fsdd_strings": Entry(
        fsdd_strings_config, f"{_RECOGNITION}:DigitStringTask", _WER, "strings of digits, recognised live", "fsdd"
    ),
    "fsdd_tts": Entry(fsdd_tts_config, f"{_SYNTHESIS}:DigitSynthesisTask", _DISTANCE, "speech of digits, in one voice", "fsdd"),
    "tts": Entry(tts_config, f"{_SYNTHESIS}:CorpusSynthesisTask", _DISTANCE, "speech of texts, from a corpus", "tts"),
    "cifar10": Entry(
        cifar10_config,
        "regard.tasks.cifar_colour:CifarTask",
        _ACCURACY,
        "objects in small colour images",
        "cifar10_colour",
        presets=IMAGE_PRESETS,
    ),
    "cifar10_gray": Entry(
        cifar10_gray_config,
        "regard.tasks.image_labels:GrayTask",
        _ACCURACY,
        "objects in small gray images",
        "cifar10",
        presets=IMAGE_PRESETS,
    ),
    "detect": Entry(
        detect_config,
        "regard.tasks.detection:DetectionTask",
        ("map50", "max"),
        "digits in scenes, with their boxes",
        presets=DETECTION_PRESETS,
        package="sklearn",
    ),
    "tox21": Entry(
        tox21_config, f"{_MOLECULES}:MoleculeLabelsTask", _AUC, "toxicity of molecules, twelve labels", "tox21", package="rdkit"
    ),
    "classify": Entry(
        classify_config, f"{_OWN}:ClassificationTask", _ACCURACY, "labels of your texts", file="--csv, --jsonl or --folder"
    ),
    "images": Entry(
        images_config,
        "regard.tasks.own_images:OwnImagesTask",
        _ACCURACY,
        "labels of your images",
        file="--folder",
        presets=OWN_IMAGE_PRESETS,
    ),
    "text": Entry(text_config, f"{_OWN}:OwnTextTask", _LOSS, "the next character of your text", file="--file"),
    "mlm": Entry(
        mlm_config,
        "regard.tasks.masked_language:MaskedLanguageTask",
        _LOSS,
        "masked tokens: a first stage",
        file="--file",
        presets=MLM_PRESETS,
    ),
    "translate": Entry(
        translate_config, "regard.tasks.own_pairs:OwnPairsTask", _BLEU, "your texts, line by line", file="--pairs"
    ),
    "tag": Entry(tag_config, "regard.tasks.own_tags:OwnTagsTask", _ACCURACY, "tags of your words", file="--conll"),
}
TASKS |= {name: TASKS[name]._replace(presets={"cpu": preset}) for name, preset in CPU_PRESETS.items()}


def entry_of(name: str) -> Entry:
    """Find the row of a task.

    `name` is that of the task; an unknown one is answered with the nearest.

    >>> from regard.tasks import entry_of
    >>> entry_of("reverse").summary
    'a string turned around'
    """
    if name not in TASKS:
        raise ValueError(unknown("there is no task", name, TASKS))
    return TASKS[name]


def config(name: str, preset: str | None = None) -> Config:
    """Make the settings that a task begins with, or those of a preset.

    `name` is that of the task, `preset` one of its presets ("cpu").

    >>> from regard.tasks import config
    >>> settings = config("saw").replace({"mixer": "Local(8)", "steps": 100})
    >>> settings.mixer, settings.steps
    ('Local(8)', 100)
    """
    entry = entry_of(name)
    if preset is None:
        return entry.config()
    if preset not in entry.presets:
        raise ValueError(no_preset(name, preset))
    return entry.config().replace(entry.presets[preset])


def no_preset(name: str, preset: str) -> str:
    """Write that a task has no such preset, and what has."""
    having = [word for word, entry in TASKS.items() if preset in entry.presets]
    if entry_of(name).presets:
        return unknown(f"{name} has no preset", preset, entry_of(name).presets)
    return f"{name} has no presets" + (f": {preset} is one of {', '.join(having)}" if having else "")


def make_task(settings: Config) -> Task:
    """Make the task that these settings are of.

    `settings` are those of `config`, changed or not. `read` then reads or draws its data, `model` builds its model, and
    `regard.training.fit.fit(task, folder)` trains it.

    >>> from regard.tasks import config, make_task
    >>> make_task(config("reverse")).best
    ('exact', 'max')
    """
    return entry_of(settings.task).make(settings)
