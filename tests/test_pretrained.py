"""Weights of others: a converted checkpoint scores, continues and decodes as the original does, or is refused in a sentence."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import CASES, DEVICE, HEADS, WIDTH
from regard import pretrained
from regard.decoding import Constraints, beam, generate
from regard.models import Encoder, LanguageModel, Reader, Translator
from regard.pretrained import CheckpointError

VOCAB, PAD, END = 23, 1, 2
SPECIAL = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": END}
GPT2 = {"vocab_size": VOCAB, "n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, **SPECIAL}
BERT = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "type_vocab_size": 3,
    "pad_token_id": PAD,
}
BART = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 40,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "decoder_start_token_id": END,
    "forced_eos_token_id": None,
    **SPECIAL,
}
MARIAN = {**BART, "decoder_start_token_id": PAD}

SPEAKERS = [
    ("GPT2LMHeadModel", GPT2),
    ("GPT2LMHeadModel", {**GPT2, "activation_function": "relu", "n_inner": 11, "layer_norm_epsilon": 1e-3}),
]
READERS = [
    ("BertModel", BERT),
    ("BertForMaskedLM", BERT),
    ("BertForMaskedLM", {**BERT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    ("BertForSequenceClassification", {**BERT, "num_labels": 4}),
    ("BertForTokenClassification", {**BERT, "num_labels": 5}),
]
TRANSLATORS = [
    ("BartForConditionalGeneration", BART),
    ("BartForConditionalGeneration", {**BART, "activation_function": "relu", "scale_embedding": True}),
    ("MarianMTModel", MARIAN),
    ("MarianMTModel", {**MARIAN, "activation_function": "swish", "scale_embedding": True, "d_model": 12}),
    ("MarianMTModel", {**MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 19}),
]


@pytest.fixture(scope="module")
def hf():
    """The library of the originals: slow to import, so only where it is needed, and quiet."""
    library = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.fixture
def make(hf, tmp_path):
    """An original with weights that have opinions, saved in float64, beside what we make of it."""

    def made(name, config, seed=0, mixer=None, ending=0.0, **how):
        torch.manual_seed(seed)
        kind = getattr(hf, name)
        theirs = kind(kind.config_class(**config)).double().eval()
        table = theirs.get_input_embeddings().weight
        with torch.no_grad():
            for at, weight in theirs.named_parameters():
                if weight.requires_grad:
                    calm = any(part in at for part in ("bias", "out_proj", "fc2"))  # or all would say one token for ever
                    weight.normal_(std=0.1 if calm else 1.0 if weight.dim() == 1 else 0.5)
            for at, bias in theirs.named_buffers():
                if at == "final_logits_bias":
                    bias.normal_(std=0.3)
                    bias[:, END] += ending
            if name == "GPT2LMHeadModel":
                theirs.transformer.ln_f.bias += ending * table[END] / table[END].square().sum()
        folder = tmp_path / f"{name}{seed}"
        theirs.save_pretrained(folder, **how)
        return SimpleNamespace(
            theirs=theirs.to(DEVICE), ours=pretrained.load_pretrained(folder, mixer=mixer, device=DEVICE), folder=folder
        )

    return made


def tokens(b, n, vocab=VOCAB):
    return torch.randint(3, vocab, (b, n), device=DEVICE)


def behind(lengths):
    """Real tokens in front, padding behind."""
    return torch.arange(max(lengths), device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]


def same(ours, theirs, valid=None):
    assert ours.dtype == torch.float64
    torch.testing.assert_close(
        ours if valid is None else ours[valid], theirs if valid is None else theirs[valid], rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(("name", "config"), SPEAKERS)
@torch.no_grad()
def test_a_language_model_scores_as_the_original_with_padding_on_either_side_and_token_by_token(make, name, config):
    pair, x = make(name, config), tokens(3, 9)
    assert isinstance(pair.ours, LanguageModel) and not pair.ours.training
    whole = pair.theirs(x).logits
    same(pair.ours(x), whole)
    for valid in (behind([9, 5, 1]), behind([9, 5, 1]).flip(1)):
        places = (valid.long().cumsum(1) - 1).clamp_min(0)  # what their generate does
        same(pair.ours(x, valid), pair.theirs(x, attention_mask=valid.long(), position_ids=places).logits, valid)
    state, past = pair.ours.start(3), None
    for i in range(9):
        one, state = pair.ours.extend(state, x[:, i : i + 1])
        theirs = pair.theirs(x[:, i : i + 1], past_key_values=past, use_cache=True)
        past = theirs.past_key_values
        same(one[:, 0], whole[:, i])
        same(one, theirs.logits)


@pytest.mark.parametrize(("name", "config"), READERS)
@torch.no_grad()
def test_an_encoder_reads_as_the_original_with_padding_and_with_segments(make, name, config):
    pair, x, valid = make(name, config), tokens(3, 8), behind([8, 3, 6])
    segments = torch.randint(3, x.shape, device=DEVICE)
    assert isinstance(pair.ours, Encoder if name == "BertModel" else Reader)

    def ours(x, valid=None):
        y = pair.ours(x, valid)
        return y.x if name == "BertModel" else y

    def theirs(**more):
        y = pair.theirs(x, **more)
        return y.last_hidden_state if name == "BertModel" else y.logits

    per_token = None if "Sequence" in name else valid
    same(ours(x), theirs())
    same(ours(x, valid), theirs(attention_mask=valid.long()), per_token)
    both = theirs(attention_mask=valid.long(), token_type_ids=segments)
    same(ours(torch.stack([x, segments], -1), valid), both, per_token)


@pytest.mark.parametrize(("name", "config"), TRANSLATORS)
@torch.no_grad()
def test_a_translator_scores_as_the_original_with_padding_on_both_sides_and_token_by_token(make, name, config):
    pair, valid = make(name, config), behind([7, 2, 5])
    x, y, said = tokens(3, 7), tokens(3, 6, config.get("decoder_vocab_size", VOCAB)), behind([4, 6, 2])
    assert isinstance(pair.ours, Translator)
    same(pair.ours(x, None, y), pair.theirs(x, decoder_input_ids=y).logits)
    masks = {"attention_mask": valid.long(), "decoder_attention_mask": said.long()}
    same(pair.ours(x, valid, y, said), pair.theirs(x, decoder_input_ids=y, **masks).logits, said)
    whole, state = pair.theirs(x, attention_mask=valid.long(), decoder_input_ids=y).logits, pair.ours.start(x, valid)
    for i in range(6):
        one, state = pair.ours.extend(state, y[:, i : i + 1])
        same(one[:, 0], whole[:, i])


def test_gradients_are_those_of_the_original_and_tied_weights_are_one(make):
    pair, x = make("MarianMTModel", MARIAN), tokens(2, 5)
    ours, theirs = pair.ours, pair.theirs
    assert ours.head.map.weight is ours.embed.table.weight is ours.encoder.embed.table.weight
    ours(x, None, x).log_softmax(-1)[..., 4].sum().backward()
    theirs(x, decoder_input_ids=x).logits.log_softmax(-1)[..., 4].sum().backward()
    real = ours.embed.table.weight.grad, theirs.model.shared.weight.grad
    real = [grad.index_fill(0, torch.tensor([PAD], device=DEVICE), 0) for grad in real]  # theirs does not learn what padding is
    torch.testing.assert_close(*real, rtol=0, atol=1e-9)
    still = {name for name, weight in ours.named_parameters() if not weight.requires_grad}
    assert still == {"head.map.bias", "embed.positions.vectors", "encoder.embed.positions.vectors"}  # no parameters of theirs


@torch.no_grad()
def test_checkpoints_with_more_or_less_than_a_head_are_read_for_what_they_have(make):
    bart, bert, x = make("BartModel", BART), make("BertForPreTraining", BERT), tokens(2, 5)
    theirs = bart.theirs(x, decoder_input_ids=x).last_hidden_state @ bart.theirs.shared.weight.mT
    same(bart.ours(x, None, x), theirs)
    same(bert.ours(x), bert.theirs(x).prediction_logits)


def test_what_is_dropped_in_training_is_what_the_configuration_says(make):
    drops = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    ours = make("BartForConditionalGeneration", {**BART, **drops}).ours
    for embed, stack in ((ours.encoder.embed, ours.encoder.stack), (ours.embed, ours.decoder)):
        assert embed.drop.p == 0.1
        assert {(b.drop.p, b.mixer.dims.dropout, b.channel.drop.p) for b in stack} == {(0.1, 0.2, 0.3)}
    drops = {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3}
    ours = make("GPT2LMHeadModel", {**GPT2, **drops}).ours
    assert ours.embed.drop.p == 0.1
    assert {(b.drop.p, b.mixer.dims.dropout, b.channel.drop.p) for b in ours.stack} == {(0.3, 0.2, 0.0)}


def test_positions_end_where_the_original_ends(make):
    pair = make("GPT2LMHeadModel", GPT2)
    with pytest.raises(ValueError, match="only 40 positions were learned"):
        pair.ours(tokens(1, 41))


# decoding

SEEDS = range(3)


def cut(rows, prompt):
    """What was said behind the prompt, without its end."""
    said = [row[prompt:] for row in rows.tolist()]
    return [row[: row.index(END)] if END in row else row for row in said]


@pytest.fixture(params=["GPT2LMHeadModel", "BartForConditionalGeneration", "MarianMTModel"])
def asked(request, make):
    """A model and a batch with padding, as both sides want it: (pair, what theirs takes, the state and prompt ours takes)."""

    def ask(seed):
        name = request.param
        pair = make(name, {"GPT2LMHeadModel": GPT2, "MarianMTModel": MARIAN}.get(name, BART), seed, ending=seed / 2)
        x, valid = tokens(4, 6), behind([6, 3, 5, 1])
        if name == "GPT2LMHeadModel":
            valid = valid.flip(1)  # theirs wants it in front
            begin = {"state": pair.ours.start(4), "prompt": x, "valid": valid}
        else:
            first = torch.full((4, 1), pretrained.special_ids(pair.folder).begin, device=DEVICE)
            begin = {"state": pair.ours.start(x, valid), "prompt": first}
        x = x.masked_fill(~valid, PAD)
        return pair, {"input_ids": x, "attention_mask": valid.long(), "do_sample": False}, begin

    return ask


@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_greedy_says_what_generate_says(asked, seed):
    pair, theirs, ours = asked(seed)
    constraints = Constraints(eos=END, max_new_tokens=12, min_new_tokens=2, banned=(PAD, 5))
    banned = [[token] for token in constraints.banned]
    found = pair.theirs.generate(**theirs, num_beams=1, max_new_tokens=12, min_new_tokens=2, bad_words_ids=banned)
    assert generate(pair.ours, **ours, constraints=constraints) == cut(found, ours["prompt"].shape[1])


@pytest.mark.parametrize("size", [1, 2, 3])
@torch.no_grad()
def test_runs_of_the_prompt_are_not_repeated_where_they_are_counted_as_generate_does(asked, size):
    """Theirs counts the prompt of a language model, and of a decoder that reads an encoder what it begins with."""
    pair, theirs, ours = asked(0)
    constraints, banned = (
        Constraints(eos=END, max_new_tokens=12, no_repeat_ngram_size=size, banned=(PAD,), count_prompt=True),
        [[PAD]],
    )
    length, how = ours["prompt"].shape[1], {"max_new_tokens": 12, "bad_words_ids": banned, "no_repeat_ngram_size": size}
    assert generate(pair.ours, **ours, constraints=constraints) == cut(pair.theirs.generate(**theirs, num_beams=1, **how), length)
    found = pair.theirs.generate(**theirs, num_beams=3, length_penalty=1.0, early_stopping="never", **how)
    best = beam(pair.ours, **ours, constraints=constraints, width=3)
    assert [row[0] for row in best.answers(END)] == cut(found, length)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 0.6, 2.0, -0.5])
@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_all_beams_and_their_scores_are_those_of_generate_where_it_never_stops_too_early(asked, seed, penalty):
    pair, theirs, ours = asked(seed)
    width = 4 + seed % 2
    found = pair.theirs.generate(
        **theirs,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping="never",
        max_new_tokens=10,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = beam(pair.ours, **ours, constraints=Constraints(eos=END, max_new_tokens=10), width=width, penalty=penalty, best=width)
    assert [answer for row in beams.answers(END) for answer in row] == cut(found.sequences, ours["prompt"].shape[1])
    torch.testing.assert_close(beams.scores.flatten().float(), found.sequences_scores, rtol=0, atol=2e-5)


@pytest.mark.parametrize("early", [True, False])
@torch.no_grad()
def test_where_generate_stops_sooner_it_finds_no_better_answer_and_sometimes_a_worse_one(asked, early):
    worse = 0
    for seed in SEEDS:
        pair, theirs, ours = asked(seed)
        scores = {"return_dict_in_generate": True, "output_scores": True}
        how = {"num_beams": 4, "length_penalty": 2.0, "max_new_tokens": 10, "early_stopping": early}
        found = pair.theirs.generate(**theirs, **how, **scores).sequences_scores
        best = beam(pair.ours, **ours, constraints=Constraints(eos=END, max_new_tokens=10), width=4, penalty=2.0).scores[:, 0]
        assert (best >= found - 2e-5).all()
        worse += int((best > found + 2e-5).sum())
    assert worse or not early


# what is in a folder


def rewritten(folder, change):
    """The checkpoint with other tensors: change(tensors) gives the new ones."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def told(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@torch.no_grad()
