"""Pretrained models of transformers with converted attention: any mechanism in place of softmax, aligned, distilled, saved."""

import copy
import importlib
import json
import math
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import regard.hf as hf  # noqa: E402
from checkpointing_names import checkpoint_activations  # noqa: E402
from regard.hf.attention_layers import attention_layers, choose_layers  # noqa: E402
from regard.hf.conversion import converted_layers, mechanism_parameters  # noqa: E402
from regard.hf.distillation import distillation_loss, label_loss  # noqa: E402
from regard.hf.layer_errors import ErrorByLayer  # noqa: E402
from regard.positions.longer_table import longer_table  # noqa: E402
from regard.pretrained import load_pretrained, save_pretrained  # noqa: E402

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=6, **SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **SLIDING, **SMALL)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, scale_attn_by_inverse_layer_idx=True)
    ),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**SMALL | {"max_position_embeddings": 66})),
}
DECODERS = ["llama", "mistral", "qwen2", "gpt-neox", "gpt2"]
HYBRID = "hybrid(pattern=Local(4) | Global(first=1), far='hedgehog')"


@pytest.fixture(autouse=True)
def quiet():
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(verbosity)


def build(family: str):
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def tokens(rows: int = 2, n: int = 12) -> torch.Tensor:
    return torch.randint(5, 61, (rows, n))


def padding(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return mask


@torch.no_grad()
def scores(model, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    logits = model(ids, attention_mask=mask).logits
    return logits if mask is None else logits[mask.bool()]


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_in_place_of_attention_changes_nothing(family):
    """With the mechanism softmax, in one layer or in none, scores are those of the model as it was, with padding too."""
    model = build(family)
    ids = tokens()
    mask = padding(ids)
    expected = scores(model, ids, mask)
    window = getattr(model.config, "sliding_window", None)
    hf.convert(model, "softmax" if window is None else "Local(6)", layers=1)
    assert (scores(model, ids, mask) - expected).abs().max() < 1e-5
    assert hf.restore(model) == list(attention_layers(model))[1:]
    assert (scores(model, ids, mask) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["hedgehog", "gla"])
def test_a_converted_model_is_saved_and_loaded(family, spec, tmp_path):
    model = build(family)
    hf.convert(model, spec, keep=[0])
    for own in mechanism_parameters(model):
        torch.nn.init.normal_(own, std=0.3)
    model.save_pretrained(tmp_path)
    again = hf.load_converted(tmp_path)
    ids = tokens()
    assert torch.equal(scores(again, ids), scores(model, ids))
    assert [str(layer.spec) for layer in converted_layers(again).values()] == [spec]
    assert dict(again.named_parameters()).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("passed", [False, True])
def test_a_converted_model_is_not_loaded_as_softmax(passed, tmp_path):
    """Before and after a pass, `from_pretrained` names the function that loads the folder, in this process and in others."""
    model = build("llama")
    model.generation_config.max_new_tokens = 7
    hf.convert(model, "gla", layers=1)
    if passed:
        scores(model, tokens())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"load it with regard\.hf\.load_converted"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["attn_implementation"]
    assert "regard.hf.load_converted" in written  # which transformers prints where regard.hf is not imported
    again = hf.load_converted(tmp_path)
    assert again.generation_config.max_new_tokens == 7
    assert LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").config._attn_implementation == "sdpa"
    again.save_pretrained(tmp_path / "second")
    with pytest.raises(ValueError, match="load_converted"):
        LlamaForCausalLM.from_pretrained(tmp_path / "second")
    hf.restore(again)
    ids = tokens()
    expected = scores(again, ids)
    again.save_pretrained(tmp_path / "restored")
    assert (scores(LlamaForCausalLM.from_pretrained(tmp_path / "restored"), ids) - expected).abs().max() < 1e-5


def test_a_layer_without_its_mechanism_is_refused(tmp_path):
    """A model that is made from the configuration of a converted one alone, as folders of earlier versions are loaded."""
    model = build("llama")
    hf.convert(model, "gla", layers=1)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"attn_implementation": "converted"}))
    for other in (LlamaForCausalLM(model.config), LlamaForCausalLM.from_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=r"layer 1 was converted to gla, .*load_converted"):
            other(tokens())
    ids = tokens()
    assert torch.equal(scores(hf.load_converted(tmp_path), ids), scores(model, ids))


