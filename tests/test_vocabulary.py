"""Vocabularies: text comes back as it was, nobody can write an END, and what is wrong is a sentence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.data.batch import BEGIN, END, MASK, PAD, SPECIAL, UNKNOWN
from regard.data.bpe_dropout import BpeDropout
from regard.data.extended_vocab import extend_ids, extend_target_ids, extended_words
from regard.data.vocabulary import Bytes, Characters, Subwords, Vocabulary, Words, vocabulary

CORPUS = [
    "Two young, white males are outside near many bushes.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "Several men in hard hats are operating a giant pulley system.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "A little girl climbing into a wooden playhouse, a little girl's house.",
    "Ein kleines Mädchen klettert in ein Spielhaus aus Holz.",
]
ANY = st.text(st.characters(exclude_categories=["Cs"]))
NASTY = [
    "",
    " ",
    "  two  spaces ",
    "\t\n\r\n\x00\x0b\u2028",
    "👩‍👩‍👧 🇩🇪 e\u0301",
    " ".join(SPECIAL),
    "<end>",
    "<unk></s>[MASK]<|endoftext|>",
    "Ġ▁ĊÃ",
    "don't; 3.14%",
    "İΣΑΣ ß",
    "\ufeffx\ufffd",
]

SUBWORDS = {lower: Subwords.of(CORPUS, size=300, lower=lower) for lower in (False, True)}
KINDS = {
    "words": Words.of(CORPUS),
    "characters": Characters.of(CORPUS),
    "bytes": Bytes(),
    "subwords": SUBWORDS[False],
    "lower subwords": SUBWORDS[True],
}
each = pytest.mark.parametrize("kind", KINDS)


@each
def test_every_kind_is_a_vocabulary_whose_first_ids_are_special(kind):
    vocab = KINDS[kind]
    assert isinstance(vocab, Vocabulary)
    ids = [number for line in CORPUS for number in vocab.encode(line)]
    assert len(SPECIAL) <= min(ids) and max(ids) < len(vocab)


@each
@given(text=ANY)
def test_no_text_becomes_a_special_id_but_for_what_is_unknown(kind, text):
    vocab = KINDS[kind]
    for line in (text, f"<end>{text}", f"a <end> {text} <pad><mask>"):
        assert not {PAD, BEGIN, END, MASK} & set(vocab.encode(line))
        assert kind in ("words", "characters") or UNKNOWN not in vocab.encode(line)


@each
@pytest.mark.parametrize("line", CORPUS)
def test_what_was_learned_from_comes_back(kind, line):
    vocab = KINDS[kind]
    assert vocab.decode(vocab.encode(line)) == (line.lower() if kind.startswith("lower") else line)


@pytest.mark.parametrize("kind", ["bytes", "subwords", "lower subwords"])
@given(text=ANY)
def test_any_text_comes_back(kind, text):
    vocab = KINDS[kind]
    for line in (text, *NASTY):
        assert vocab.decode(vocab.encode(line)) == (line.lower() if kind.startswith("lower") else line)


@each
def test_decoding_stops_at_the_end_and_leaves_out_what_is_special(kind):
    vocab = KINDS[kind]
    ids = vocab.encode("a little girl")
    mixed = [BEGIN, *(number for one in ids for number in (PAD, one, MASK)), UNKNOWN, END, *ids]
    assert vocab.decode(mixed) == vocab.decode(ids) == vocab.decode(torch.tensor(ids)) == "a little girl"
    assert vocab.decode([]) == vocab.decode([END, *ids]) == ""


@each
@pytest.mark.parametrize("wrong", [-1, 10**9, None])
def test_an_id_that_there_is_not_is_refused(kind, wrong):
    vocab = KINDS[kind]
    wrong = len(vocab) if wrong is None else wrong
    with pytest.raises(ValueError, match=rf"there is no id {wrong}: this vocabulary has {len(vocab):,}, from 0"):
        vocab.decode([5, wrong])


@each
def test_a_vocabulary_comes_back_from_its_text(kind):
    vocab = KINDS[kind]
    again = vocabulary(vocab.to_json())
    assert type(again) is type(vocab) and len(again) == len(vocab) and again.to_json() == vocab.to_json()
    for line in [*CORPUS, *NASTY]:
        assert again.encode(line) == vocab.encode(line)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "JSON with a 'kind' in it is needed"),
        ("[1]", "JSON with a 'kind' in it is needed"),
        ("3", "JSON with a 'kind' in it is needed"),
        ("{}", "JSON with a 'kind' in it is needed"),
        ('{"kind": "word"}', "'word': did you mean 'words'"),
        ('{"kind": ["words"]}', "no vocabulary is of the kind"),
        ('{"kind": "words"}', "of the kind 'words' has no 'words'"),
        ('{"kind": "words", "words": "abc"}', "a list is needed"),
        ('{"kind": "words", "words": ["a", 3]}', "a word of a vocabulary is text, not 3"),
        ('{"kind": "words", "words": ["a", ["b"]]}', r"a word of a vocabulary is text, not \['b'\]"),
        ('{"kind": "words", "words": ["a", "b", "a"]}', "'a' is in this vocabulary twice"),
        ('{"kind": "characters", "characters": 3}', "a str is needed"),
        ('{"kind": "characters", "characters": "aa"}', "'a' is in this vocabulary twice"),
        ('{"kind": "subwords", "lower": 1, "tokenizer": {}}', "a bool is needed"),
        ('{"kind": "subwords", "lower": false, "tokenizer": {}}', "the tokenizer inside this vocabulary cannot be read"),
    ],
)
def test_a_text_that_is_no_vocabulary_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        vocabulary(text)


@pytest.mark.parametrize("kind", ["bytes", "subwords", "lower subwords"])
def test_half_a_surrogate_pair_is_refused(kind):
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        KINDS[kind].encode("a\ud800")


# words and characters


def test_words_are_counted_and_the_rare_ones_are_left_out():
    texts = ["b a a", ["c c c", "b"], "d"]
    assert Words.of(texts).words == ["a", "b", "c c c", "d"]
    assert Words.of(texts, min_count=2).words == ["a", "b"]
    assert Words.of(texts, size=6).words == ["a"]
    assert Words.of(iter(texts), min_count=2, size=100).encode("a x  b\n") == [5, UNKNOWN, 6]
    assert Words.of([]).encode("a") == [UNKNOWN]
    for options, sentence in [
        ({"min_count": 0}, "min_count must be at least 1, not 0"),
        ({"size": 4}, "size must be at least 5"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            Words.of(texts, **options)


def test_words_may_be_given_as_lists_and_may_hold_spaces():
    vocab = Words.of([["1 000", "men"]])
    assert vocab.decode_words(vocab.encode_words(["men", "1 000", "x"])) == ["men", "1 000"]


def test_a_word_that_looks_special_is_a_word():
    vocab = Words.of(["<end> <pad> a"])
    assert vocab.decode(vocab.encode("a <end> <pad> a")) == "a <end> <pad> a"


def test_characters_are_single():
    with pytest.raises(ValueError, match="'ab' is not one character"):
        Characters(["a", "ab"])
    assert Characters.of(["ba", "a\n"]).characters == ["\n", "a", "b"]


def test_bytes_that_are_not_utf_8_are_shown_as_such():
    assert Bytes().decode([0xFF + 5, ord("a") + 5]) == "\ufffda"


# subwords


def test_punctuation_is_never_in_one_piece_with_a_word():
    vocab = SUBWORDS[False]
    for piece in vocab.tokenizer.get_vocab():
        letters = piece.removeprefix("Ġ").replace("'s", "")
        assert not (any(sign in letters for sign in ",.!?;:") and any(c.isascii() and c.isalpha() for c in letters))


def test_a_word_is_the_same_at_the_start_and_later():
    vocab = SUBWORDS[False]
    assert vocab.encode("girl girl") == 2 * vocab.encode("girl")


def test_learning_depends_on_the_texts_alone_and_not_on_their_order():
    for texts in (CORPUS, CORPUS[::-1], iter(sorted(CORPUS))):
        assert Subwords.of(texts, size=300).to_json() == SUBWORDS[False].to_json()


def test_many_texts_at_once_are_as_one_after_another():
    assert SUBWORDS[True].encode_all([*CORPUS, *NASTY]) == [SUBWORDS[True].encode(line) for line in [*CORPUS, *NASTY]]


def test_a_vocabulary_of_subwords_is_as_large_as_asked_for_or_smaller():
    assert len(SUBWORDS[False]) == len(SUBWORDS[True]) == 300
    assert len(Subwords.of(["ab ab"], size=10_000)) == 5 + 256 + 2  # " a" and " ab"
    assert len(Subwords.of([], size=300)) == 5 + 256
    with pytest.raises(ValueError, match="size must be at least 261"):
        Subwords.of(CORPUS, size=260)


@pytest.mark.parametrize("lower", [False, True])
@given(text=st.text(max_size=40).filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text)))
def test_spellings_that_do_not_waver_are_those_of_the_vocabulary(lower, text):
    words = SUBWORDS[lower]
    assert next(BpeDropout(words, 0.0, 1).rounds([text], 1)) == [words.encode(text)]
    (whole,), (bare,) = (next(BpeDropout(words, share, 1).rounds([text], 1)) for share in (0.5, 1.0))
    assert words.decode(whole) == words.decode(bare) == words.decode(words.encode(text))
    assert len(bare) == len(("" if not text else " " + (text.lower() if lower else text)).encode())  # nothing is merged
    assert len(words.encode(text)) <= len(whole) <= len(bare)


def test_spellings_differ_from_round_to_round_and_are_the_same_for_the_same_seed():
    words = SUBWORDS[False]
    first, again, other = (list(BpeDropout(words, 0.3, seed).rounds(CORPUS, 3)) for seed in (1, 1, 2))
    assert first == again != other and first[0] != first[1] != first[2]
    assert all(words.decode(row) == line for found in first for row, line in zip(found, CORPUS, strict=True))
    with pytest.raises(ValueError, match="from 0 to 1, not 2"):
        BpeDropout(words, 2, 1)


def test_a_very_long_line_is_no_trouble():
    for line in ("ä😀" * 50_000, "a" * 100_000, "a b " * 25_000):
        assert SUBWORDS[False].decode(SUBWORDS[False].encode(line)) == line


# copying


def test_words_of_the_source_alone_are_numbered_in_the_order_of_their_appearance():
    vocab = Words(["who", "is", "?"])
    source = ["who", "is", "Ada", "L.", "Ada", "?", "<end>"]
    ids, oov = extend_ids(source, vocab)
    assert (ids, oov) == ([5, 6, 8, 9, 8, 7, 10], ["Ada", "L.", "<end>"])
    assert extend_target_ids(["L.", "is", "Bob"], vocab, oov) == [9, 6, UNKNOWN]
    assert extended_words([BEGIN, 9, 6, UNKNOWN, 10, END, 5], vocab, oov) == ["L.", "is", "<end>"]


@given(st.lists(st.text("abcd", min_size=1, max_size=2)), st.lists(st.text("abcd", min_size=1, max_size=2)))
def test_a_source_comes_back_and_so_does_a_target_made_of_it(source, others):
    vocab = Words.of([others])
    ids, oov = extend_ids(source, vocab)
    assert extended_words(ids, vocab, oov) == source and extend_target_ids(source, vocab, oov) == ids
    assert len(set(oov)) == len(oov) and not set(oov) & set(others)
    assert [number if number < len(vocab) else UNKNOWN for number in ids] == vocab.encode_words(source)
    with pytest.raises(ValueError, match=f"there is no id {len(vocab) + len(oov)}"):
        extended_words([len(vocab) + len(oov)], vocab, oov)