def test_shards_half_precision_and_devices_are_read_as_they_are(make):
    pair, x = make("GPT2LMHeadModel", GPT2, max_shard_size="8KB"), tokens(2, 5)
    assert not (pair.folder / "model.safetensors").exists() and len(list(pair.folder.glob("*.safetensors"))) > 2
    same(pair.ours(x), pair.theirs(x).logits)
    assert {weight.dtype for weight in pair.ours.parameters()} == {torch.float64}
    small = pretrained.load_pretrained(pair.folder, dtype=torch.bfloat16, device=DEVICE)
    assert {weight.dtype for weight in small.parameters()} == {torch.bfloat16} and small(x).dtype == torch.bfloat16
    next(pair.folder.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002.*which is not in the folder"):
        pretrained.load_pretrained(pair.folder)


@torch.no_grad()
def test_names_of_older_checkpoints_are_understood(make):
    gpt2, bert, x = make("GPT2LMHeadModel", GPT2), make("BertForMaskedLM", BERT), tokens(2, 5)

    def bare(tensors):  # as the first GPT-2 was published: no prefix, masks, and the tied weight twice
        plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.tensor(-1e4)}
        return plain | masks | {"lm_head.weight": plain["wte.weight"].clone()}

    def greek(tensors):  # as the first BERT was
        names = {name: name.replace("LayerNorm.weight", "LayerNorm.gamma") for name in tensors}
        names = {name: new.replace("LayerNorm.bias", "LayerNorm.beta") for name, new in names.items()}
        rest = {"bert.pooler.dense.weight": torch.ones(16, 16), "cls.seq_relationship.bias": torch.ones(2)}
        return {names[name]: tensor for name, tensor in tensors.items()} | rest

    for pair, change in ((gpt2, bare), (bert, greek)):
        rewritten(pair.folder, change)
        same(pretrained.load_pretrained(pair.folder, device=DEVICE)(x), pair.theirs(x).logits)


