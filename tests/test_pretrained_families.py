"""Weights of more families, in and out: equal outputs, and a folder that transformers reads as its own."""

import importlib
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from conftest import DEVICE
from regard import pretrained
from regard.decoding import Constraints, generate
from regard.models import Translator
from regard.pretrained import FAMILIES, CheckpointError
from regard.runtime.fast_decoder import fast_decoder

VOCAB, PAD = 23, 1
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
}
LLAMA = {**SMALL, "num_key_value_heads": 2, "pad_token_id": None}
SCALED = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 12, "n_layer": 2, "n_head": 3}
GPT2 = {"vocab_size": VOCAB, "n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 4}
FLOAT32 = 2e-6  # rotary angles, ALiBi's slopes and Longformer's weights are computed in float32, whatever the type of the model

SPEAKERS = [
    ("GPT2LMHeadModel", GPT2, 1e-9),
    ("LlamaForCausalLM", LLAMA, FLOAT32),
    (
        "LlamaForCausalLM",
        {
            **LLAMA,
            "head_dim": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {**SCALED, "original_max_position_embeddings": 16},
        },
        FLOAT32,
    ),
    ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0}}, FLOAT32),
    ("MistralForCausalLM", {**LLAMA, "sliding_window": 3, "num_key_value_heads": 1}, FLOAT32),
    ("MistralForCausalLM", {**LLAMA, "sliding_window": None}, FLOAT32),
    ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}, FLOAT32),
    ("Qwen2ForCausalLM", {**LLAMA, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}, FLOAT32),
    ("BloomForCausalLM", BLOOM, FLOAT32),
]

FNET = {key: value for key, value in SMALL.items() if key != "num_attention_heads"}
DISTIL = {
    "vocab_size": VOCAB,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": [8, 12]}
VIT |= {"patch_size": 4, "num_labels": 5, "hidden_act": "gelu_new"}
BIGBIRD = {**SMALL, "attention_type": "original_full"}
LONG = {**SMALL, "attention_window": [4, 6]}
NYSTROM = {**SMALL, "conv_kernel_size": 3}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "decoder_start_token_id": 0,
}

READERS = [
    ("BertModel", SMALL),
    ("BertForMaskedLM", SMALL),
    ("BertForSequenceClassification", SMALL),
    ("RobertaModel", SMALL),
    ("RobertaForMaskedLM", {**SMALL, "type_vocab_size": 1, "hidden_act": "relu"}),
    ("RobertaForSequenceClassification", {**SMALL, "num_labels": 3}),
    ("RobertaForTokenClassification", {**SMALL, "num_labels": 3}),
    ("DistilBertModel", DISTIL),
    ("DistilBertForMaskedLM", DISTIL),
    ("DistilBertForSequenceClassification", {**DISTIL, "num_labels": 4, "activation": "relu"}),
    ("DistilBertForTokenClassification", DISTIL),
    ("FNetModel", FNET),
    ("FNetForMaskedLM", FNET),
    ("FNetForSequenceClassification", FNET),
    ("FNetForTokenClassification", {**FNET, "num_labels": 3}),
    ("LongformerModel", LONG),
    ("LongformerForMaskedLM", LONG),
    ("LongformerForSequenceClassification", LONG),
    ("LongformerForTokenClassification", LONG),
    ("T5EncoderModel", T5),
    ("BigBirdModel", {**BIGBIRD, "rescale_embeddings": True}),
    ("BigBirdForMaskedLM", BIGBIRD),
    ("BigBirdForSequenceClassification", BIGBIRD),
    ("BigBirdForTokenClassification", BIGBIRD),
    ("NystromformerModel", NYSTROM),
    ("NystromformerForMaskedLM", NYSTROM),
    ("NystromformerForSequenceClassification", NYSTROM),
    ("NystromformerForTokenClassification", NYSTROM),
]
BART = {"vocab_size": VOCAB, "max_position_embeddings": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1}
BART |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "pad_token_id": PAD, "decoder_start_token_id": PAD}

