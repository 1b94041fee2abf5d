"""Tasks: what is made learns, what is kept comes back, what is wrong is said."""

import os
import re
from functools import cache
from importlib.util import find_spec
from itertools import islice

import pytest
import torch
from typer import Exit

from regard.blocks.stack import Stack
from regard.cli.model_check import check_model
from regard.cli.settings import check_used
from regard.data import synthetic
from regard.data.batch import BEGIN, END, PAD
from regard.data.locate import find
from regard.data.text_files import Pair, read_lines
from regard.models.nat import COPIES
from regard.tasks import TASKS, Entry, config, make_task
from regard.tasks.decoder_options import SLOT_INPUTS
from regard.tasks.run_settings import decoding
from regard.tasks.support import in_order
from regard.tasks.tagging import TaggingTask
from regard.tasks.task import ENCODER_DECODER, Body
from regard.training.checkpoints import load_run, put_weights
from regard.training.decoder_modes import SAMPLED
from regard.training.fit import fit
from regard.training.scheduled_sampling import PredictedInputs

HERE = {name: entry for name, entry in TASKS.items() if not entry.package or find_spec(entry.package)}
MADE = [name for name, entry in HERE.items() if entry.data is None and not entry.file and name != "detect"]  # test_detection.py
ELSEWHERE = ("an4", "fsdd", "tts", "cifar10", "cifar10_colour")  # data that tests of speech and images have
REAL = [name for name, entry in HERE.items() if entry.data not in (None, *ELSEWHERE)]
TINY = {
    "width": 16,
    "heads": 2,
    "depth": 1,
    "ffn": 32,
    "steps": 6,
    "validate_every": 6,
    "save_every": 6,
    "batch_tokens": 512,
    "warmup": 2,
}