def test_whatever_does_not_fit_is_named(make):
    def refused(sentence, change):
        rewritten(folder, change)
        with pytest.raises(CheckpointError, match=sentence):
            pretrained.load_pretrained(folder)
        save_file(whole, folder / "model.safetensors")

    folder = make("GPT2LMHeadModel", GPT2).folder
    whole = load_file(folder / "model.safetensors")
    unknown = {"transformer.h.0.adapter.weight": torch.ones(2), "extra": torch.ones(1)}
    refused(r"tensors that the model does not use: extra, h.0.adapter.weight", lambda t: t | unknown)
    refused("has no tensor ln_f.weight", lambda t: {n: x for n, x in t.items() if "ln_f.weight" not in n})
    refused(r"wpe.weight has shape \(39, 16\)", lambda t: t | {"transformer.wpe.weight": torch.ones(39, 16).double()})
    refused("wte.weight and lm_head.weight are one tensor", lambda t: t | {"lm_head.weight": torch.ones(VOCAB, 16).double()})
    refused("two tensors for ln_f.bias", lambda t: t | {"ln_f.bias": torch.ones(16)})


@pytest.mark.parametrize(
    ("name", "config", "settings", "sentence"),
    [
        ("GPT2LMHeadModel", GPT2, {"architectures": ["GPT2LMHead"]}, "did you mean 'GPT2LMHeadModel'"),
        ("GPT2LMHeadModel", GPT2, {"architectures": None}, "cannot read the architecture 'nothing': there is BertModel, "),
        ("GPT2LMHeadModel", GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=False"),
        ("GPT2LMHeadModel", GPT2, {"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ("GPT2LMHeadModel", GPT2, {"activation_function": "mish"}, "'mish' is not supported: regard has relu, gelu,"),
        ("GPT2LMHeadModel", GPT2, {"n_head": "4"}, "n_head in config.json must be a positive integer, not '4'"),
        ("GPT2LMHeadModel", GPT2, {"n_layer": 1}, "the model does not use: h.1.attn.c_attn.bias, .*and 4 more"),
        ("GPT2LMHeadModel", GPT2, {"n_layer": 3}, "has no tensor h.2.ln_1.weight"),
        ("BertModel", BERT, {"position_embedding_type": "relative_key"}, "with position_embedding_type='absolute'"),
        ("BertModel", BERT, {"is_decoder": True}, "is_decoder=True is not supported"),
        ("BartForConditionalGeneration", BART, {"normalize_before": True}, "normalize_before=True is not supported"),
        ("MarianMTModel", MARIAN, {"normalize_embedding": True}, "normalize_embedding=True is not supported"),
        ("MarianMTModel", MARIAN, {"encoder_layerdrop": 0.1}, "with encoder_layerdrop=0"),
    ],
)
def test_another_architecture_or_option_is_refused_and_the_sentence_says_what_there_is(make, name, config, settings, sentence):
    folder = make(name, config).folder
    told(folder, **settings)
    with pytest.raises(CheckpointError, match=sentence):
        pretrained.load_pretrained(folder)


def test_a_folder_without_a_checkpoint_gets_a_sentence(tmp_path):
    def refused(sentence):
        with pytest.raises(CheckpointError, match=sentence):
            pretrained.load_pretrained(tmp_path)

    refused("config.json is missing: a checkpoint is a folder with config.json and model.safetensors")
    (tmp_path / "config.json").write_text("{")
    refused("cannot be read as JSON")
    (tmp_path / "config.json").write_text("[]")
    refused("must hold one JSON object, not a list")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **GPT2}))
    refused("has neither model.safetensors nor")
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    refused("convert it to safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused("has no weight_map")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    refused("names ../a.safetensors, which is not in the folder")
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    refused("cannot be read as safetensors")


def test_special_tokens_are_those_of_generation(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [END], "pad_token_id": None}))
    assert pretrained.special_ids(tmp_path) == (0, END, None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 7, "pad_token_id": PAD}))
    assert pretrained.special_ids(tmp_path) == (7, END, PAD)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    with pytest.raises(CheckpointError, match=r"several tokens that end an answer, \[2, 3\]"):
        pretrained.special_ids(tmp_path)


