"""Attention by Specs inside models of transformers: every family against its own attention, one check for each column of a table.

The table of docs/huggingface.md has a row for each family and a column for each check.
"""

import re
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import eager_mask  # noqa: E402

import regard.hf  # noqa: E402
from checkpointing_names import CHECKPOINTING  # noqa: E402
from regard import Pattern  # noqa: E402
from regard.ops.backend import SlowBackend  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PATTERN = "Local(3) | Global(first=1)"
VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 96}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "attn_pdrop": 0.0}
BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 96}
BART |= {"forced_eos_token_id": None, "decoder_start_token_id": 2, "dropout": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 48, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16}
VIT |= {"patch_size": 4, "hidden_dropout_prob": 0.0}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 96}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HEADED = {**GROUPED, "head_dim": 8, "sliding_window": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
UNBOUNDED = {key: x for key, x in HEADED.items() if key != "sliding_window"}
LAYERS = ["full_attention", "sliding_attention"]

DECODER, ENCODER, VISION, TRANSLATOR = "decoder", "encoder", "vision", "translator"
FAMILIES = {  # name: kind, class, configuration
    "Llama": (DECODER, "LlamaForCausalLM", GROUPED),
    "Mistral": (DECODER, "MistralForCausalLM", {**GROUPED, "sliding_window": 5}),
    "Qwen2": (DECODER, "Qwen2ForCausalLM", {**GROUPED, "layer_types": LAYERS, "sliding_window": 5, "use_sliding_window": True}),
    "Gemma 2": (DECODER, "Gemma2ForCausalLM", {**HEADED, "layer_types": LAYERS, "attn_logit_softcapping": 0.5}),
    "gpt-oss": (
        DECODER,
        "GptOssForCausalLM",
        {**HEADED, "layer_types": LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "GPT-2": (DECODER, "GPT2LMHeadModel", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "GPT-NeoX": (DECODER, "GPTNeoXForCausalLM", SIZES),
    "BERT": (ENCODER, "BertForMaskedLM", {**SIZES, **UNDROPPED}),
    "RoBERTa": (ENCODER, "RobertaForMaskedLM", {**SIZES, **UNDROPPED, "pad_token_id": 0}),
    "ModernBERT": (
        ENCODER,
        "ModernBertForMaskedLM",
        {**SIZES, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 8},
    ),
    "ViT": (VISION, "ViTForImageClassification", VIT),
    "BART": (TRANSLATOR, "BartForConditionalGeneration", BART),
    "T5": (TRANSLATOR, "T5ForConditionalGeneration", T5),
}
OTHERS = {  # compared with eager attention alone
    "Gemma": (DECODER, "GemmaForCausalLM", UNBOUNDED),
    "Gemma 3": (DECODER, "Gemma3ForCausalLM", {**HEADED, "layer_types": LAYERS}),
    "Qwen3": (DECODER, "Qwen3ForCausalLM", UNBOUNDED),
    "Phi": (DECODER, "PhiForCausalLM", GROUPED),
    "Phi-3": (DECODER, "Phi3ForCausalLM", UNBOUNDED),
    "OLMo 2": (DECODER, "Olmo2ForCausalLM", UNBOUNDED),
    "OPT": (DECODER, "OPTForCausalLM", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "StarCoder2": (DECODER, "Starcoder2ForCausalLM", HEADED),
    "Granite": (DECODER, "GraniteForCausalLM", UNBOUNDED),
    "Cohere": (DECODER, "CohereForCausalLM", UNBOUNDED),
    "SmolLM3": (DECODER, "SmolLM3ForCausalLM", UNBOUNDED),
    "Mixtral": (DECODER, "MixtralForCausalLM", {**HEADED, "num_local_experts": 2}),
    "Llama 4": (DECODER, "Llama4ForCausalLM", {**HEADED, "attention_chunk_size": 8, "num_local_experts": 2}),
    "DistilBERT": (ENCODER, "DistilBertForMaskedLM", DISTILBERT),
    "ELECTRA": (ENCODER, "ElectraForMaskedLM", {**SIZES, **UNDROPPED, "embedding_size": 32}),
    "XLM-RoBERTa": (ENCODER, "XLMRobertaForMaskedLM", {**SIZES, **UNDROPPED, "pad_token_id": 0}),
    "ALBERT": (ENCODER, "AlbertForMaskedLM", {**SIZES, **UNDROPPED, "embedding_size": 16}),
    "ESM": (ENCODER, "EsmForMaskedLM", {**SIZES, **UNDROPPED, "pad_token_id": 0, "mask_token_id": 3}),
    "mBART": (TRANSLATOR, "MBartForConditionalGeneration", BART),
    "Pegasus": (TRANSLATOR, "PegasusForConditionalGeneration", BART),
    "Marian": (TRANSLATOR, "MarianMTModel", {**BART, "pad_token_id": 0}),
    "M2M100": (TRANSLATOR, "M2M100ForConditionalGeneration", BART),
    "DeiT": (VISION, "DeiTForImageClassification", VIT),
    "DINOv2": (VISION, "Dinov2ForImageClassification", {key: x for key, x in VIT.items() if key != "intermediate_size"}),
}


def make(family, spec=None, **changes):
    """Build a small model with the same weights in every call."""
    _, name, sizes = (FAMILIES | OTHERS)[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**sizes, **changes})).eval()
    if spec is not None:
        model.set_attn_implementation(spec)
    return model


def tokens(rows=2, length=11):
    return torch.randint(5, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def inputs(family, padded=False):
    """Return the arguments of a call with a loss, and which of its logits belong to real tokens."""
    kind = (FAMILIES | OTHERS)[family][0]
    if kind == VISION:
        return {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
            "labels": torch.ones(2).long(),
        }, ...
    ids = tokens()
    real = torch.ones_like(ids)
    if padded:
        real[0, :4] = 0
        if kind != DECODER:
            real = real.flip(1)
    given = {"input_ids": ids * real, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}
    if kind == TRANSLATOR:
        given["labels"] = tokens(length=7)
    if kind == DECODER:
        given["position_ids"] = (real.cumsum(1) - 1).clamp_min(0)
        given["labels"] = given["labels"].masked_fill(given["position_ids"] == 0, -100)  # no padding predicts the first token
    return given, ... if kind == TRANSLATOR else real.bool()


def passed(model, family, padded=False):
    """Return the logits of real tokens and the gradients of all parameters."""
    given, real = inputs(family, padded)
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    return out.logits[real].detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_close(ours, theirs, tolerance=2e-5):
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=1e-4)


def dense_reference(module, q, k, v, mask, scaling=None, position_bias=None, softcap=None, s_aux=None, **_):
    """Attend to the pairs of PATTERN in the plainest way: the model's own scores, all of them, without padding."""
    share, (n, m) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = q @ k.mT * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    for term in (mask, position_bias):
        scores = scores if term is None else scores + term
    if n == m or module.is_causal:
        i, j = torch.arange(m - n, m)[:, None], torch.arange(m)
        scores = scores.masked_fill(~Pattern.of(PATTERN)(0, i, j), -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(len(q), -1, n, 1)], -1)
    return (scores.softmax(-1)[..., :m] @ v).transpose(1, 2), None


AttentionInterface.register("dense-reference", dense_reference)
AttentionMaskInterface.register("dense-reference", eager_mask)


# The columns of the table


def equal_to_eager(family):
    """Softmax is the model's own attention, and a pattern the same without the other pairs: outputs and gradients."""
    model = make(family, "eager")
    theirs = passed(model, family)
    model.set_attn_implementation("softmax")
    assert_close(passed(model, family), theirs)
    model.set_attn_implementation("dense-reference")
    theirs = passed(model, family)
    model.set_attn_implementation(PATTERN)
    assert_close(passed(model, family), theirs)


def padding(family):
    """Padded rows are as if alone; softmax is eager there too."""
    model = make(family, "eager")
    theirs = passed(model, family, padded=True)
    model.set_attn_implementation("softmax")
    assert_close(passed(model, family, padded=True), theirs)
    model.set_attn_implementation(PATTERN)
    given, real = inputs(family, padded=True)
    ours = model(**given).logits
    own = given["attention_mask"][0].bool()
    alone = {key: x[:1, own] if x.shape == own.expand(len(x), -1).shape else x[:1] for key, x in given.items()}
    alone = model(**alone).logits[0]
    assert_close(ours[0] if real is ... else ours[0, own], alone)


def generated(model, beams=1, memory=False, **options):
    ids = tokens()
    real = torch.ones_like(ids)
    real[0, :4] = 0
    cache = regard.hf.memory(model) if memory else None
    if cache is not None:
        options["past_key_values"] = cache
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": beams} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generation settings
        return model.generate(ids * real, attention_mask=real, **options), cache


def beams(family):
    """Generated tokens are those of eager attention; those of a pattern are the same with and without a cache."""
    model = make(family, "eager")
    theirs = generated(model, beams=3)[0]
    model.set_attn_implementation("softmax")
    assert torch.equal(generated(model, beams=3)[0], theirs)
    model.set_attn_implementation(PATTERN)
    assert torch.equal(generated(model, beams=3)[0], generated(model, beams=3, use_cache=False)[0])


def bounded_memory(family):
    """Generation with a memory gives the tokens of the usual cache, and the memory stops growing."""
    for spec in (PATTERN, "softmax"):
        model = make(family, spec)
        for k in (1, 3):
            assert torch.equal(generated(model, beams=k, memory=True)[0], generated(model, beams=k)[0])
    model.set_attn_implementation(PATTERN)
    sizes = [sized(generated(model, memory=True, max_new_tokens=n)[1]) for n in (40, 80)]
    assert sizes[1] <= sizes[0]


def sized(cache):
    return getattr(cache, "self_attention_cache", cache).nbytes


def trainer_step(family):
    """A step of Trainer with gradient checkpointing changes the weights as one without it and with eager attention does."""
    pytest.importorskip("accelerate")
    given, _ = inputs(family, padded=FAMILIES[family][0] != VISION)
    changed = []
    for spec, checkpointed in (("eager", False), ("softmax", True)):
        model = make(family, spec)
        stepped(model, [{key: x[row] for key, x in given.items()} for row in range(2)], checkpointed)
        changed.append([x.detach() for x in model.parameters()])
    assert_close(*changed)
    assert not all(map(torch.equal, changed[0], make(family).parameters()))


def stepped(model, rows, checkpointed):
    """Let Trainer make one step on rows."""
    settings = {"max_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "optim": "sgd"}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = transformers.TrainingArguments(folder, learning_rate=0.1, **{CHECKPOINTING: checkpointed}, **settings)
        transformers.Trainer(model, settings, train_dataset=rows).train()


ONE_LAYER = {
    **{family: {"num_hidden_layers": 1, "layer_types": LAYERS[1:]} for family in ("Qwen2", "Gemma 2", "gpt-oss")},
    "BART": {"encoder_layers": 1, "decoder_layers": 1},
    "T5": {"num_layers": 1},
}


def compiled(family):
    """One graph, with padding, equal to the same model without a compiler."""
    model = make(family, PATTERN, **ONE_LAYER.get(family, {"num_hidden_layers": 1}))
    given, real = inputs(family, padded=True)
    target = given.pop("labels")
    if FAMILIES[family][0] == TRANSLATOR:
        given["decoder_input_ids"] = target
    torch._dynamo.reset()
    with torch.no_grad():
        ours = torch.compile(model, backend="eager", fullgraph=True)(**given).logits[real]
        assert_close(ours, model(**given).logits[real])


CHECKS = {
    "equal to eager": equal_to_eager,
    "padding": padding,
    "beams": beams,
    "bounded memory": bounded_memory,
    "Trainer step": trainer_step,
    "compile": compiled,
}
REFUSED = {(family, "bounded memory") for family in ("T5", "Gemma 2", "gpt-oss")}


def applies(family, check):
    kind = FAMILIES[family][0]
    if check in ("beams", "bounded memory"):
        return kind in (DECODER, TRANSLATOR)
    return not (kind == VISION and check == "padding")


CELLS = [(family, check) for family in FAMILIES for check in CHECKS if applies(family, check)]


@pytest.mark.parametrize(("family", "check"), CELLS)
def test_every_family(family, check):
    if (family, check) in REFUSED:
        with pytest.raises(ValueError, match="scores of its own"):
            CHECKS[check](family)
        return
    CHECKS[check](family)


@pytest.mark.parametrize("family", OTHERS)
def test_another_family_is_eager_and_generates_in_bounded_memory(family):
    model = make(family, "eager")
    given, real = inputs(family, padded=True)
    with torch.no_grad():
        theirs = model(**given).logits[real]
        model.set_attn_implementation("softmax")
        assert_close(model(**given).logits[real], theirs)
        model.set_attn_implementation(PATTERN)
        assert not torch.allclose(model(**given).logits[real], theirs, atol=1e-4)
    if OTHERS[family][0] in (DECODER, TRANSLATOR):
        assert torch.equal(generated(model, memory=True)[0], generated(model, use_cache=False)[0])


@pytest.mark.parametrize("family", ["Mistral", "BERT", "ModernBERT"])
def test_long_sequences(family):
    """Lengths at which pairs are computed by tiles, alone and with padding, and behind a cache."""
    model = make(family, "dense-reference", max_position_embeddings=256)
    ids = tokens(2, 200)
    theirs = model(ids).logits
    model.set_attn_implementation(PATTERN)
    assert_close(model(ids).logits, theirs)
    real = torch.ones_like(ids)
    real[0, 120:] = 0
    assert_close(model(ids, attention_mask=real).logits[0, :120], model(ids[:1, :120]).logits[0])
    if FAMILIES[family][0] == DECODER:
        for cache in (transformers.DynamicCache(config=model.config), regard.hf.memory(model)):
            parts = [model(part, past_key_values=cache).logits for part in ids.split([90, 90, 20], 1)]
            assert_close(torch.cat(parts, 1), theirs)


# Names


@pytest.mark.parametrize(
    "spec", [PATTERN, "linear", "[softmax, Local(3)]", "sinks(window=3, first=2)", "relu", "bigbird(block=4)"]
)
def test_a_spec_is_a_name_of_attention(spec):
    model = make("Llama", spec)
    assert model.config._attn_implementation == spec
    given, _ = inputs("Llama", padded=True)
    assert model(**given).loss.isfinite()
    assert torch.equal(make("Llama", attn_implementation=spec)(**given).logits, model(**given).logits)


def test_names_of_transformers_stay_what_they_are():
    names = list(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys())
    assert "sdpa" in names and "softmacks" not in names
    model = make("Llama")
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="is not supported"):
        model.set_attn_implementation("softmacks")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("sliding_window", r"did you mean 'Local\(256\)'"),
        ("local", "did you mean 'Local'"),
        ("full", "did you mean 'softmax'"),
        ("rope", "positions are no mechanism"),
        ("[full, softmax]", "did you mean 'softmax'"),
    ],
)
def test_other_names_of_mechanisms_are_answered_as_a_layer_does(name, sentence):
    model = make("Llama")
    with pytest.raises(ValueError, match=sentence):
        regard.hf.set_attention(model, name)
    with pytest.raises(ValueError, match=sentence):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "sdpa"


