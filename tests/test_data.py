"""Files and data sets: what is read is what stands there, and what cannot be right is a sentence that says where."""

import bz2
import gzip
import json
import lzma
import os
import warnings
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import datasets
from regard.data.go_games import read_go
from regard.data.locate import DATASETS, file, find
from regard.data.text_files import OPEN, DataError, Pair, read_lines, read_parallel, read_records, read_text
from regard.data.treebank import read_gum
from regard.data.wikisql import in_question, read_wikisql, split_words

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def put(path, content):
    """A file with this content, packed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(PACK.get(path.suffix, bytes)(raw))
    return path


def refused(work, *parts):
    with pytest.raises(DataError) as caught:
        work()
    for part in parts:
        assert str(part) in str(caught.value)


# files


@pytest.mark.parametrize("ending", PACK)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]))))
def test_lines_are_what_was_written_in_every_packing(ending, tmp_path_factory, rows):
    if rows and rows[0].startswith("\ufeff"):
        return  # a mark in front is no text
    path = put(tmp_path_factory.mktemp("files") / f"a{ending}", "".join(row + "\n" for row in rows))
    assert list(read_lines(path)) == rows
    assert read_text(path) == "".join(row + "\n" for row in rows)


@pytest.mark.parametrize(
    ("raw", "rows"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf", []),
        (b"a\r\nb\rc\r\n", ["a", "b\rc"]),
        ("a\u2028b\x0bc\x1cd\x1de\x85f\x0c\n".encode(), ["a\u2028b\x0bc\x1cd\x1de\x85f\x0c"]),
        ("👩‍👩‍👧 e\u0301\n".encode(), ["👩‍👩‍👧 e\u0301"]),
    ],
)
def test_only_a_newline_ends_a_line_and_a_byte_order_mark_is_no_text(tmp_path, raw, rows):
    path = put(tmp_path / "a.txt", raw)
    assert list(read_lines(path)) == rows
    assert read_text(path).removesuffix("\n").split("\n") == (rows or [""])


@pytest.mark.parametrize("ending", PACK)
def test_a_line_may_be_very_long(tmp_path, ending):
    long = "äb😀" * 33_334
    assert list(read_lines(put(tmp_path / f"a{ending}", f"x\n{long}\ny"))) == ["x", long, "y"]


@pytest.mark.parametrize("read", [lambda path: list(read_lines(path)), read_text])
@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (b"abcd\xff\n", "line 17: not UTF-8 at byte 5"),
        (b"\xc3", "line 17: not UTF-8 at byte 1"),
        (b"ab\xed\xa0\x80\n", "line 17: not UTF-8 at byte 3"),  # half of a surrogate pair
        (b"ab\0c\n", "line 17: a NUL character at byte 3"),
    ],
)
def test_bytes_that_are_not_text_are_refused_with_their_place(tmp_path, read, ending, bad, sentence):
    path = put(tmp_path / f"train.en{ending}", b"fine\n" * 16 + bad)
    refused(lambda: read(path), f"train.en{ending}, {sentence}")


@pytest.mark.parametrize("read", [lambda path: list(read_lines(path)), read_text])
@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_a_packed_file_that_is_cut_off_or_was_never_packed_is_refused(tmp_path, read, ending):
    whole = put(tmp_path / f"a{ending}", os.urandom(2000).hex()).read_bytes()
    for cut in (0, 1, 4, 20, len(whole) // 2, len(whole) - 1):
        (tmp_path / f"a{ending}").write_bytes(whole[:cut])
        refused(lambda: read(tmp_path / f"a{ending}"), tmp_path / f"a{ending}")
    (tmp_path / f"b{ending}").write_bytes(b"this is plain text, and quite enough of it to be sure\n")
    refused(lambda: read(tmp_path / f"b{ending}"), f"b{ending}", "not a whole")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    (tmp_path / f"c{ending}").write_bytes(damaged)
    refused(lambda: read(tmp_path / f"c{ending}"), f"c{ending}")


def test_a_file_that_is_not_there_is_refused_before_a_line_is_asked_for(tmp_path):
    refused(lambda: read_lines(tmp_path / "no.txt"), "there is no file", "no.txt")
    refused(lambda: read_lines(tmp_path), "is a folder, not a file")


def test_a_file_that_the_system_refuses_is_a_sentence_too(tmp_path, monkeypatch):
    def locked(*_):
        raise PermissionError(13, "Permission denied")

    path = put(tmp_path / "a.gz", "a")
    monkeypatch.setitem(OPEN, ".gz", locked)
    refused(lambda: read_text(path), "a.gz cannot be read: Permission denied")
    refused(lambda: read_text(tmp_path / ("a" * 300)), "aaa")


def test_parallel_files_give_pairs_and_say_how_many_lines_are_empty_in_both(tmp_path):
    a, b = put(tmp_path / "a.en", "one\n\n two\n \t\n"), put(tmp_path / "a.de.gz", "eins\n\nzwei \n\u3000")
    assert read_parallel(a, b) == ([Pair("one", "eins"), Pair(" two", "zwei ")], 2)


def test_files_that_are_not_parallel_are_refused(tmp_path):
    a, b = put(tmp_path / "a.en", "one\ntwo\n"), put(tmp_path / "a.de", "eins\n" * 1001)
    refused(lambda: read_parallel(a, b), "a.en has 2 lines", "a.de has 1,001")
    put(b, "eins\n \n")
    refused(lambda: read_parallel(a, b), "a.de, line 2: empty", "a.en is not")
    refused(lambda: read_parallel(b, a), "a.de, line 2: empty", "a.en is not")


def test_records_have_their_keys_and_their_types(tmp_path):
    path = put(tmp_path / "a.jsonl.xz", '{"text": "a\\u2028\\n😀", "label": 1, "more": null}\n\n{"label": 0, "text": ""}\n')
    assert [(r["text"], r["label"]) for r in read_records(path, {"text": str, "label": int})] == [("a\u2028\n😀", 1), ("", 0)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2: not JSON"),
        ("null", "line 2: a record is an object"),
        ('["text", "label"]', "line 2: a record is an object"),
        ('{"text": "a"}', "line 2: no 'label' in this record; it has 'text'"),
        ("{}", "line 2: no 'text' in this record; it has nothing"),
        ('{"text": 3, "label": 1}', "line 2: 'text' must be a text, not 3"),
        ('{"text": "a", "label": "1"}', "line 2: 'label' must be an integer, not \"1\""),
        ('{"text": "a", "label": true}', "line 2: 'label' must be an integer, not true"),
        ('{"text": "a", "label": 1.0}', "line 2: 'label' must be an integer, not 1.0"),
        ('{"text": "\\ud800", "label": 1}', "line 2: 'text' has half of a surrogate pair"),
        ("[" * 100_000, "line 2: not"),
        ('{"text": "a", "label": ' + "9" * 5000 + "}", "line 2: not JSON that can be read: an integer of 5,000 digits"),
    ],
)
def test_a_bad_record_is_refused_with_its_place(tmp_path, line, sentence):
    path = put(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n' + line + "\n")
    refused(lambda: list(read_records(path, {"text": str, "label": int})), f"a.jsonl, {sentence}")


# where data sets lie


@pytest.fixture
def small(tmp_path):
    """A folder with a small copy of every data set, as it is known to look."""
    for part in ("train", "val", "test_2016_flickr"):
        put(tmp_path / "multi30k" / f"{part}.en.gz", f"A dog, {part}.\n")
        put(tmp_path / "multi30k" / f"{part}.de.gz", f"Ein Hund, {part}.\n")
    for part in ("train", "dev", "test"):
        put(tmp_path / "ud_english_ewt" / f"en_ewt-ud-{part}.conllu.xz", CONLLU)
    for part in ("train", "test"):
        rows = [{"text": f"{part} {n}", "label": n % 2, "rating": 3} for n in range(3000)]
        put(tmp_path / "imdb" / f"{part}.jsonl.xz", "\n".join(map(json.dumps, rows)))
    put(tmp_path / "tinyshakespeare" / "input.txt.gz", "to be or\r\nnot to be")
    for part in ("train", "val", "test"):
        put(tmp_path / "acl_titles" / f"{part}.jsonl", json.dumps({"abstract": f"long {part}", "title": part}))
    put(tmp_path / "wikisql" / "wikisql.json.bz2", json.dumps([QUERY]))
    for part in ("train", "dev", "test"):
        put(tmp_path / "gum" / f"{part}.tsv.xz", "GUM_news\t(ROOT (NP (NN News)))")
    for part in ("train", "val", "test"):
        head = "id\tdate\tblack_rank\twhite_rank\tkomi\tresult\tmoves"
        put(tmp_path / "go_fox_pro" / f"{part}.tsv.xz", f"{head}\n1\t2017\t9\t9\t0\tB+R\tpddp")
    return tmp_path


CONLLU = """# text = I can't
1\tI\ti\tPRON\t_\t_\t_\t_\t_\t_
2-3\tcan't\t_\t_\t_\t_\t_\t_\t_\t_
2\tca\tcan\tAUX\tMD\tVerbForm=Fin\t_\t_\t_\t_
3\tn't\tnot\tPART\t_\t_\t_\t_\t_\t_
3.1\tgo\tgo\tVERB\t_\t_\t_\t_\t_\t_