# another mechanism behind the same weights


@torch.no_grad()
def test_every_mechanism_takes_over_the_projections_or_refuses_in_a_sentence(make):
    config = {**BERT, "hidden_size": WIDTH, "num_attention_heads": HEADS, "max_position_embeddings": 128}
    pair, x = make("BertForMaskedLM", config), tokens(2, 8)
    taken, whole = set(), pair.theirs(x).logits
    for case in CASES:
        try:
            ours = pretrained.load_pretrained(pair.folder, mixer=case.spec, device=DEVICE)
        except CheckpointError as error:
            assert "cannot take over the weights of attention" in str(error)
            continue
        taken.add(case.row.name)
        for block, old in zip(ours.encoder.stack, pair.ours.encoder.stack, strict=True):
            assert block.mixer.name == case.build().name
            for part in ("q", "k", "v", "out"):
                torch.testing.assert_close(getattr(block.mixer, part).state_dict(), getattr(old.mixer, part).state_dict())
        scores = ours(x)
        assert scores.shape == whole.shape and scores.isfinite().all(), case
        if case.row.name == "softmax" and not case.example.options:
            same(scores, whole)
    assert {"softmax", "linear", "performer", "sparse", "reformer"} & taken == {"softmax", "linear", "performer", "sparse"}


@torch.no_grad()
def test_mechanisms_take_turns_and_a_decoder_streams_with_them(make):
    pair = make("BartForConditionalGeneration", BART, mixer=["linear", "softmax"])
    assert [block.mixer.name for block in pair.ours.decoder] == ["linear", "softmax", "linear"]
    assert [block.cross.name for block in pair.ours.decoder] == ["softmax"] * 3
    x, y, valid = tokens(2, 6), tokens(2, 5), behind([6, 4])
    whole, state = pair.ours(x, valid, y), pair.ours.start(x, valid)
    same(pair.ours.extend(state, y)[0], whole)
    assert not torch.allclose(whole, pair.theirs(x, attention_mask=valid.long(), decoder_input_ids=y).logits)
    with pytest.raises(CheckpointError, match="fnet cannot take over the weights of attention"):
        pretrained.load_pretrained(make("BertModel", BERT).folder, mixer="fnet")
    with pytest.raises(ValueError, match="causal"):
        pretrained.load_pretrained(pair.folder, mixer="nystrom")