def test_unknown_names_are_answered_and_those_of_transformers_are_not(monkeypatch):
    model = make("Llama")
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        regard.hf.set_attention(model, "softmacks")
    with pytest.raises(ValueError, match=r"[Ff]lex"):  # a name of transformers: its own reason
        monkeypatch.setattr(type(model), "_supports_flex_attn", False)
        regard.hf.set_attention(model, "flex_attention")
    names = AttentionInterface().valid_keys()
    assert all(name in ["eager", *names] for name in ("eager", "sdpa", "flash_attention_2"))
    assert "eager" not in names  # and this comparison raises nothing
    monkeypatch.setitem(AttentionInterface._global_mapping, "full", dense_reference)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "full", eager_mask)
    assert regard.hf.set_attention(model, "full").config._attn_implementation == "full"  # what a user has registered


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("Locale(3)", "did you mean 'Local'"),
        ("Local(0)", "size of Local"),
        ("performer(features=8)", "parameters or tables of its own"),
        ("gla(gate='head')", "gates beside its keys"),
        ("longformer(window=4)", "more than one query"),
        ("fnet(norm='none')", "whole layer without a core"),
        ("[Local(3), Local(4)", "ends with"),
    ],
)
def test_mistakes_get_a_sentence(spec, sentence):
    with pytest.raises(ValueError, match=sentence):
        make("Llama", spec)