# text = Go !
1\tGo\tgo\tVERB\t_\t_\t_\t_\t_\t_
2\t!\t!\tPUNCT\t_\t_\t_\t_\t_\t_
"""

QUERY = {
    "sql": ["SELECT COUNT TABLEalias0.NO._IN_SERIES_FIELD FROM TABLE AS TABLEalias0 WHERE "
            'TABLEalias0.STATE/TERRITORY_FIELD = "var0" AND YEAR_FIELD > var1 AND TABLEalias0.TITLE_FIELD = var2 ;'],
    "variables": [{"name": "var0", "example": "nowhere"}, {"name": "var1", "example": "1999"}, {"name": "var2", "example": "b"}],
    "sentences": [
        {"original": "How many in South-Australia after 2001, called \"No. 1\"?", "question-split": split,
         "text": "How many in var0 ?", "variables": {"var0": "SOUTH-AUSTRALIA", "var2": '"No. 1"'}}
        for split in ("train", "test", "dev", "train")
    ],
}  # fmt: skip

READERS = {
    "multi30k": datasets.read_multi30k,
    "ud_english_ewt": datasets.read_ewt,
    "imdb": datasets.read_imdb,
    "tinyshakespeare": datasets.read_shakespeare,
    "acl_titles": datasets.read_acl_titles,
    "wikisql": read_wikisql,
    "gum": read_gum,
    "go_fox_pro": read_go,
}


def test_there_is_a_reader_for_every_known_set():
    images = {"cifar10", "cifar10_colour", "cifar10_jpeg"}
    elsewhere = {"aan_scisumm", *images, "planetoid", "tox21", "an4", "fsdd", "tts"}  # read by tests of tasks
    assert {*READERS, *elsewhere} == set(DATASETS)


@pytest.mark.parametrize("name", READERS)
def test_a_set_is_found_by_its_own_folder_by_the_one_above_it_and_by_the_environment(small, monkeypatch, name):
    monkeypatch.delenv("REGARD_DATA", raising=False)
    assert find(name, small) == find(name, str(small / name)) == small / name
    monkeypatch.setenv("REGARD_DATA", str(small))
    assert find(name) == small / name
    assert len(READERS[name](find(name))) == 3


@pytest.mark.parametrize("name", DATASETS)
def test_a_set_that_is_not_there_is_answered_with_what_to_fetch_and_where_to_put_it(tmp_path, monkeypatch, name):
    monkeypatch.delenv("REGARD_DATA", raising=False)
    known = DATASETS[name]
    place = known.folder or name
    refused(lambda: find(name), known.address, *known.files, f"a folder {place}", "REGARD_DATA or --data")
    refused(
        lambda: find(name, tmp_path),
        known.address,
        *known.files,
        f"there is no folder {tmp_path / place}",
        "REGARD_DATA or --data",
    )
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    refused(lambda: find(name), f"there is no folder {tmp_path / place}")
    monkeypatch.setenv("REGARD_DATA", "")
    refused(lambda: find(name), f"a folder {place}")


def test_a_set_that_lacks_a_file_says_which(small):
    (small / "multi30k" / "val.de.gz").unlink()
    for folder in (small, small / "multi30k"):
        refused(lambda: find("multi30k", folder), f"{small / 'multi30k'} has no val.de.", "Put train.en")  # noqa: B023
    refused(lambda: file(small / "multi30k", "val.de"), "has no val.de", ".gz")


def test_an_unknown_set_is_answered_with_the_nearest():
    refused(lambda: find("multi30"), "'multi30': did you mean 'multi30k'")


# what stands in them


def test_captions_are_pairs_and_empty_lines_are_warned_of(small):
    assert datasets.read_multi30k(small / "multi30k").val == [("A dog, val.", "Ein Hund, val.")]
    for language in ("en", "de"):
        put(small / "multi30k" / f"train.{language}.gz", "a\n\n\nb\n")
    with pytest.warns(UserWarning, match="2 lines that are empty both"):
        assert len(datasets.read_multi30k(small / "multi30k").train) == 2


def test_words_have_tags_and_ranges_and_empty_nodes_are_no_words(small):
    assert datasets.read_ewt(small / "ud_english_ewt").val == [
        (["I", "ca", "n't"], ["PRON", "AUX", "PART"], ["_ _", "MD VerbForm=Fin", "_ _"]),
        (["Go", "!"], ["VERB", "PUNCT"], ["_ _", "_ _"]),
    ]


@pytest.mark.parametrize(
    ("was", "now", "sentence"),
    [
        ("AUX", "VREB", "line 4: no universal part of speech is called 'VREB': did you mean 'VERB'?"),
        ("AUX", "_", "line 4: no universal part of speech"),
        ("\tca\t", "\t\t", "line 4: the word is empty"),
        ("2\tca\tcan", "2 ca can", "line 4: 8 columns instead of the 10"),
        ("2\tca", "4\tca", "line 4: word '4' of a sentence is where word 2"),
    ],
)
def test_a_bad_line_of_a_treebank_is_refused_with_its_place(tmp_path, was, now, sentence):
    refused(lambda: datasets.conllu(put(tmp_path / "a.conllu", CONLLU.replace(was, now, 1))), f"a.conllu, {sentence}")


def test_reviews_for_validation_are_balanced_and_the_same_in_any_order(tmp_path):
    rows = [{"text": f"{label} {n}", "label": label} for n in range(1300) for label in (0, 1)]
    rows += [*rows[:400], {"text": "both", "label": 0}, {"text": "both", "label": 1}]  # copies stay together
    put(tmp_path / "test.jsonl", json.dumps(rows[0]))
    found = []
    for turn in (1, -1):
        put(tmp_path / "train.jsonl", "\n".join(map(json.dumps, rows[::turn])))
        train, val, test = datasets.read_imdb(tmp_path)
        assert Counter(review.label for review in val) == {0: 1250, 1: 1250}
        assert len(train) + len(val) == len(rows) and len(test) == 1
        assert not {review.text for review in train} & {review.text for review in val}
        found.append(Counter(val))
    assert found[0] == found[1]


def test_reviews_that_are_too_few_or_have_another_label_are_refused(small):
    put(small / "imdb" / "train.jsonl.xz", '{"text": "a", "label": 1}\n' * 2000)
    refused(lambda: datasets.read_imdb(small / "imdb"), "0 reviews with label 0", "1,250 are for validation")
    put(small / "imdb" / "train.jsonl.xz", '\n{"text": "a", "label": -1}\n')
    refused(lambda: datasets.read_imdb(small / "imdb"), "train.jsonl.xz, line 2: the label must be 0 or 1, not -1")


def test_shakespeare_is_cut_at_nine_tenths_and_has_no_test_part(small):
    assert datasets.read_shakespeare(small / "tinyshakespeare") == ("to be or\nnot to ", "be", "")


def test_titles_go_with_their_abstracts(small):
    assert datasets.read_acl_titles(small / "acl_titles").test == [("long test", "test")]


def test_a_query_is_readable_and_its_values_stand_in_the_question_as_the_same_words(small):
    parts = read_wikisql(small / "wikisql")
    assert [len(part) for part in parts] == [2, 1, 1]
    assert parts.train[0] == (
        'how many in south - australia after 2001 , called " no . 1 " ?',
        'select count no . in series from table where state territory = south - australia and year > 1999 and title = " no . 1 "',
    )
    assert in_question(small / "wikisql") == 8 / 9  # 1999 does not
    assert split_words("İ_é/x2.0  a\u00a0b") == ["i", "̇", "_", "é", "/", "x2", ".", "0", "a", "b"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[{", "line 1: not JSON"),
        ("{}", "a list of queries is needed"),
        (json.dumps([QUERY, {}]), "query 2: not as text2sql-data has it"),
        (json.dumps([{**QUERY, "sql": []}]), "query 1: not as"),
        (json.dumps([QUERY]).replace("dev", "new"), "query 1: not as text2sql-data has it: no 'new'"),
        (json.dumps([{**QUERY, "variables": []}]), "query 1: not as text2sql-data has it: no 'var1'"),
        (json.dumps([3]), "query 1: not as"),
    ],
)
def test_queries_that_are_not_as_expected_are_refused(tmp_path, content, sentence):
    put(tmp_path / "wikisql.json", content)
    refused(lambda: read_wikisql(tmp_path), "wikisql.json", sentence)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("multi30k", [29_000, 1_014, 1_000]),
        ("ud_english_ewt", [12_544, 2_001, 2_077]),
        ("imdb", [22_500, 2_500, 25_000]),
        ("tinyshakespeare", [1_003_854, 111_540, 0]),
        ("acl_titles", [24_000, 1_500, 1_500]),
        ("wikisql", [56_355, 8_421, 15_878]),
        ("gum", [10_224, 1_575, 1_464]),
        ("go_fox_pro", [2_678, 500, 500]),
    ],
)
def test_the_real_data_has_as_many_examples_as_its_makers_say(name, counts):
    place = os.environ.get("REGARD_DATA")
    if not place or not (Path(place) / name).is_dir():
        pytest.skip(f"set REGARD_DATA to the folder that has {name}/ with {', '.join(DATASETS[name].files)} in it")
    with warnings.catch_warnings(action="error"):
        assert [len(part) for part in READERS[name](find(name))] == counts