@pytest.mark.parametrize("spec", ["Local(8)", {1: "Local(8)"}])
def test_a_model_with_another_mechanism_is_not_converted(spec):
    """Unchosen layers would lose their Spec: the model is refused and stays as it is."""
    model = build("llama")
    ids = tokens()
    expected = scores(hf.set_attention(model, spec), ids)
    name = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"attends by '.*Local\(8\).*', and convert takes models with softmax alone"):
        hf.convert(model, "hedgehog", layers=[1])
    assert hf.restore(model) == [] and model.config.attn_implementation == name
    assert torch.equal(scores(model, ids), expected)
    for plain in ("softmax", "sdpa"):
        hf.set_attention(model, plain)
        assert hf.convert(model, "hedgehog", layers=[1])
        assert hf.convert(model, "gla", layers=[0])  # a converted model may be converted further
        hf.restore(model)


def test_converted_models_keep_their_projections():
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = hf.convert(model, HYBRID)
    assert converted == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(".mechanism." in name for name in after.keys() - before.keys())


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_memory_generates_what_no_cache_does(family, beams):
    model = build(family)
    hf.convert(model, HYBRID, layers=[0])
    ids = tokens()
    options = {"attention_mask": padding(ids), "max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    options |= {"pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, past_key_values=hf.memory(model), **options), expected)


@pytest.mark.parametrize("spec", ["hedgehog", "gla", HYBRID])
def test_a_memory_stays_as_small_as_it_is(spec):
    model = build("llama")
    hf.convert(model, spec)
    sizes = []
    for new in (60, 100):
        memory = hf.memory(model)
        model.generate(tokens(1, 3), past_key_values=memory, max_new_tokens=new, do_sample=False, eos_token_id=None)
        sizes.append(memory.nbytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("layers", [[0], [0, 1]])
def test_autocast_gives_mechanisms_one_type(layers):
    """Rotary positions make float32 of queries and keys under autocast, and values are in half precision."""
    model = build("llama")
    ids = tokens()
    hf.convert(model, HYBRID, layers=layers)
    expected = scores(model, ids)
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        assert (scores(model, ids) - expected).abs().max() < 0.05
        hook.remove()
        found = model.generate(ids, past_key_values=hf.memory(model), max_new_tokens=3, eos_token_id=None)
    assert seen == [torch.bfloat16] and found.shape == (2, 15)


def test_converted_models_are_compiled_and_checkpointed():
    """One graph, with padding; and gradients of mechanisms are the same where activations are computed again."""
    model = build("llama")
    hf.convert(model, HYBRID, layers=[0])
    ids = tokens()
    mask = padding(ids)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(scores(compiled, ids, mask), scores(model, ids, mask), atol=1e-6)
    found = []
    for on in (False, True):
        model.train()
        if on:
            checkpoint_activations(model)
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        found.append([own.grad.clone() for own in mechanism_parameters(model)])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*found, strict=True))


def test_a_cache_that_has_dropped_tokens_is_refused():
    model = build("mistral")
    hf.convert(model, "hedgehog")
    with pytest.raises(ValueError, match="has dropped the first"):
        model.generate(tokens(), max_new_tokens=4, do_sample=False, eos_token_id=None)


def test_learned_sinks_are_refused_and_not_left_out():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 48, "num_local_experts": 2, "layer_types": ["full_attention"]}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    hf.convert(model, "hedgehog")
    with pytest.raises(ValueError, match="changes its scores by s_aux, which hedgehog has no place for"):
        model(torch.randint(3, 61, (1, 8)))


def test_packed_sequences_and_other_masks_are_refused():
    model = build("llama")
    hf.convert(model, "hedgehog")
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="packed sequences"):
        model(tokens(1, 8), position_ids=places, use_cache=False)
    with pytest.raises(TypeError, match="no masks of n x m"):
        model(tokens(1, 8), attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))