# Layer by layer, saved and loaded


def test_each_layer_has_its_mechanism():
    model = make("Llama")
    ids = tokens()
    for spec, same in (({}, "softmax"), ({0: "Local(3)", 1: "Local(3)"}, "Local(3)"), ([PATTERN, PATTERN], PATTERN)):
        ours = regard.hf.set_attention(model, spec)(ids).logits
        assert torch.equal(ours, make("Llama", same)(ids).logits)
    regard.hf.set_attention(model, {1: "Local(2)"})
    assert model.config._attn_implementation == "[softmax, Local(2)]"
    mixed = model(ids).logits
    assert not torch.equal(mixed, make("Llama", "softmax")(ids).logits)
    model.set_attn_implementation("[Local(2), softmax]")
    assert not torch.equal(mixed, model(ids).logits)


def test_layers_without_a_number_get_one():
    model, given = make("ViT"), inputs("ViT")[0]
    model.set_attn_implementation("[softmax, Local(3)]")
    with pytest.raises(ValueError, match="ViTAttention has no layer_idx"):
        model(**given)
    ours = regard.hf.set_attention(model, ["softmax", "Local(3)"])(**given).logits
    assert not torch.equal(ours, make("ViT", "softmax")(**given).logits)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [(["softmax"], "1 mechanisms for 2 layers"), ({2: "softmax"}, "no layer 2"), ({"a": "softmax"}, "no layer 'a'")],
)
def test_wrong_layers_are_refused(spec, sentence):
    with pytest.raises(ValueError, match=sentence):
        regard.hf.set_attention(make("Llama"), spec)