TRANSLATORS = [
    ("BartForConditionalGeneration", BART, 1e-9),
    ("MarianMTModel", BART, 1e-9),
    ("MarianMTModel", {**BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB}, 1e-9),
    ("T5ForConditionalGeneration", T5, 1e-9),
    ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, 1e-9),
]
IMAGES = [("ViTModel", {**VIT, "qkv_bias": False}), ("ViTForImageClassification", VIT)]
UNPADDED = ("FNet", "Nystrom")  # transformers lets padding act in these


@pytest.fixture(scope="module")
def hf():
    library = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def exactly(model):
    """A model of transformers whose RMS norms are in the type of its weights; its own are in float32."""

    def norm(own, x):
        return own.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + own.variance_epsilon)

    for own in model.modules():
        if hasattr(own, "variance_epsilon"):
            own.forward = partial(norm, own)
    return model.eval().to(DEVICE)


@pytest.fixture
def original(hf, tmp_path):
    """A random original in float64 and its folder; every weight differs from its initial value."""

    def make(name, config, seed=0):
        torch.manual_seed(seed)
        kind = getattr(hf, name)
        theirs = exactly(kind(kind.config_class(**config)).double())
        if not getattr(theirs.config, "scale_decoder_outputs", True):  # T5 1.1 has an output layer of its own
            theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())
        with torch.no_grad():
            for weight in theirs.parameters():
                if weight.requires_grad:  # those of Marian's positions are computed
                    weight += 0.2 * torch.randn_like(weight)
        theirs.save_pretrained(tmp_path / "theirs")
        return theirs, tmp_path / "theirs"

    return make


def tokens(b, n):
    return torch.randint(3, VOCAB, (b, n), device=DEVICE)


def behind(lengths):
    """Real tokens in front, padding behind."""
    return torch.arange(max(lengths), device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]


