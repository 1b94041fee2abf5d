"""Data sets as they are downloaded, converted by `regard prepare` to what their tasks read."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pytest

from regard.data.bibtex import bib_entries, plain_text
from regard.data.datasets import read_acl_titles
from regard.data.text_files import DataError
from test_cli import refused, run


def write_reviews(place: Path) -> Path:
    for part in ("train", "test"):
        for name in ("pos/0_9.txt", "pos/10_8.txt", "pos/2_10.txt", "neg/1_2.txt", "unsup/0_0.txt"):
            path = place / "aclImdb" / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"A film,<br />{part} {name} é", encoding="utf-8")
    (place / "aclImdb/train/urls_pos.txt").write_text("http://")
    return place / "aclImdb"


def test_the_reviews_of_a_folder_and_of_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_reviews(tmp_path)
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as archive:
        archive.add(folder, "aclImdb")
    monkeypatch.setenv("REGARD_DATA", str(tmp_path / "data"))
    done = run("prepare", "imdb", str(folder))
    assert done.exit_code == 0 and "4 lines" in done.stdout and "regard train imdb" in done.stdout
    assert run("prepare", "imdb", str(tmp_path / "aclImdb_v1.tar.gz"), "--out", str(tmp_path / "other")).exit_code == 0
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "data/imdb" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "other/train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["id"], row["rating"], row["label"]) for row in rows] == [
        ("neg/1", 2, 0),
        ("pos/0", 9, 1),
        ("pos/2", 10, 1),
        ("pos/10", 8, 1),
    ]
    assert rows[0]["text"] == "A film,<br />train neg/1_2.txt é"
    assert "train.jsonl is there already" in refused("prepare", "imdb", str(folder))


ENTRIES = r"""@proceedings{acl-2024,
    title = "Proceedings",
    year = "2024",
}
@inproceedings{a-etal-2024,
    title = "{BERT} \& Fran{\c{c}}ais: A ``Quoted'' Title {\textasciitilde} with {``}More{''}",
    author = {M{\"u}ller, J{\'o}zef  and
      {\L}uk, \v{S}},
    year = 2024,
    abstract = "One {"}quoted{"} word, 50\% of \textit{it} --- and
      H\'el\`ene's na\"{\i}ve {\o} $x_1$ \approx 3.",
}
"""


def test_bibtex_becomes_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "a.bib"
    file.write_text(ENTRIES)
    first, second = bib_entries(file)
    assert first == {"key": "acl-2024", "title": "Proceedings", "year": "2024"}
    assert second == {
        "key": "a-etal-2024",
        "title": "BERT & Français: A “Quoted” Title ~ with “More”",
        "author": "Müller, Józef and Łuk, Š",
        "year": "2024",
        "abstract": 'One "quoted" word, 50% of it — and Hélène\'s naïve ø $x_1$ \\approx 3.',
    }
    assert plain_text(r"Erd\H{o}s \'Angel \ss{} \aa ngstr\"om Gon{\c c}alves") == "Erdős Ángel ß ångström Gonçalves"
    for wrong, sentence in {
        'title = "a {': "a field does not end: its quote is never closed",
        "title = ,": "has no value",
    }.items():
        file.write_text("@misc{k,\n " + wrong)
        with pytest.raises(DataError, match=f"a.bib, entry k: a field {sentence.removeprefix('a field ')}"):
            list(bib_entries(file))


def test_papers_are_split_by_their_titles(tmp_path: Path) -> None:
    file, out = tmp_path / "anthology+abstracts.bib.gz", tmp_path / "acl_titles"
    words = " ".join(f"word{i}" for i in range(30))
    papers = [f'@article{{p{i},\n  title = "Number {i} of {{Papers}}",\n  abstract = "{words}"\n}}\n' for i in range(40)]
    papers += [
        '@article{twice,\n  title = "Number 3 of papers",\n  abstract = "' + words + '"\n}\n',
        '@article{x,\n title = "A B C"\n}\n',
    ]
    file.write_bytes(gzip.compress("".join(papers).encode()))
    assert run("prepare", "acl_titles", str(file), "--out", str(out)).exit_code == 0
    parts = read_acl_titles(out)
    assert [len(part) for part in parts] == [36, 2, 2] and len({pair.target for part in parts for pair in part}) == 40
    file.write_bytes(gzip.compress("".join(papers[:5]).encode()))
    assert "5 papers with a title and an abstract, but 18 are needed" in refused(
        "prepare", "acl_titles", str(file), "--out", str(tmp_path / "few")
    )
    assert not (tmp_path / "few").exists()


def test_mistakes_get_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--out", str(tmp_path / "out")]
    monkeypatch.delenv("REGARD_DATA", raising=False)
    assert "there is nothing to prepare for 'imbd'" in refused("prepare", "imbd", "x")
    assert "Give --out DIR, or name the folder of all data sets by REGARD_DATA" in refused("prepare", "imdb", "x")
    assert "there is no file or folder" in refused("prepare", "imdb", str(tmp_path / "gone"), *out)
    (tmp_path / "a.tar.gz").write_bytes(b"not one")
    assert "is not a whole .tar, .tar.gz or .zip file" in refused("prepare", "imdb", str(tmp_path / "a.tar.gz"), *out)
    (tmp_path / "empty").mkdir()
    assert "has no reviews of train" in refused("prepare", "imdb", str(tmp_path / "empty"), *out)
    assert "`regard prepare imdb aclImdb_v1.tar.gz` writes both files" in refused("train", "imdb", "--data", str(tmp_path))