@pytest.mark.parametrize(("family", "spec"), [("GPT-2", PATTERN), ("BERT", {1: "Local(3)"}), ("T5", "Local(3)")])
def test_mechanisms_are_saved_with_the_model(tmp_path, family, spec):
    given, _ = inputs(family)
    model = regard.hf.set_attention(make(family), spec)
    load, expected = type(model).from_pretrained, model(**given).logits
    for folder in ("first", "second"):  # what was loaded is saved again
        model.save_pretrained(tmp_path / folder)
        model = load(tmp_path / folder)
        if family == "T5":  # its encoder and decoder have copies of the configuration, and passes write into those
            regard.hf.set_attention(model, model.config._attn_implementation)
        assert torch.equal(model(**given).logits, expected)
    assert load(tmp_path / "second", attn_implementation="eager").config._attn_implementation == "eager"
    regard.hf.set_attention(model, "sdpa").save_pretrained(tmp_path / "third")
    assert load(tmp_path / "third").config._attn_implementation == "sdpa"


def test_models_without_the_interface_are_refused():
    sizes = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    with pytest.raises(ValueError, match="FNetModel has no attention"):
        regard.hf.set_attention(transformers.FNetModel(transformers.FNetConfig(**sizes)), "Local(3)")
    longformer = transformers.LongformerModel(transformers.LongformerConfig(**sizes, attention_window=[4, 4]))
    with pytest.raises(ValueError, match="does not go through"):
        regard.hf.set_attention(longformer, "Local(3)")