# Errors by layer and head, and alignment


def dense_errors(model, ids: torch.Tensor) -> torch.Tensor:
    """The definition: hidden states of the teacher, softmax with n x n weights, one layer at a time."""
    found = []
    inputs = []
    hooks = [layer.self_attn.register_forward_pre_hook(_record(inputs), with_kwargs=True) for layer in model.model.layers]
    teacher = copy.deepcopy(model)
    for hook in hooks:
        hook.remove()
    hf.restore(teacher)
    with torch.no_grad():
        teacher(ids, use_cache=False)
    heads = {}

    def keep(name):
        def hook(_, args):
            heads.setdefault(name, []).append(args[0])

        return hook

    for layer, given in zip(model.model.layers, inputs, strict=True):
        out = []
        for attention in (layer.self_attn, teacher.model.layers[len(found)].self_attn):
            hook = attention.o_proj.register_forward_pre_hook(keep(id(attention)))
            with torch.no_grad():
                attention._forward_pre_hooks.clear()
                attention(**given)
            hook.remove()
            out.append(heads[id(attention)][-1].unflatten(-1, (4, 8)))
        apart = (out[0] - out[1]).square().sum((0, 1, 3))
        found.append(apart / out[1].square().sum((0, 1, 3)))
    return torch.stack(found)


def _record(inputs):
    def hook(_, __, kwargs):
        inputs.append(kwargs)

    return hook


def test_errors_by_layer_and_head_are_those_of_whole_passes():
    """Layers see the inputs that they had before, and errors are relative squares of heads in front of o."""
    model = build("llama")
    hf.convert(model, "hedgehog")
    ids = tokens()
    found = hf.error_by_layer(model, [ids])
    assert found.layers == [0, 1] and found.errors.shape == (2, 4)
    assert torch.allclose(found.errors.float(), dense_errors(model, ids), atol=1e-5)
    assert len(str(found).splitlines()) == 3


def test_several_batches_count_as_one():
    model = build("llama")
    hf.convert(model, "hedgehog")
    ids = tokens(4)
    whole = hf.error_by_layer(model, [ids])
    parts = hf.error_by_layer(model, [ids[:1], ids[1:]])
    assert torch.allclose(whole.errors, parts.errors, rtol=1e-4)


@pytest.mark.parametrize("spec", ["hedgehog", HYBRID, "gla"])
def test_alignment_trains_mechanisms_and_nothing_else(spec):
    model = build("llama")
    for own in model.parameters():  # attention that is not almost uniform
        own.data.mul_(8 if own.dim() > 1 else 1)
    hf.convert(model, spec)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = hf.align(model, [tokens(4, 24)] * 16, lr=3e-2)
    assert report.steps == 15 and report.tokens == 15 * 96
    assert sum(report.after.by_layer) < 0.97 * sum(report.before.by_layer)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(before[name], value)]
    assert changed and all(".mechanism." in name for name in changed)
    assert not any(own.grad is not None for own in model.parameters())
    assert "worst head" in str(report)


def test_a_pattern_has_nothing_to_align():
    model = build("llama")
    hf.convert(model, "Local(4) | Global(first=1)")
    report = hf.align(model, [tokens()] * 3)
    assert report.steps == 0 and report.after is report.before
    assert max(report.after.by_layer) > 1e-3


def test_layers_with_the_largest_errors_are_kept():
    errors = torch.tensor([[0.1, 0.3], [0.8, 0.6], [0.2, 0.2], [0.5, 0.5]], dtype=torch.float64)
    found = ErrorByLayer([0, 1, 4, 5], list("abcd"), errors)
    assert found.keep(0.5).layers == [1, 5]
    assert found.keep(0.25) == (
        [1],
        "Keep softmax in layer 1: its mean error is 0.700, that of the others 0.300.",
    )
    assert found.keep(2).sentence == "Keep softmax in layers 1 and 5: their mean error is 0.600, that of the others 0.200."
    assert found.keep(0).layers == []
    with pytest.raises(ValueError, match="5 of 4 converted layers"):
        found.keep(5)