def same(ours, theirs, tolerance, valid=None):
    ours, theirs = (x if valid is None else x[valid] for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def back_out(hf, ours, folder, name):
    """Write our model beside the original: the same tensors by the same names, and transformers reads it without a complaint."""
    out = folder.with_name("ours")
    pretrained.save_pretrained(ours, out)
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    unneeded = set(before) - set(after)
    assert set(after) <= set(before) and all("pooler" in tensor or "seq_relationship" in tensor for tensor in unneeded), unneeded
    for tensor, value in after.items():
        used = slice(2, None) if "position_embeddings" in tensor or "embed_positions" in tensor else slice(None)
        torch.testing.assert_close(value[used], before[tensor][used], rtol=0, atol=0)
    settings = [json.loads((path / "config.json").read_text()) for path in (folder, out)]
    assert settings[0] == settings[1]
    read, found = getattr(hf, name).from_pretrained(out, output_loading_info=True)
    missing = [tensor for tensor in found["missing_keys"] if "pooler" not in tensor]
    assert not missing and not found["unexpected_keys"] and not found["mismatched_keys"], found
    return exactly(read)


@pytest.mark.parametrize(("name", "config", "tolerance"), SPEAKERS)
@torch.no_grad()
def test_a_language_model_goes_in_and_back_out_with_equal_scores(hf, original, name, config, tolerance):
    (theirs, folder), x = original(name, config), tokens(3, 9)
    ours = pretrained.load_pretrained(folder, device=DEVICE)
    whole = theirs(x).logits
    assert whole.std() > 0.1
    same(ours(x), whole, tolerance)
    for valid in (behind([9, 5, 1]), behind([9, 5, 1]).flip(1)):
        places = {"position_ids": (valid.long().cumsum(1) - 1).clamp_min(0)}
        if "Bloom" in name:  # which counts by its mask, and is NaN with padding in front in float64
            valid, places = behind([9, 5, 1]), {}
        same(ours(x, valid), theirs(x, attention_mask=valid.long(), **places).logits, tolerance, valid)
    state = ours.start(3)
    for part in x.split(2, 1):
        scores, state = ours.extend(state, part)
    same(scores, whole[:, -scores.shape[1] :], tolerance)
    same(back_out(hf, ours, folder, name)(x).logits, whole, 1e-12)


def scores(output):
    """The answer of an original, or of ours: scores where it has a head, vectors where it has none."""
    if isinstance(output, torch.Tensor):
        return output
    return next(getattr(output, at) for at in ("logits", "x", "last_hidden_state") if hasattr(output, at))


@pytest.mark.parametrize(("name", "config"), READERS)
@torch.no_grad()
def test_an_encoder_goes_in_and_back_out_with_equal_outputs(hf, original, name, config):
    (theirs, folder), x = original(name, config), tokens(3, 12)
    ours = pretrained.load_pretrained(folder, device=DEVICE)
    special = {"global_attention_mask": (torch.arange(12, device=DEVICE) == 0).long().expand(3, -1)} if "Longf" in name else {}
    tolerance = FLOAT32 if special else 1e-9
    whole = scores(theirs(x, **special))
    assert whole.std() > 0.1
    same(scores(ours(x)), whole, tolerance)
    if not name.startswith(UNPADDED):
        valid = behind([12, 5, 8])
        padded = scores(theirs(x.masked_fill(~valid, PAD), attention_mask=valid.long(), **special))
        same(scores(ours(x, valid)), padded, tolerance, None if "Sequence" in name else valid)
    same(scores(back_out(hf, ours, folder, name)(x, **special)), whole, 1e-12)


@pytest.mark.parametrize(("name", "config", "tolerance"), TRANSLATORS)
@torch.no_grad()
def test_a_translator_goes_in_and_back_out_with_equal_scores(hf, original, name, config, tolerance):
    (theirs, folder), x, y = original(name, config), tokens(3, 14), tokens(3, 12)
    ours = pretrained.load_pretrained(folder, device=DEVICE)
    whole = theirs(x, decoder_input_ids=y).logits
    assert whole.std() > 0.1
    same(ours(x, None, y), whole, tolerance)
    valid, there = behind([14, 2, 7]), behind([12, 6, 2])
    masks = {"attention_mask": valid.long(), "decoder_attention_mask": there.long()}
    same(ours(x, valid, y, there), theirs(x, decoder_input_ids=y, **masks).logits, tolerance, there)
    state, parts = ours.start(x), []
    for part in y.split(5, 1):
        found, state = ours.extend(state, part)
        parts.append(found)
    same(torch.cat(parts, 1), whole, tolerance)
    same(back_out(hf, ours, folder, name)(x, decoder_input_ids=y).logits, whole, 1e-12)


@torch.no_grad()
def test_an_output_layer_of_its_own_may_be_written_once_with_the_table_that_it_equals(hf, tmp_path):
    """Transformers 5 does so for T5 1.1; what is written here holds both."""
    torch.manual_seed(0)
    config = hf.T5Config(**T5, tie_word_embeddings=False)
    theirs, x = exactly(hf.T5ForConditionalGeneration(config).double()), tokens(2, 6)
    theirs.save_pretrained(tmp_path / "theirs")
    assert "lm_head.weight" not in load_file(tmp_path / "theirs" / "model.safetensors")
    ours = pretrained.load_pretrained(tmp_path / "theirs", device=DEVICE)
    assert ours.head.map.weight is not ours.embed.table.weight
    same(ours(x, None, x), theirs(x, decoder_input_ids=x).logits, 1e-9)
    ours.head.map.weight *= 2
    pretrained.save_pretrained(ours, tmp_path / "ours")
    again = exactly(hf.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours"))
    same(again(x, decoder_input_ids=x).logits, 2 * theirs(x, decoder_input_ids=x).logits, 1e-9)


@pytest.mark.parametrize(("name", "config"), IMAGES)
@torch.no_grad()
def test_an_encoder_of_images_goes_in_and_back_out_with_equal_outputs(hf, original, name, config):
    (theirs, folder), x = original(name, config), torch.randn(2, 3, 8, 12, dtype=torch.float64, device=DEVICE)
    ours = pretrained.load_pretrained(folder, device=DEVICE)
    whole = scores(theirs(x))
    same(scores(ours(x)), whole, 1e-9)
    same(scores(back_out(hf, ours, folder, name)(x)), whole, 1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("ReformerModelWithLMHead", {}, "cannot read ReformerModelWithLMHead: transformers draws its buckets anew in every pass"),
        ("BigBirdModel", {**SMALL, "attention_type": "block_sparse"}, "in place of every random one and counts it again"),
        ("BigBirdModel", SMALL, "has no equal here"),
        ("NystromformerModel", {**NYSTROM, "num_landmarks": 8}, "maximum over the whole batch"),
        ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ("LlamaForCausalLM", {**LLAMA, "rope_scaling": {"type": "linear"}}, "factor in config.json must be a number, not None"),
        (
            "Qwen2ForCausalLM",
            {**LLAMA, "layer_types": ["full_attention"]},
            "must name full_attention or sliding_attention",
        ),
        ("LongformerModel", {**SMALL, "attention_window": [4]}, r"must be a number, or 2 of them, not \[4\]"),
        ("ViTModel", {**VIT, "image_size": 10}, "must be divisible by patch_size=4, not 10"),
    ],
)
def test_what_has_no_equal_here_is_refused_in_a_sentence(name, settings, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        pretrained.build_pretrained({"architectures": [name], **settings})


@torch.no_grad()
def test_another_mechanism_keeps_grouped_heads_and_rotary_positions(original):
    (theirs, folder), x = original("LlamaForCausalLM", LLAMA), tokens(2, 9)
    same(pretrained.load_pretrained(folder, mixer="Local(64)", device=DEVICE)(x), theirs(x).logits, FLOAT32)
    ours = pretrained.load_pretrained(folder, mixer=["Local(3)", "softmax"], device=DEVICE)
    same(ours.extend(ours.start(2), x)[0], ours(x), 1e-9)
    assert [block.mixer.positions.base for block in ours.stack] == [10_000.0] * 2
    with pytest.raises(ValueError, match="linear cannot do rotary"):
        pretrained.load_pretrained(folder, mixer="linear")
    with pytest.raises(CheckpointError, match=r"describe another model: this one has the part stack.blocks.0.mixer sparse"):
        pretrained.save_pretrained(ours, folder.with_name("ours"))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LlamaForCausalLM", LLAMA),
        ("MistralForCausalLM", {**LLAMA, "sliding_window": 3}),
        ("BloomForCausalLM", BLOOM),
        ("T5ForConditionalGeneration", {**T5, "num_decoder_layers": 2}),
    ],
)
@torch.no_grad()
def test_greedy_decoding_says_what_generate_says_and_so_does_a_fast_decoder(original, name, config):
    (theirs, folder), x = original(name, config), tokens(3, 5)
    ours, end = pretrained.load_pretrained(folder, device=DEVICE), 2
    reads = isinstance(ours, Translator)
    how = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": end,
        "pad_token_id": end,
        "attention_mask": torch.ones_like(x),
    }
    found = theirs.generate(x, **how)[:, 1 if reads else 5 :].tolist()
    found = [row[: row.index(end)] if end in row else row for row in found]
    for model in (ours, fast_decoder(ours)):
        begin = torch.zeros(3, 1, dtype=torch.long, device=DEVICE) if reads else x
        state = model.start(x) if reads else model.start(3)
        assert generate(model, state, begin, constraints=Constraints(eos=end, max_new_tokens=12)) == found