# Masks


def test_a_mask_in_full_and_a_mask_function_of_the_user():
    """Both are computed for all pairs, with the pattern; packed sequences do not see each other."""
    model, ids = make("Llama", PATTERN), tokens(1, 10)
    alone = [model(ids[:, :6]).logits, model(ids[:, 6:]).logits]
    positions = torch.tensor([[*range(6), *range(4)]])
    model.set_attn_implementation("Local(3)")
    alone = [model(part).logits for part in (ids[:, :6], ids[:, 6:])]
    with pytest.warns(SlowBackend, match="all pairs"):
        packed = model(ids, position_ids=positions, use_cache=False).logits
    assert_close(packed, torch.cat(alone, 1))
    apart = (torch.arange(10) < 6)[:, None] == (torch.arange(10) < 6)
    mask = (apart & torch.ones(10, 10).tril().bool())[None, None]
    assert_close(model(ids, attention_mask=mask, position_ids=positions).logits, packed)
    added = torch.zeros(1, 1, 10, 10).masked_fill(~mask, -torch.inf)
    assert_close(model(ids, attention_mask=added, position_ids=positions).logits, packed)
    model.set_attn_implementation("linear")
    with pytest.raises(ValueError, match="use softmax or a pattern"):
        model(ids, attention_mask=mask)


def test_chunked_attention_is_blocks():
    from transformers.masking_utils import chunked_causal_mask_function

    from regard.hf.model_mask import _read_rule

    assert _read_rule(chunked_causal_mask_function(4, torch.zeros(1))) == (True, "Blocks(4)", 4)