def test_alignment_keeps_layers_by_their_errors():
    model = build("gpt2")
    hf.convert(model, "hedgehog")
    report = hf.align(model, [tokens()] * 3, keep=0.5)
    assert len(report.kept.layers) == 1
    assert [layer for layer in (0, 1) if f"{layer}" in model.config.regard["layers"]] == [1 - report.kept.layers[0]]
    assert report.kept.sentence in str(report)


# Distillation


def test_distillation_brings_the_student_to_its_teacher():
    model = build("llama")
    for own in model.parameters():
        own.data.mul_(8 if own.dim() > 1 else 1)
    teacher = copy.deepcopy(model)
    hf.convert(model, "hedgehog")
    ids = tokens(4, 16)
    steps: list[int] = []
    found = hf.distil(model, teacher, [ids] * 15, lr=3e-3, report=lambda step, _: steps.append(step))
    assert found.steps == 15 and steps == list(range(15))
    assert found.losses[-1] < 0.7 * found.losses[0]
    assert not model.training


def test_distillation_trains_the_parameters_that_are_chosen():
    model = build("gpt2")
    teacher = copy.deepcopy(model)
    hf.convert(model, "gla")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hf.distil(model, teacher, [tokens()] * 2, labels=0.5, train=lambda name: "mechanism" in name)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(before[name], value)]
    assert changed and all(".mechanism." in name for name in changed)
    with pytest.raises(ValueError, match="chooses no parameter"):
        hf.distil(model, teacher, [tokens()], train=lambda _: False)


def test_losses_of_distillation_are_their_definitions():
    student, teacher = torch.randn(2, 2, 5, 7, dtype=torch.float64)
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    apart = (p * (p / q).log()).sum(-1)[real.bool()]
    assert torch.allclose(distillation_loss(student, teacher, real, 2.0), 4 * apart.mean())
    labels = torch.randint(0, 7, (2, 5))
    labels[0, 3:] = -100
    expected = -student.float().log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    assert torch.allclose(label_loss(student, labels, True), expected[labels[:, 1:] >= 0].mean())


def test_masked_models_need_labels_of_their_own():
    model = build("bert")
    teacher = copy.deepcopy(model)
    hf.convert(model, "linear")
    ids = tokens()
    with pytest.raises(ValueError, match="need labels"):
        hf.distil(model, teacher, [ids], labels=1.0)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert math.isfinite(hf.distil(model, teacher, [batch], labels=1.0).losses[0])


# Which layers, longer positions, refusals


def test_layers_are_chosen_by_number_slice_and_name():
    names = [f"model.layers.{layer}.self_attn" for layer in range(6)]
    assert choose_layers(names, None) == [0, 1, 2, 3, 4, 5]
    assert choose_layers(names, "2::3") == [2, 5]
    assert choose_layers(names, [0, -1]) == [0, 5]
    assert choose_layers(names, ["*.3.*", "1:2"]) == [1, 3]
    with pytest.raises(ValueError, match="none of the 6 attention layers"):
        choose_layers(names, 6)