def test_settings_of_older_configurations_are_read():
    old = {"architectures": ["LlamaForCausalLM"], **LLAMA}
    for key, value in (
        ("rope_scaling", {"type": "linear", "factor": 3}),
        ("rope_parameters", {"rope_type": "linear", "factor": 3}),
    ):
        made = pretrained.build_pretrained({**old, "rope_theta": 500, key: value}).stack.blocks[0].mixer.positions
        assert (made.base, made.factor, made.trained) == (500, 3, None)
    mistral = {**old, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    assert [block.mixer.name for block in pretrained.build_pretrained(mistral).stack] == ["sparse"] * 2
    qwen = {**mistral, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 1}
    assert [block.mixer.name for block in pretrained.build_pretrained(qwen).stack] == ["softmax"] * 2
    names = [block.mixer.name for block in pretrained.build_pretrained({**qwen, "use_sliding_window": True}).stack]
    assert names == ["softmax", "sparse"]
    bloom = {
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 9,
        "n_embed": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    assert pretrained.build_pretrained(bloom).embed.width == 8


def test_every_architecture_is_compared_with_the_original():
    compared = {name for name, *_ in (*SPEAKERS, *READERS, *TRANSLATORS, *IMAGES)}
    elsewhere = {"BertForPreTraining", "BertForTokenClassification", "BartModel"}  # in test_pretrained
    assert set(FAMILIES) - compared == elsewhere


# what is written


def test_an_own_model_is_built_of_settings_trained_and_read_by_transformers(hf, tmp_path):
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA, "torch_dtype": "bfloat16"}
    torch.manual_seed(0)
    ours, x = pretrained.build_pretrained(settings).to(DEVICE), tokens(4, 9)
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    ours(x[:, :-1]).flatten(0, 1).log_softmax(-1).gather(1, x[:, 1:].reshape(-1, 1)).mean().neg().backward()
    optimizer.step()
    pretrained.save_pretrained(ours.eval(), tmp_path)
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE)
    assert theirs.dtype == torch.float32 and "torch_dtype" not in json.loads((tmp_path / "config.json").read_text())
    with torch.no_grad():
        same(ours(x), theirs(x).logits, 1e-5)