def test_static_caches_work_with_softmax_and_are_refused_by_others():
    model = make("Mistral", "eager")
    theirs = generated(model)[0]
    model.set_attn_implementation("softmax")
    assert torch.equal(generated(model, cache_implementation="static")[0], theirs)
    model.set_attn_implementation(PATTERN)
    with pytest.raises(ValueError, match="has no static cache"):
        generated(model, cache_implementation="static")


@pytest.mark.parametrize(
    ("options", "sentence"), [({"cache": object()}, "has a paged cache"), ({"output_attentions": True}, "returns no weights")]
)
def test_what_no_spec_does_is_refused(options, sentence):
    from regard.hf.spec_attention import spec_attention

    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=sentence):
        spec_attention(None, torch.nn.Identity(), x, x, x, None, **options)


def test_a_window_of_the_model_needs_a_pattern():
    with pytest.raises(ValueError, match="the model attends to Local\\(5\\)"):
        make("Mistral", "linear")(tokens())


def test_dropout_and_half_precision():
    model = make("BERT", PATTERN, attention_probs_dropout_prob=0.5).train()
    given, _ = inputs("BERT")
    torch.manual_seed(0)
    first = model(**given).logits
    torch.manual_seed(0)
    assert torch.equal(model(**given).logits, first)
    assert not torch.equal(model(**given).logits, first)
    model.eval()
    exact = model(**given).logits
    assert not torch.equal(exact, first)
    assert model.bfloat16()(**given).logits.sub(exact).abs().max() < 0.05


@pytest.mark.parametrize("family", ["Llama", "BERT", "T5"])
def test_autocast(family):
    model, (given, real) = make(family, "eager"), inputs(family, padded=True)
    logits = []
    for spec in ("eager", "softmax"):
        model.set_attn_implementation(spec)
        with torch.autocast("cpu", torch.bfloat16):
            logits.append(model(**given).logits[real].float())
    assert_close(*logits, tolerance=0.05)


def test_mechanisms_without_weights_refuse_to_drop_them():
    model = make("BERT", "linear", attention_probs_dropout_prob=0.5)
    given, _ = inputs("BERT")
    assert model(**given).loss.isfinite()
    with pytest.raises(ValueError, match="no weights to drop"):
        model.train()(**given)


# Memory


def test_a_linear_state_is_constant():
    model = make("Llama", "linear")
    for beams in (1, 3):
        ours = generated(model, beams=beams, memory=True)[0]
        assert torch.equal(ours, generated(model, beams=beams, use_cache=False)[0])
    sizes = {sized(generated(model, memory=True, max_new_tokens=n)[1]) for n in (2, 20)}
    assert len(sizes) == 1


def test_a_memory_goes_on_and_begins_anew():
    model, ids = make("Llama", PATTERN), tokens(2, 20)
    whole = model(ids).logits
    cache = regard.hf.memory(model)
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 20))]
    assert_close(torch.cat(parts, 1), whole)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    after = model(ids[:, :1], past_key_values=cache).logits
    assert_close(after[0], model(torch.cat([ids[1:], ids[:1, :1]], 1)).logits[0, -1:])
    cache.reset()
    assert_close(model(ids, past_key_values=cache).logits, whole)
    with pytest.raises(NotImplementedError, match="forgotten"):
        cache.crop(-1)


def test_a_memory_without_its_mechanism_is_refused():
    model = make("Llama", "sdpa")
    with pytest.raises(ValueError, match="attends by 'sdpa'"):
        regard.hf.memory(model)
    model.set_attn_implementation(PATTERN)
    cache = regard.hf.memory(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="not read by a Spec"):
        generated(model, past_key_values=cache)


# Training and documentation


PAGE = (ROOT / "docs" / "huggingface.md").read_text()


def test_the_table_of_the_documentation_is_true():
    assert family_table() in PAGE
    assert f"eager attention too: {', '.join(OTHERS)}." in " ".join(PAGE.split())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_python_of_the_documentation_runs(block):
    exec(compile(block, "docs/huggingface.md", "exec"), {"__name__": "__main__"})


def family_table():
    """Return the table of families and checks in Markdown."""
    lines = [f"| family | {' | '.join(CHECKS)} |", "|---" * (len(CHECKS) + 1) + "|"]
    for family in FAMILIES:
        marks = ["refused" if (family, c) in REFUSED else "yes" if applies(family, c) else "-" for c in CHECKS]
        lines.append(f"| {family} | {' | '.join(marks)} |")
    return "\n".join(lines)