@pytest.mark.parametrize(("keep", "kept"), [(0.5, [1]), ([1], [1]), ("model.layers.0.*", [0]), (0.0, [])])
def test_layers_are_kept_by_fraction_number_and_name(keep, kept):
    model = build("llama")
    hf.convert(model, "hedgehog", keep=keep)
    assert [int(layer) for layer in model.config.regard["layers"]] == [layer for layer in (0, 1) if layer not in kept]


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta"])
@pytest.mark.parametrize("how", ["copied", "interpolated"])
def test_learned_positions_are_made_longer(family, how, tmp_path):
    model = build(family)
    ids = tokens(2, 60)
    expected = scores(model, ids)
    hf.convert(model, "linear", max_len=150, positions=how)
    hf.restore(model)
    longer = tokens(2, 150)
    assert scores(model, longer).isfinite().all()
    if how == "copied":
        assert (scores(model, ids) - expected).abs().max() < 1e-5
    model.save_pretrained(tmp_path)
    assert torch.equal(scores(hf.load_converted(tmp_path), longer), scores(model, longer))


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta"])
@pytest.mark.parametrize("how", ["copied", "interpolated"])
def test_checkpoints_are_loaded_with_longer_positions(family, how, tmp_path):
    """`load_pretrained` makes the same positions as `lengthen_positions`, and writes a checkpoint that transformers reads."""
    model = build(family)
    if family == "gpt2":
        model.config.scale_attn_by_inverse_layer_idx = False  # which load_pretrained does not read
        model = GPT2LMHeadModel(model.config).eval()
    model.save_pretrained(tmp_path / "short")
    assert hf.lengthen_positions(model, 150, how) == 1
    ids = tokens(2, 150)
    ours = load_pretrained(tmp_path / "short", max_len=150, positions=how)
    with torch.no_grad():
        assert (ours(ids) - scores(model, ids)).abs().max() < 1e-4
    save_pretrained(ours, tmp_path / "long")
    again = type(model).from_pretrained(tmp_path / "long")
    assert (scores(again, ids) - scores(model, ids)).abs().max() < 1e-4
    assert load_pretrained(tmp_path / "short", mixer="cosformer", max_len=150)(ids).isfinite().all()


