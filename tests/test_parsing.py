"""Parsing as a sequence: trees and brackets, bracket F1 as evalb has it, and answers that are always trees."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.data.bracket_score import bracket_score, counted
from regard.data.locate import find
from regard.data.text_files import DataError, read_lines
from regard.data.tree_floors import branching_labels, branching_scores
from regard.data.treebank import (
    Constituent,
    brackets,
    constituents,
    parse_tree,
    plain_label,
    read_gum,
    right_branching,
    tree_of,
    words_of_tree,
    write_tree,
)
from regard.decoding import Constraints, beam, generate
from regard.decoding.bracket_grammar import CLOSES, NAMES_WORD, NEITHER, OPENS, BracketGrammar
from regard.tasks import config, make_task
from regard.training.checkpoints import load_run, put_weights
from regard.training.fit import fit

CAT = "(ROOT (S (NP-SBJ (DT The) (NN cat)) (VP (VBZ sees) (NP (PRP it))) (. .)))"
TREES = [
    CAT,
    "(ROOT (NP (NN Introduction)))",
    "(ROOT (S (NP-SBJ (PRP I)) (VP (VBP give) (PRT (RP up))) (, ,) (ADVP (RB too))))",
    "(ROOT (FRAG (-LRB- -LRB-) (NP (NNS cats)) (-RRB- -RRB-)))",
]


def words(tree):
    return [leaf.word for leaf in words_of_tree(tree)]


@pytest.mark.parametrize("text", TREES)
def test_a_tree_is_the_same_after_text_and_after_brackets(text):
    tree = parse_tree(text)
    assert write_tree(tree) == text and tree_of(brackets(tree), words(tree)) == tree


def test_every_tree_of_the_treebank_is_the_same_after_text_and_brackets():
    if not os.environ.get("REGARD_DATA"):
        pytest.skip("gum is not here: REGARD_DATA is not set")
    try:
        folder = find("gum")
    except DataError as error:
        pytest.skip(str(error))
    texts = [line.split("\t")[1] for line in read_lines(folder / "dev.tsv.xz")]
    for text in texts:
        tree = parse_tree(text)
        assert write_tree(tree) == text and tree_of(brackets(tree), words(tree)) == tree


def test_brackets_are_the_steps_through_a_tree():
    tree = parse_tree(CAT)
    assert " ".join(brackets(tree)) == "(ROOT (S (NP-SBJ DT NN ) (VP VBZ (NP PRP ) ) . ) )"
    assert constituents(tree)[1:3] == [Constituent("S", 0, 5), Constituent("NP-SBJ", 0, 2)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no bracket"),
        ("(S (NN a)", "1 brackets are not closed"),
        ("(S (NN a)))", "behind the end"),
        ("(S ())", "without a label"),
        ("(S )", "S is empty"),
        ("(S (NN a b))", "and more"),
        ("(NN a)", "in no constituent"),
        ("word", "outside of all brackets"),
    ],
)
def test_what_is_no_tree_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_tree(text)


@pytest.mark.parametrize(
    ("sequence", "sentence"),
    [
        ("(S NN ) )", "behind the end"),
        ("NN", "outside"),
        ("(S NN", "ends before"),
        ("(S ) NN", "empty"),
        ("(S NN NN )", "more than the 1 words"),
    ],
)
def test_brackets_that_are_no_tree_are_refused(sequence, sentence):
    with pytest.raises(ValueError, match=sentence):
        tree_of(sequence.split(), ["a"])


def test_a_bad_line_of_the_treebank_is_named(tmp_path):
    for part, text in (("train", f"doc\t{CAT}\n"), ("dev", f"doc\t{CAT}\n"), ("test", "doc\t(S\n")):
        (tmp_path / f"{part}.tsv").write_text(text)
    with pytest.raises(DataError, match=r"test\.tsv, line 1: not a tree in Penn brackets: 1 brackets"):
        read_gum(tmp_path)
    (tmp_path / "test.tsv").write_text(CAT)
    with pytest.raises(DataError, match="1 columns instead of 2"):
        read_gum(tmp_path)
    (tmp_path / "test.tsv").write_text("")
    with pytest.raises(DataError, match=r"test\.tsv has no trees"):
        read_gum(tmp_path)


def scored(answer, reference):
    return bracket_score([parse_tree(answer)], [parse_tree(reference)])


def test_f1_of_hand_cases():
    assert scored(CAT, CAT)[:4] == (100, 100, 100, 100)
    flat = "(ROOT (S (NP (DT The) (NN cat)) (VBZ sees) (PRP it) (. .)))"
    found = scored(flat, CAT)  # S and NP of S, NP, VP, NP
    assert (found.precision, found.recall) == (100, 50) and found.f1 == pytest.approx(200 / 3) and found.complete == 0
    assert scored("(ROOT (S (S (DT The) (NN cat)) (VP (VBZ sees) (NP (PRP it))) (. .)))", CAT).f1 == 75  # a wrong label


def test_punctuation_functions_and_the_outermost_label_do_not_count():
    inside = "(TOP (S (NP (DT The) (NN cat)) (VP (VBZ sees) (NP (PRP it)) (. .))))"
    assert scored(inside, CAT).f1 == 100  # where a full stop is attached makes no difference
    alone = "(ROOT (S (NP-SBJ (DT The) (NN cat)) (VP (VBZ sees) (NP (PRP it))) (PRN (. .))))"
    assert scored(alone, CAT).f1 == 100  # a constituent of punctuation alone is none
    wrong = CAT.replace("(. .)", "(NN .)").replace("DT", "NN")  # the reference decides what is punctuation
    found = scored(wrong, CAT)
    assert found.f1 == 100 and found.tagged == 75
    assert [plain_label(x) for x in ("NP-SBJ", "S-NOM-SBJ", "NP=2", "-LRB-", "NP")] == ["NP", "S", "NP", "-LRB-", "NP"]


def test_equal_constituents_count_as_often_as_they_are_there_and_prt_is_advp():
    once, twice = "(ROOT (NP (NN a)))", "(ROOT (NP (NP (NN a))))"
    assert scored(once, twice)[1:3] == (100, 50) and scored(twice, once)[1:3] == (50, 100)
    assert scored("(ROOT (ADVP (RB up)))", "(ROOT (PRT (RB up)))").f1 == 100
    assert counted(parse_tree(twice), [True])[Constituent("NP", 0, 1)] == 2


def test_scores_are_summed_over_sentences_and_refused_over_other_words():
    one, other = parse_tree("(ROOT (NP (NN a)))"), parse_tree("(ROOT (S (NP (NN a)) (VP (VB b))))")
    wrong = parse_tree("(ROOT (X (NN a)))")
    assert bracket_score([wrong, other], [one, other]).f1 == 75
    with pytest.raises(ValueError, match="tree 1 is not over the words"):
        bracket_score([one], [other])
    with pytest.raises(ValueError, match="one at least"):
        bracket_score([], [])


def test_the_floor_branches_to_the_right():
    tree = parse_tree(CAT)
    floor = right_branching(words_of_tree(tree), "VP")
    assert write_tree(floor) == "(ROOT (VP (DT The) (VP (NN cat) (VP (VBZ sees) (VP (PRP it) (. .))))))"
    assert write_tree(right_branching(words_of_tree(tree)[:1], "NP")) == "(ROOT (NP (DT The)))"
    assert bracket_score([floor], [tree]).f1 == 25  # VP over "sees it"


def test_floors_are_scores_of_the_trees_that_branch_to_the_right():
    trees = [parse_tree(text) for text in [*TREES, "(ROOT (S (VP (VB Go) (. .)) (, ,) (PRT (RP on))))", "(ROOT (FRAG (. .)))"]]
    found = branching_scores(trees, ["NP", "VP", "PRT"])
    for label, scores in found.items():
        assert scores == bracket_score([right_branching(words_of_tree(tree), label) for tree in trees], trees)
    assert found["VP"].f1 > 0 and found["NP"].complete > 0 and found["PRT"] != found["NP"]


def test_the_label_of_the_floor_is_the_best_on_train_and_not_the_most_frequent():
    trees = [parse_tree(CAT), parse_tree("(ROOT (VP (VB See) (NP (PRP it))))")]
    assert branching_labels(trees) == ("NP", "VP")  # three NP, one of them at the end of a sentence; two VP, both there
    assert branching_labels([parse_tree("(ROOT (NN a))")]).best == "X"


V, END = 8, 3  # two labels, a bracket that closes, two tags behind the end
KINDS = torch.tensor([NEITHER, OPENS, OPENS, NEITHER, CLOSES, NAMES_WORD, NAMES_WORD, NEITHER])
NAMES = ["?", "(S", "(NP", "?", ")", "NN", "VB", "?"]


class Random:
    """Scores of the next token that are drawn: they favour whatever they like."""

    def __init__(self, seed, favour):
        self.dice, self.favour = torch.Generator().manual_seed(seed), favour

    def extend(self, state, tokens, valid=None):  # noqa: ARG002
        scores = torch.randn(*tokens.shape, V, generator=self.dice)
        scores[..., self.favour] += 4
        return scores, state


class NoState:
    def fan(self, k):  # noqa: ARG002
        return self

    def select(self, rows, within=False):  # noqa: ARG002
        return self


@pytest.mark.parametrize("favour", [1, 3, 4, 5])
@pytest.mark.parametrize("room", [10, 40])
def test_every_answer_is_a_tree_whatever_the_scores_are(favour, room):
    lengths = [1, 3, 7]
    grammar = BracketGrammar(KINDS, torch.tensor(lengths), END, room, chain=3)
    constraints = Constraints(END, max_new_tokens=room, banned=(0, 7), grammar=grammar)
    begin = torch.zeros(3, 1, dtype=torch.long)
    for seed in range(3):
        model = Random(seed, favour)
        found = generate(model, NoState(), begin, constraints=constraints)
        several = beam(model, NoState(), begin, constraints=constraints, width=4, best=4)
        rows = [*zip(found, lengths, strict=True)]
        rows += [(row, n) for many, n in zip(several.answers(END), lengths, strict=True) for row in many]
        assert all(several.answers(END))
        for row, n in rows:
            tree = tree_of([NAMES[token] for token in row], ["w"] * n)
            assert len(words_of_tree(tree)) == n and len(row) < room


def test_the_grammar_allows_every_tree_and_nothing_else():
    """Against `tree_of`: all sequences of up to eight tokens over two words."""
    grammar = BracketGrammar(torch.tensor([NEITHER, OPENS, CLOSES, NAMES_WORD]), torch.tensor([2]), 0, 9, chain=2)
    allowed, level = set(), [()]
    for _ in range(8):
        tokens = torch.tensor(level, dtype=torch.long).reshape(len(level), -1)
        mask = replace(grammar, words=torch.full((len(level),), 2))(tokens).tolist()
        allowed |= {row for row, may in zip(level, mask, strict=True) if may[0]}
        level = [(*row, token) for row, may in zip(level, mask, strict=True) for token in (1, 2, 3) if may[token]]
    allowed |= {row for row in level if row and row.count(1) == row.count(2)}
    names, trees = ["?", "(S", ")", "NN"], set()

    def grow(row):
        if len(row) <= 8:
            try:
                tree_of([names[token] for token in row], ["a", "b"])
                if "1" * 3 not in "".join(map(str, row)):
                    trees.add(row)
            except ValueError:
                for token in (1, 2, 3):
                    grow((*row, token))

    grow(())
    assert allowed == trees and len(trees) > 5


def test_sentences_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="sentences of 0 to 8 words do not fit into answers of 10 tokens"):
        BracketGrammar(KINDS, torch.tensor([8, 0]), END, 10)


@pytest.fixture
def treebank(tmp_path):
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.tsv").write_text("".join(f"doc\t{text}\n" for text in TREES))
    return tmp_path


TINY = {
    "width": 16, "heads": 2, "depth": 1, "decoder_depth": 1, "ffn": 16, "spelling": 8, "min_count": 1, "batch_tokens": 64,
    "warmup": 1, "steps": 6, "validate_every": 3, "save_every": 3, "average": 1, "schedule": "constant", "max_new_tokens": 40,
}  # fmt: skip


def tiny(folder, **changes):
    made = make_task(config("gum").replace({**TINY, **changes}))
    made.read(folder)
    return made


def test_a_run_is_trained_goes_on_exactly_and_answers_with_trees(treebank, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(tiny(treebank), whole, accelerator="cpu", quiet=True)
    fit(tiny(treebank, steps=3), parts, accelerator="cpu", quiet=True)
    fit(tiny(treebank), parts, accelerator="cpu", quiet=True)
    one, other = load_run(whole), load_run(parts)
    assert one.assets == other.assets and all(torch.equal(x, other.weights[name]) for name, x in one.weights.items())
    again = make_task(config("gum").replace(TINY))
    again.restore(one.assets)
    model = again.model()
    put_weights(model, one.weights, whole)
    lines = ["The cat (too) can't see.", "", "Introduction"]
    answers = again.predict(model, lines)
    assert answers[1] == "" and words(parse_tree(answers[0])) == ["The", "cat", "-LRB-", "too", "-RRB-", "ca", "n't", "see", "."]
    with pytest.raises(ValueError, match="line 1 has 50 tokens, but this model reads at most 37"):
        again.predict(model, ["a " * 50])
    shown = again.attention(model, "a cat")
    assert shown.layers and words(parse_tree(shown.answer)) == ["a", "cat"]


@pytest.mark.parametrize("changes", [{"tags": False, "beam": 2}, {"functions": True, "beam": 1}])
def test_settings_of_trees(treebank, changes):
    made = tiny(treebank, **changes)
    scores = made.score(made.model(), "test")
    floor = bracket_score(
        [right_branching(words_of_tree(tree), made.branching) for tree in made.trees["test"]], made.trees["test"]
    )
    assert scores["floor"] == floor.f1 > 0
    assert made.describe_data() == [
        "trees: 4 train, 4 val, 4 test",
        f"floor: trees that branch to the right, {made.branching} everywhere, have an F1 of {floor.f1:.1f} on val "
        f"and {floor.f1:.1f} on test",
    ]
    assert ("tagged" in scores) == made.config.tags and scores["sentences"] == 4
    assert ("(NP-SBJ" in made.symbols.words) == made.config.functions and ("XX" in made.symbols.words) != made.config.tags


def test_weights_of_trees_come_from_their_files(treebank):
    made = tiny(treebank)
    assets = made.assets()
    with pytest.raises(ValueError, match=r"words\.json, characters\.json and symbols\.json hold"):
        made.restore({**assets, "symbols.json": assets["characters.json"]})
    assert Path(treebank / "train.tsv").is_file()