@pytest.fixture(autouse=True, scope="module")
def _made_once():
    """Made data sets are the same lists every time: two seconds for the numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("number_words_pairs", "string_pairs", "tagging_sentences", "opinion_sentences"):
            patch.setattr(synthetic, name, cache(getattr(synthetic, name)))
        yield


def tiny(name, **changes):
    """A small one, with little to validate on."""
    made = make_task(config(name).replace({**TINY, **changes}))
    made.read()
    made.splits = {split: rows[: 400 if split == "train" else 12] for split, rows in made.splits.items()}
    for texts in (getattr(made, "texts", {}),):
        texts.update({split: rows[:12] for split, rows in texts.items() if split != "train"})
    return made


@pytest.mark.parametrize("name", MADE)
def test_a_made_task_trains_and_a_run_answers_as_its_model_did(name, tmp_path):
    made = tiny(name)
    result = fit(made, tmp_path, accelerator="cpu", quiet=True)
    assert result.steps == 6 and result.name == made.best[0]
    kept = load_run(tmp_path)
    again = make_task(config(name).replace({key: value for key, value in kept.config.items() if key != "task"}))
    again.restore(kept.assets)
    models = [made.model(), again.model()]
    for model in models:
        put_weights(model, kept.weights, tmp_path)
    own = {"communities": ["12", "", "cites 3 words 5"], "motifs": ["CCO", "", "c1ccccc1N"], "tones": ["bad face", "", "a"]}
    own |= {"sorting": ["0.3 0.1 0.2", "", "1 0"], "hull": ["0,0 1,0 0.5,0.2 0,1", "", "0.1,0.9"]}
    lines = own.get(name, ["a b c", "", "they saw the duck", "😀 twenty-one", "<end>"])
    first, second = (which.predict(model.eval(), lines) for which, model in zip((made, again), models, strict=True))
    assert first == second and len(first) == len(lines) and first[1] == ""


@pytest.mark.parametrize("name", MADE)
def test_the_loss_of_a_task_is_a_sum_over_what_it_counts_and_batches_do_not_matter(name):
    made = tiny(name, dropout=0.0)
    drawn = {key: 0.0 for key in ("forget", "prenet_dropout") if hasattr(made.config, key)}
    if drawn:
        made = tiny(name, dropout=0.0, **drawn)
    torch.manual_seed(0)
    model = made.model().double()
    rows = made.splits["train"][:6]
    whole = made.loss(model, made.batch(rows), 1)
    parts = [made.loss(model, made.batch([row]), 1) for row in rows]
    torch.testing.assert_close(whole.total, sum(part.total for part in parts), rtol=1e-9, atol=1e-9)
    assert int(whole.over) == sum(int(part.over) for part in parts)


def test_scores_have_the_one_that_chooses():
    for name in MADE:
        made = tiny(name, max_new_tokens=4) if hasattr(config(name), "max_new_tokens") else tiny(name)
        model = made.model()
        assert made.best[0] in made.watch(model) and made.best[0] in made.score(model, "test"), name


@pytest.mark.parametrize("mode", ["scheduled", "two_pass", "parallel"])
def test_what_a_decoder_gets_of_itself_is_a_setting(mode):
    """The soft mixes of embeddings, with or without gradients through them, are those of `regard.training.scheduled_sampling`."""
    settings = {"steps": 4, "dropout": 0.0}
    made = tiny("reverse", **settings, mode=f"{mode}(floor=0, inputs='softmax', alpha=2, through=True)")
    torch.manual_seed(0)
    model, batch = made.model().double(), made.batch(made.splits["train"][:3])

    def loss(task, step=4):
        torch.manual_seed(1)
        return task.loss(model, batch, step).total

    torch.manual_seed(1)
    soft = SAMPLED[mode](model, batch, 0.0, inputs=PredictedInputs("softmax", alpha=2.0, through=True)).total
    torch.testing.assert_close(loss(made), soft, rtol=0, atol=0)

    def other(options=""):
        text = f"{mode}(floor=0{options})"
        return loss(make_task(config("reverse").replace({**TINY, **settings, "mode": text})))

    others = [other(options) for options in ("", ", inputs='softmax'", ", inputs='gumbel'", ", inputs='sample'")]
    assert len({x.item() for x in (soft, *others)}) == 5
    table = model.embed.table.weight
    plain, through = (torch.autograd.grad(other(f", inputs='softmax', through={x}"), table)[0] for x in (False, True))
    assert not torch.allclose(plain, through)


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'reverse'"):
        config("revers")


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("reverse", {"units": "letters"}, "units cannot be 'letters'"),
        ("reverse", {"decoder": "ctcc"}, "did you mean 'ctc'"),
        ("reverse", {"mode": "teacher_forced"}, "did you mean 'teacher_forcing'"),
        ("reverse", {"mode": "free_running", "decoder": "ctc"}, "is for a decoder that is fed its own tokens"),
        ("reverse", {"mode": "scheduled(schedule='linaer')"}, "did you mean 'linear'"),
        ("polarity", {"cut": 2}, "cut must be an integer of at least 3"),
        ("polarity", {"forget": 1.5}, r"forget must be in \[0, 1\)"),
        ("saw", {"letters": 1}, "letters must be an integer of at least 2"),
        ("shakespeare", {"window": 4096}, "window must be from 1 to max_len=2048"),
        ("shakespeare", {"stride": 0}, "stride must be"),
        ("wikisql", {"copy": False, "pointers": 2}, "with copy=false there is none"),
        ("polarity", {"pool": "men"}, "did you mean 'mean'"),
        ("polarity", {"units": "letter"}, "units cannot be 'letter'"),
    ],
)
def test_a_bad_setting_is_refused_before_there_is_data(name, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_task(config(name).replace(changes))


def test_a_line_that_is_too_long_is_named():
    made = tiny("reverse", max_len=32)
    with pytest.raises(ValueError, match="line 2 has 50,000 tokens, but this model reads at most 32"):
        made.predict(made.model(), ["a b", "a " * 50_000])


def test_what_is_longer_than_the_model_is_neither_learned_nor_asked():
    made = make_task(config("reverse").replace({**TINY, "max_len": 8, "max_new_tokens": 50}))
    with pytest.warns(UserWarning, match="of 10,000 training examples teach nothing: they are longer than max_len=8"):
        made.read()
    assert max(map(made.size, made.splits["train"])) <= 8 < max(map(made.size, made.splits["val"]))
    scores = made.watch(made.model())
    assert scores["exact"] >= 0 and made.answers(made.model(), [[5] * 9, [5] * 3])[0] == []
    tags = make_task(config("saw").replace({**TINY, "max_len": 8}))
    with pytest.warns(UserWarning, match="of 5,000 training examples teach nothing"):
        tags.read()
    assert max(map(tags.size, tags.splits["train"])) <= 8


def test_what_a_teacher_did_not_say_is_not_learned(tmp_path):
    (tmp_path / "taught").write_text("a b\n" + "\n" * 9_999)
    made = make_task(config("copy").replace({**TINY, "decoder": "ctc", "distilled": str(tmp_path / "taught")}))
    made.read()
    assert len(made.splits["train"]) == 1


def test_only_settings_that_a_task_reads_may_change_its_answers():
    assert decoding(config("reverse"), {"beam": "3"}).beam == 3
    with pytest.raises(ValueError, match="beam cannot change after training: nothing of it can"):
        decoding(config("polarity"), {"beam": "3"})
    with pytest.raises(ValueError, match="beam cannot change after training: only decoder can"):
        decoding(config("copy").replace({"decoder": "masked"}), {"beam": "3"})


def test_options_of_a_decoder_change_after_training_unless_its_weights_depend_on_them():
    masked, length = (config("copy").replace({"decoder": text}) for text in ("masked(lengths=2)", "length(slots='uniform')"))
    assert decoding(masked, {"decoder": "masked(iterations=9)"}).decoder == "masked(iterations=9, lengths=4)"
    assert decoding(length, {"decoder": "length(slots='uniform', lengths=1)"}).options("decoder").lengths == 1
    with pytest.raises(ValueError, match="decoder=masked cannot become ctc after training: only iterations, lengths can change"):
        decoding(masked, {"decoder": "ctc"})
    with pytest.raises(ValueError, match="slots of length cannot change after training, only lengths can: write slots='uniform'"):
        decoding(length, {"decoder": "length(lengths=1)"})
    with pytest.raises(ValueError, match="decoder cannot change after training: only beam, length_penalty, max_new_tokens can"):
        decoding(config("copy"), {"decoder": "ctc"})


@pytest.mark.parametrize("name", TASKS)
def test_the_table_has_the_score_of_the_task(name):
    assert make_task(config(name)).best == TASKS[name].best


@pytest.mark.parametrize(
    ("name", "changes"), [*((name, {}) for name in MADE), ("copy", {"decoder": "ctc"}), ("copy", {"decoder": "fixed"})]
)
def test_the_bodies_of_a_task_are_those_of_its_model(name, changes):
    made = tiny(name, **changes)
    stacks = [module for module in made.model().modules() if isinstance(module, Stack)]
    found = [Body(stack.blocks[0].mixer.dims.causal, stack.blocks[0].cross is not None) for stack in stacks]
    assert tuple(found) == made.bodies


def test_a_new_task_with_a_decoder_describes_itself(monkeypatch):
    """Nothing but its attributes and a row of the table: settings of decoders and beams are accepted, all others refused."""

    class Captions(TaggingTask):
        bodies = ENCODER_DECODER
        answering = ("beam",)

    monkeypatch.setitem(TASKS, "saw", Entry(TASKS["saw"].config, Captions, TASKS["saw"].best, "captions"))
    made = make_task(config("saw"))
    check_used(made, ["cross=linear", "wiring=each", "decoder_depth=1", "beam=3"])
    assert decoding(config("saw"), {"beam": "3"}).beam == 3
    with pytest.raises(ValueError, match="length_penalty does nothing here: it is for answers of one token after another"):
        check_used(made, ["length_penalty=2"])
    with pytest.raises(Exit):  # its cross attention is built and refused, as for every decoder
        check_model(make_task(config("saw").replace({"cross": "conv"})))


def test_slots_of_a_length_are_those_of_the_model():
    assert SLOT_INPUTS == COPIES


def test_training_texts_come_in_eight_spellings_where_subwords_waver(monkeypatch):
    monkeypatch.setattr(
        "regard.data.synthetic.string_pairs", lambda _: ([Pair("a b a b", "b a b a")] * 3, [Pair("a b", "b a")], [])
    )
    settings = config("reverse").replace({"units": "subwords", "vocab": 300, "bpe_dropout": 0.5})
    made, plain = make_task(settings), make_task(settings.replace({"bpe_dropout": 0.0}))
    made.read()
    plain.read()
    assert len(made.splits["train"]) == 8 * len(plain.splits["train"]) == 24
    assert made.splits["val"] == plain.splits["val"]
    spelled = {tuple(target) for _, target in made.splits["train"]}
    assert len(spelled) > 1 and {made.vocabulary.decode(target) for target in spelled} == {"b a b a"}
    assert all(target[-1] == END for target in spelled)


def test_a_teachers_answers_must_be_as_many_as_the_sources(tmp_path):
    (tmp_path / "taught").write_text("a\nb\n")
    made = make_task(config("copy").replace({**TINY, "decoder": "ctc", "distilled": str(tmp_path / "taught")}))
    with pytest.raises(ValueError, match="has 2 lines, but there are 10,000 training sources"):
        made.read()


def test_a_run_can_begin_from_another(tmp_path):
    first = tiny("copy")
    fit(first, tmp_path / "first", accelerator="cpu", quiet=True)
    then = tiny("copy", init_from=str(tmp_path / "first"), mode="two_pass")
    model = then.model()
    weights = load_run(tmp_path / "first").weights
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items() if name in weights)


def test_a_run_that_has_begun_does_not_need_the_one_it_began_from(tmp_path):
    def train(folder, **changes):
        often = {"init_from": str(tmp_path / "first"), "save_every": 2, "validate_every": 2, "schedule": "constant"}
        made = make_task(config("copy").replace({**TINY, **often, **changes}))
        made.go_on(tmp_path / folder)
        made.read()
        fit(made, tmp_path / folder, accelerator="cpu", quiet=True)
        return load_run(tmp_path / folder).weights

    fit(tiny("copy"), tmp_path / "first", accelerator="cpu", quiet=True)
    whole, _ = train("whole", steps=4), train("parts", steps=2)
    (tmp_path / "first").rename(tmp_path / "gone")
    parts = train("parts", steps=4)
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    with pytest.raises(ValueError, match="holds no run"):
        train("new")


def test_paths_of_runs_and_answers_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = config("copy").set(["init_from=first", "distilled=taught"])
    assert (made.init_from, made.distilled) == (str(tmp_path / "first"), str(tmp_path / "taught"))


def test_who_says_everything_at_once_can_begin_from_who_does_not(tmp_path):
    fit(tiny("copy"), tmp_path / "first", accelerator="cpu", quiet=True)
    weights = load_run(tmp_path / "first").weights
    for decoder, own in (("ctc", {"slots.split.weight", "slots.split.bias"}), ("fixed", {"slots.vectors"})):
        model = tiny("copy", init_from=str(tmp_path / "first"), decoder=decoder).model()
        state = model.state_dict()
        assert all(torch.equal(state[name], x) for name, x in weights.items())
        assert {name for name, _ in model.named_parameters()} - weights.keys() == own
    again = tiny("copy", init_from=str(tmp_path / "first"), decoder="ctc", mode="rdrop", steps=2, save_every=2, validate_every=2)
    assert fit(again, tmp_path / "second", accelerator="cpu", quiet=True).steps == 2
    third = tiny("copy", init_from=str(tmp_path / "second"), decoder="ctc").model().state_dict()
    assert all(torch.equal(third[name], x) for name, x in load_run(tmp_path / "second").weights.items())


@pytest.mark.parametrize(
    "mode", ["free_running", "scheduled", "two_pass", "parallel", "self_critical", "minimum_risk(samples=2)"]
)
def test_every_mode_trains(mode, tmp_path):
    made = tiny("copy", mode=mode, steps=2, validate_every=2, save_every=2, batch_tokens=128, max_new_tokens=8)
    assert fit(made, tmp_path, accelerator="cpu", quiet=True).steps == 2


def test_batches_of_captured_passes_have_few_lengths_and_always_a_mask():
    made = tiny("reverse", graphs=True)
    found = [made.batch(made.splits["train"][i : i + 3]) for i in range(0, 60, 3)]
    assert all(batch.source.shape[1] % 8 == 0 == batch.target.shape[1] % 8 for batch in found)
    assert all(batch.source_valid is not None and batch.target_valid is not None for batch in found)
    assert all((batch.target[batch.target_valid] != PAD).all() for batch in found)
    assert all(int((batch.target == END).sum()) == len(batch.target) for batch in found)


def shorten(folder, into, most=300):
    """A copy of a data set with the first and the last lines or sentences of every file, of JSON the first entries."""
    into.mkdir()
    for path in folder.iterdir():
        name = re.sub(r"\.(xz|gz|bz2)$", "", path.name)
        if name.endswith(".npz"):  # one graph, which has no lines
            (into / name).write_bytes(path.read_bytes())
            continue
        if name.endswith(".json"):  # indented, an entry ends in a line of its own
            first = "\n".join(islice(read_lines(path), 40 * most))
            text = first[: first.rindex("\n    },")] + "\n    }\n]"
        else:
            between = "\n\n" if name.endswith(".conllu") else "\n"
            parts = "".join(f"{line}\n" for line in read_lines(path)).split(between)
            text = between.join(parts if len(parts) <= 2 * most else parts[:most] + parts[-most:])
        (into / name).write_text(text)


def test_answers_come_back_in_order():
    rows = [list(range(n)) for n in (3, 1, 7, 0, 5)]
    calls = []
    assert in_order(rows, len, 8, lambda part: [calls.append(len(part)) or sum(row) for row in part]) == [3, 0, 21, 0, 10]
    assert max(calls) <= 8


@pytest.mark.skipif(
    "REGARD_DATA" not in os.environ, reason="set REGARD_DATA to the folder that has multi30k/, imdb/ and the others"
)
@pytest.mark.parametrize("name", REAL)
def test_a_real_task_reads_its_data_and_learns_from_it(name, tmp_path, monkeypatch):
    """From the beginning and the end of every file; test_data.py reads all of them."""
    monkeypatch.setattr("regard.data.datasets.HELD_OUT", 40)
    shorten(find(TASKS[name].data), tmp_path / TASKS[name].data)
    small = {"width": 16, "heads": 2, "depth": 1, "ffn": 16}
    made = make_task(config(name).replace({**small, "units": "words"} if name == "imdb" else small))
    made.read(tmp_path)
    model = made.model()
    batch = made.batch(sorted(made.splits["train"], key=made.size)[:2])
    loss = made.loss(model, batch, 1)
    loss.mean.backward()
    assert torch.isfinite(loss.total) and any(p.grad is not None for p in model.parameters())
    kept = make_task(made.config)
    kept.restore(made.assets())
    assert [p.shape for p in kept.model().parameters()] == [p.shape for p in model.parameters()]


def test_ctc_says_which_targets_have_too_few_slots():
    from regard.tasks.init_from import check_slots

    fits, long, twice = ([5, 6], [7, 8, END]), ([5], [7, 8, 9, END]), ([5], [7, 7, END])
    check_slots([fits, twice], 3)
    with pytest.warns(UserWarning, match="2 of 3 training examples teach nothing: they need more than upsample=2 slots"):
        check_slots([fits, long, twice], 2)
    with pytest.raises(ValueError, match="no training target fits"):
        check_slots([long], 1)


@pytest.mark.parametrize("name", ["reverse", "saw"])
def test_a_model_that_is_too_short_for_everything_says_so(name):
    made = make_task(config(name).replace({**TINY, "max_len": 1}))
    with pytest.raises(ValueError, match="all training examples are longer than max_len=1: the shortest has"):
        made.read()


def test_a_review_is_cut_to_what_the_model_can_read():
    made = make_task(config("polarity").replace({**TINY, "max_len": 5, "positions": "learned"}))
    made.read()
    assert max(made.size(row) for row in made.splits["train"]) <= 5
    assert made.predict(made.model().eval(), ["a very long review of a film that nobody saw"])[0] in ("good", "bad")


def test_a_review_that_is_too_long_keeps_its_first_and_its_last_words():
    made = make_task(config("polarity").replace({**TINY, "cut": 5}))
    made.read()
    words = made.vocabulary.words[:9]
    (row,) = made._rows([" ".join(words)])
    assert row == [BEGIN, *made.vocabulary.encode(" ".join(words[:2] + words[-2:]))]


def talkative(folder, **changes):
    """A language model of a small text, 90 characters to learn from and 10 to validate on."""
    (folder / "tinyshakespeare").mkdir(parents=True)
    (folder / "tinyshakespeare" / "input.txt").write_text("to be, or not to be: " * 4 + "that is the qu10 letters")
    made = make_task(
        config("shakespeare").replace({**TINY, "window": 4, "stride": 3, "max_new_tokens": 7, "dropout": 0.0, **changes})
    )
    made.read(folder)
    return made


def test_a_language_model_learns_every_next_character_and_is_scored_on_each_once(tmp_path):
    made = talkative(tmp_path)
    text, held = made.texts["train"].tolist(), made.texts["val"]
    batch = made.batch(made.splits["train"])
    assert batch.source.tolist() == [text[at : at + 4] for at in range(0, len(text) - 4, 3)]
    assert batch.target.tolist() == [text[at + 1 : at + 5] for at in range(0, len(text) - 4, 3)]
    model = made.model().eval()
    with torch.no_grad():
        lost = [made.loss(model, made.batch([example]), 1).parts["nll"].item() for example in made.splits["val"]]
    assert [at for _, at in made.splits["val"]] == list(range(0, len(held) - 1, 4))
    assert made.score(model, "val")["loss"] == pytest.approx(sum(lost) / (len(held) - 1))


def test_a_text_goes_on_with_its_own_characters_and_the_same_ones_again(tmp_path):
    made = talkative(tmp_path, temperature=5.0)
    model = made.model()
    first = made.predict(model, ["to be", ""])
    assert first == made.predict(model, ["to be", ""]) and first[0].startswith("to be")
    assert all(len(said) - len(line) <= 7 for said, line in zip(first, ["to be", ""], strict=True))
    assert model.training  # as it was


def test_special_tokens_are_not_said():
    made = tiny("reverse", max_new_tokens=6)
    model = made.model().eval()
    with torch.no_grad():
        model.head.map.weight.mul_(0)
    assert all(token >= 5 for beams in (1, 3) for row in made.answers(model, [[7, 8, 9]], beams=beams) for token in row)
    assert made.answers(model, [[], [7, 8]])[0] == []  # nothing is said to nothing