def test_longer_tables():
    table = torch.arange(5.0)[:, None]
    assert longer_table(table, 8, "copied", special=2)[:, 0].tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert longer_table(table, 9, "interpolated")[:, 0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    with pytest.raises(ValueError, match="'copied' or 'interpolated'"):
        longer_table(table, 9, "tiled")
    with pytest.raises(ValueError, match="fewer than the 5"):
        longer_table(table, 3)


def test_rotary_models_have_no_table_to_make_longer():
    assert hf.lengthen_positions(build("llama"), 500) == 0


@pytest.mark.parametrize(
    "lengthen", [lambda m: hf.lengthen_positions(m, 500, "foo"), lambda m: hf.convert(m, "gla", positions="foo")]
)
def test_unknown_fillings_of_positions_are_refused(lengthen):
    with pytest.raises(ValueError, match="'copied' or 'interpolated', not 'foo'"):
        lengthen(build("llama"))


OPT = SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}
BART = {"vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}


@pytest.mark.parametrize("how", ["copied", "interpolated"])
@pytest.mark.parametrize(("name", "sizes", "count"), [("OPTForCausalLM", OPT, 1), ("BartForConditionalGeneration", BART, 2)])
def test_positions_with_an_offset_are_made_longer(name, sizes, count, how, tmp_path):
    """The first two rows of the tables of OPT and BART are no positions, and their configurations do not count them."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).eval()
    first = model.get_decoder().embed_positions.weight.detach().clone()
    ids, longer = tokens(2, 64), tokens(2, 200)
    expected = scores(model, ids)
    assert hf.lengthen_positions(model, 64, how) == 0  # it has them
    assert hf.lengthen_positions(model, 200, how) == count
    table = model.get_decoder().embed_positions.weight
    assert len(table) == 202 and model.config.max_position_embeddings == 200
    assert torch.equal(table[:2], first[:2]) and torch.allclose(
        table[[2, -1]], first[[2, (199 % 64 if how == "copied" else 63) + 2]]
    )
    if how == "copied":
        assert (scores(model, ids) - expected).abs().max() < 1e-5
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert torch.equal(scores(again, longer), scores(model, longer))


def test_opt_is_converted_with_its_scale_and_longer_positions(tmp_path):
    """OPT multiplies queries by the scale before attention: softmax in its place changes nothing."""
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)).eval()
    for own in model.parameters():  # attention that is not almost uniform
        own.data.mul_(8 if own.dim() > 1 else 1)
    ids = tokens()
    expected = scores(model, ids)
    hf.convert(model, "softmax")
    assert (scores(model, ids) - expected).abs().max() < 1e-5
    hf.convert(model, "linear", max_len=256)
    longer = tokens(1, 200)
    assert scores(model, longer).isfinite().all()
    model.save_pretrained(tmp_path)
    assert torch.equal(scores(hf.load_converted(tmp_path), longer), scores(model, longer))


def test_tables_that_are_not_made_longer_are_refused():
    model = transformers.MarianMTModel(transformers.MarianConfig(**BART, pad_token_id=0, decoder_start_token_id=0))
    assert hf.lengthen_positions(model, 64) == 0
    with pytest.raises(ValueError, match=r"64 positions \(MarianSinusoidal.*cannot be made longer"):
        hf.lengthen_positions(model, 200)
    sizes = {key: size for key, size in BART.items() if key != "max_position_embeddings"}
    config = transformers.LEDConfig(**sizes, max_encoder_position_embeddings=64, max_decoder_position_embeddings=32)
    with pytest.raises(ValueError, match="cannot be made longer"):
        hf.lengthen_positions(transformers.LEDModel(config), 200)


def test_mechanisms_with_other_projections_are_refused():
    model = build("llama")
    with pytest.raises(ValueError, match="has no queries, keys and values"):
        hf.convert(model, "fnet")
    with pytest.raises(ValueError, match="more than one query"):
        hf.convert(model, "longformer")
    with pytest.raises(ValueError, match="keys that are its queries"):
        hf.convert(model, "reformer")
    with pytest.raises(ValueError, match="nothing to convert"):
        hf.convert(model, "linear", keep=[0, 1])
    with pytest.raises(ValueError, match="no converted layer"):
        hf.align(model, [tokens()])
    assert model.config._attn_implementation != "converted"


def test_models_that_were_not_converted_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no model that regard"):
        hf.load_converted(tmp_path)
    config = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, num_layers=1, num_heads=2, d_ff=8)
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        hf.convert(transformers.T5ForConditionalGeneration(config), "linear")


# The benchmark and its tables, at tiny sizes


def test_the_benchmark_runs_goes_on_and_fills_its_tables(tmp_path, monkeypatch):
    """Teacher, conversions, speed and long answers; a second call computes nothing again; every table has its rows."""
    root = Path(__file__).resolve().parents[1]
    monkeypatch.setattr(sys, "path", [str(root / "benchmarks"), str(root / "docs"), *sys.path])
    monkeypatch.setenv("LIMIT", "100")
    hf_convert, tables = importlib.import_module("hf_convert"), importlib.import_module("tables_conversion")
    tiny = replace(hf_convert.TINY, long=40, most_steps=2, shares=(0.0, 0.5))
    monkeypatch.setattr(hf_convert, "TINY", tiny)
    monkeypatch.setattr(hf_convert, "STARTED", time.monotonic())
    options = ["--tiny", "--device", "cpu", "--folder", str(tmp_path / "run"), "--out", str(tmp_path)]
    made = json.loads(hf_convert.main(options).read_text())
    kinds = Counter(row["what"] for row in made["rows"])
    assert kinds == {"teacher": 1, "align": 3, "quality": 6, "speed": 7, "generate": 4}
    assert json.loads(hf_convert.main(options).read_text())["rows"] == made["rows"]
    quality = tables.conversion_quality(made)
    assert quality.count("nothing to align") == 2 and quality.count("| hybrid |") == 2
    assert tables.conversion_errors(made).count("worst head after") == 3
    assert len(tables.conversion_speed(made).splitlines()) == 2 + 2 + 7
    assert "| linear | 40 |" in tables.conversion_answers(made)
    for name in ("quality", "errors", "speed", "answers"):
        assert "Not measured yet" in getattr(tables, f"conversion_{name}")({"rows": []})
    answers = json.loads(
        hf_convert.main([*options[:4], str(tmp_path / "answers"), *options[5:], "--answers", "linear"]).read_text()
    )
    assert [row["generated"] for row in answers["rows"]] == [40] and list(answers["settings"]["mechanisms"]) == ["linear"]
    assert "| linear | 40 |" in tables.untrained_answers(answers)
    assert "Not measured yet" in tables.untrained_answers({"rows": []})