def test_what_settings_do_not_describe_is_not_written(tmp_path):
    settings = {"architectures": ["LlamaForCausalLM"], **LLAMA}

    def refused(sentence, model=None, settings=None, folder=tmp_path / "out"):
        with pytest.raises(CheckpointError, match=sentence):
            pretrained.save_pretrained(model or ours, folder, settings)
        assert not (tmp_path / "out").exists()

    ours = pretrained.build_pretrained(settings)
    refused("was not read from a checkpoint: give the settings", torch.nn.Linear(2, 2))
    refused("has the parameter weight .* where they have embed.table.weight", torch.nn.Linear(2, 2), settings)
    refused(r"has the parameter .*q.weight \(16, 16\) where", settings={**settings, "num_attention_heads": 2, "head_dim": 4})
    refused("part stack.blocks.0.mixer_norm RMSNorm", settings={**settings, "rms_norm_eps": 1e-5})
    refused("part stack.blocks.0.channel FeedForward", settings={**settings, "hidden_act": "gelu"})
    refused("part .*positions Rotary", settings={**settings, "rope_theta": 500.0})
    (tmp_path / "file").write_text("")
    refused("cannot write", folder=tmp_path / "file")
    ours.head.double()
    refused("several types, float32, float64")
    marian = pretrained.build_pretrained({"architectures": ["MarianMTModel"], **BART})
    refused("positions.vectors has other values than transformers computes", marian)


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["softmax", "softmax(scale=1.0)", "Everything()"])
def test_a_mechanism_keeps_the_scale_of_the_scores_that_t5_has(mixer, hf, tmp_path):
    torch.manual_seed(0)
    theirs = exactly(hf.T5ForConditionalGeneration(hf.T5Config(**T5)).double())
    theirs.save_pretrained(tmp_path)
    x, y = tokens(2, 6), tokens(2, 5)
    whole, ours = (pretrained.load_pretrained(tmp_path, **how)(x, None, y) for how in ({}, {"mixer": mixer}))
    torch.testing.assert_close(ours, whole)
    with pytest.raises(CheckpointError, match=r"compressed divides scores by sqrt\(\d+\), .* multiplies them by 1: softmax"):
        pretrained.load_pretrained(tmp_path, mixer="compressed")
