"""What users do, from the files they have and the commands they type: training, scores above the floors, answers, Python."""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import regard
from regard.spec import CATALOGUE
from test_cli import run

SMALL = "--set width=16 --set heads=2 --set depth=1 --set ffn=32 --set warmup=5 --set dropout=0 --set lr=0.01 --device cpu"
SHORT = f"{SMALL} --set batch_tokens=512 --set validate_every=50 --set save_every=50 --set average=1"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the user, where she types."""
    monkeypatch.chdir(tmp_path)


def typed(line: str) -> tuple[str, str]:
    """Type a command; returns its answer and its messages."""
    program, *words = shlex.split(line)
    assert program == "regard"
    done = run(*words)
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def scores_of(folder: str) -> dict[str, float]:
    return json.loads(typed(f"regard evaluate {folder} --json")[0])["scores"]


# French pairs

FRENCH = {"le chat": "the cat", "le chien": "the dog", "un oiseau": "a bird", "une vache": "a cow", "l'été": "the summer"}
DOES = {"dort": "sleeps", "mange": "eats", "chante": "sings", "court": "runs", "tombe": "falls", "rêve": "dreams"}
WHEN = {"ici": "here", "là-bas": "there", "": "", "ce soir": "tonight"}


def write_french(stem: str) -> None:
    rows = [
        (f"{a} {b} {c}".strip().capitalize() + ".", f"{x} {y} {z}".strip().capitalize() + ".")
        for a, x in FRENCH.items()
        for b, y in DOES.items()
        for c, z in WHEN.items()
    ]
    for place, language in enumerate(("fr", "en")):
        Path(f"{stem}.{language}").write_text("".join(row[place] + "\n" for row in rows), encoding="utf-8")


def test_french_pairs() -> None:
    write_french("texts")
    _, said = typed(
        "regard train translate --pairs texts.fr texts.en --out runs/french --set units=words --set lower=true "
        f"--set mode=teacher_forcing --set steps=100 --set max_new_tokens=8 --set beam=2 {SHORT}"
    )
    assert "120 pairs of" in said and "96 train, 12 val, 12 test" in said and "floor: the source, said again, has BLEU" in said
    scores = scores_of("runs/french")
    assert scores["bleu"] > scores["floor"] + 10
    answer, _ = typed("regard predict runs/french 'Le chat dort ici.'")
    found = regard.load("runs/french", device="cpu")
    assert found.predict(["Le chat dort ici."]) == [answer.strip()] and answer.strip()


# Treebanks, in three files as Universal Dependencies has them

CHINESE = [  # UD v1: CONJ, and words without spaces between them
    [
        ("我", "PRON", "PRP"),
        ("喜欢", "VERB", "VV"),
        ("猫", "NOUN", "NN"),
        ("和", "CONJ", "CC"),
        ("狗", "NOUN", "NN"),
        ("。", "PUNCT", "."),
    ],
    [("他", "PRON", "PRP"), ("在", "ADP", "IN"), ("北京", "PROPN", "NNP"), ("工作", "VERB", "VV"), ("。", "PUNCT", ".")],
    [
        ("她", "PRON", "PRP"),
        ("买", "VERB", "VV"),
        ("了", "PART", "AS"),
        ("三", "NUM", "CD"),
        ("本", "NOUN", "NNB"),
        ("书", "NOUN", "NN"),
    ],
]
GERMAN = [  # UD v2: CCONJ and AUX, a token of two words, an empty node
    [("Wir", "PRON", "PPER"), ("gehen", "VERB", "VVFIN"), ("zu", "ADP", "APPR"), ("dem", "DET", "ART"), ("Markt", "NOUN", "NN")],
    [
        ("Hunde", "NOUN", "NN"),
        ("und", "CCONJ", "KON"),
        ("Katzen", "NOUN", "NN"),
        ("sind", "AUX", "VAFIN"),
        ("laut", "ADJ", "ADJD"),
    ],
    [
        ("Sie", "PRON", "PPER"),
        ("hat", "AUX", "VAFIN"),
        ("das", "DET", "ART"),
        ("Haus", "NOUN", "NN"),
        ("gesehen", "VERB", "VVPP"),
    ],
]
Sentence = list[tuple[str, str, str]]


def conllu(sentences: list[Sentence], count: int, seed: int) -> str:
    """Write sentences as CoNLL-U: each of them with another number in front, "zu dem" as the token "zum"."""
    lines, drawn = [], random.Random(seed)
    for i in range(count):
        number = (f"{drawn.randrange(10_000)}", "NUM", "CD")
        words = [number, *sentences[i % len(sentences)]]
        lines += [f"# sent_id = {i}", f"# text = {''.join(word for word, *_ in words)}"]
        for place, (word, tag, fine) in enumerate(words, 1):
            if word == "zu":
                lines.append(f"{place}-{place + 1}\tzum" + "\t_" * 8)
            lines.append(f"{place}\t{word}\t{word}\t{tag}\t{fine}\t_\t0\troot\t_\tSpaceAfter=No")
        lines += ["8.1\tleer\t_\tVERB" + "\t_" * 6, ""]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("language", "sentences", "only", "text"),
    [
        ("zh", CHINESE, "CONJ", "我 喜欢 狗 和 猫 。"),
        ("de", GERMAN, "CCONJ", "Katzen und Hunde sind laut"),
    ],
)
def test_a_treebank(language: str, sentences: list[Sentence], only: str, text: str) -> None:
    for part, count in {"train": 90, "dev": 6, "test": 9}.items():
        Path(f"{language}-ud-{part}.conllu").write_text(conllu(sentences, count, count), encoding="utf-8")
    stem = f"{language}-ud"
    _, said = typed(
        f"regard train tag --conll {stem}-train.conllu --valid {stem}-dev.conllu --test {stem}-test.conllu --out runs/tags "
        f"--mixer softmax --set spelling=16 --set forget=0 --set steps=60 {SHORT}"
    )
    assert f"90 train of {Path.cwd() / stem}-train.conllu; 6 val of" in said and f"{only} (" in said
    tags = json.loads(Path("runs/tags/assets/tags.json").read_text())["tags"]
    assert set(tags) == {"NUM"} | {tag for sentence in sentences for _, tag, _ in sentence}
    assert scores_of("runs/tags")["accuracy"] >= 95
    answer, _ = typed(f"regard predict runs/tags '{text}'")
    assert [word.partition("/")[0] for word in answer.split()] == text.split() and f"/{only}" in answer


# Labels of texts

TOPICS = {"sport": "ball team goal", "food": "bread soup salt", "law": "court judge fine", "music": "song drum choir"}


def write_topics(path: str) -> None:
    """A CSV file as a spreadsheet saves it in Europe: a byte order mark, semicolons, quotes, line breaks in a field."""
    drawn = random.Random(0)
    rows = [
        f'{i};"the {drawn.choice(TOPICS[topic].split())} ""{i}"";\r\nand a {drawn.choice(TOPICS[topic].split())}";{topic}\r\n'
        for i, topic in enumerate(list(TOPICS) * 30)
    ]
    Path(path).write_bytes(b"\xef\xbb\xbf" + ("Nr;Text;Topic\r\n" + "".join(rows)).encode())


CLASSIFY = f"--csv notes.csv --text Text --label Topic --set units=words --set forget=0 {SHORT}"


def test_four_labels_of_a_csv_file() -> None:
    write_topics("notes.csv")
    _, said = typed(f"regard train classify {CLASSIFY} --mixer softmax --set steps=60 --out runs/topics")
    assert "4 labels: " in said and all(f"{topic} (30)" in said for topic in TOPICS) and "96 train, 12 val, 12 test" in said
    scores = scores_of("runs/topics")
    assert scores["accuracy"] > scores["floor"] + 30 and scores["floor"] == 25
    assert typed("regard predict runs/topics 'the judge and the court'")[0].strip() == "law"


# A book

PAGE = "The rain fell on the hill, and the hill was green. The sun rose on the sea, and the sea was blue.\n"


def test_a_book() -> None:
    Path("book.txt").write_text(PAGE * 60)
    shape = f"--set window=32 --set max_len=64 --set max_new_tokens=12 {SHORT}"
    _, said = typed(
        f"regard train text --file book.txt --set units=subwords --set vocab=400 --set steps=60 {shape} --out runs/book"
    )
    assert "vocabulary: " in said and "subwords of train" in said
    scores = scores_of("runs/book")
    assert scores["bits"] < scores["floor_bits"] - 1 and scores["bits_per_byte"] < scores["bits"] / 2
    answer, _ = typed("regard predict runs/book 'The rain fell on'")
    assert answer.startswith("The rain fell on ") and len(answer.split()) > 6
    # with more updates the finished run goes on
    typed("regard train text --out runs/book --set steps=70 --device cpu")
    assert json.loads(Path("runs/book/config.json").read_text())["steps"] == 70


# A mechanism of another package

MECHANISM = '''
from regard.mixers.softmax import Softmax


class Warm(Softmax):
    """Softmax attention at another temperature."""

    def __init__(self, dims, *, temperature: float = 1.0) -> None:
        super().__init__(dims, scale=dims.d**-0.5 / temperature)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of somebody else that names its mechanism by an entry point."""
    site = tmp_path / "site"
    (site / "warmth").mkdir(parents=True)
    (site / "warmth/__init__.py").write_text(MECHANISM)
    (site / "warmth-1.0.dist-info").mkdir()
    (site / "warmth-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: warmth\nVersion: 1.0\n")
    (site / "warmth-1.0.dist-info/entry_points.txt").write_text("[regard.mechanisms]\nwarm = warmth:Warm\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr("regard.spec.CATALOGUE", catalogue := dict(CATALOGUE))
    monkeypatch.setattr("regard.own_mechanism.CATALOGUE", catalogue)
    yield
    sys.modules.pop("warmth", None)


@pytest.mark.usefixtures("installed")
def test_a_mechanism_of_another_package() -> None:
    write_topics("notes.csv")
    assert "warm: warmth:Warm" in typed("regard list")[0]
    assert "Softmax attention at another temperature." in typed("regard show 'warm(temperature=0.5)' --length 32")[0]
    typed(f"regard train classify {CLASSIFY} --mixer 'warm(temperature=0.5)' --set steps=60 --out runs/warm")
    assert scores_of("runs/warm")["accuracy"] > 55
    found = regard.load("runs/warm", device="cpu")
    assert "Warm" in {type(part).__name__ for part in found.model.modules()} and found.config.mixer == "warm(temperature=0.5)"
    assert found.predict(["the judge and the court"])[0] in TOPICS
