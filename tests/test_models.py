"""Whole models, by Spec: the future unseen, padding as if absent, streams equal to forward; and the paper's own, by torch."""

import math

import pytest
import torch
from torch import nn

from conftest import DEVICE, HEADS, PATHS, WIDTH, claiming, close, data, each_path, some
from regard.analysis.equivalents import feedforward_as_conv
from regard.blocks import Stack
from regard.blocks.feedforward import FeedForward
from regard.config import Config
from regard.mixers.base import Can
from regard.models import PerSequence, Reader, language_model, translator
from regard.models.build import encoder, glorot, stack, tokens
from regard.models.translator import WIRINGS
from regard.positions import POSITIONS

VOCAB, N, M = 40, 13, 17
CUTS = [6, 1, 0, 1, 9]


def settings(case=None, **changes) -> Config:
    own = {} if case is None else {"mixer": str(case.spec), "positions": case.positions or "sinusoidal"}
    small = {"width": WIDTH, "heads": HEADS, "depth": 1, "ffn": 48, "max_len": 128, "dropout": 0.0}
    return Config(**{**small, **own, **changes})


def ready(model: nn.Module) -> nn.Module:
    """In double precision, with norms that do something: one that does nothing yet would hide where it stands."""
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(p, 1.0, 0.3)
    return model.to(DEVICE, torch.float64).eval()


def words(n: int, seed: int = 1, b: int = 3, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(vocab, (b, n), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def hidden_from(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The same tokens, and others where there is none."""
    return torch.where(valid, x, (x + 7) % VOCAB)


@torch.no_grad()
def streamed(model, state, target, valid=None):
    out = []
    for at, part in enumerate(target.split(CUTS, 1)):
        y, state = model.extend(state, part, None if valid is None else valid.split(CUTS, 1)[at])
        out.append(y)
    return torch.cat(out, 1)


def check_translator(model, source, target, real, valid) -> None:
    """Three laws: streams are forward passes, what is not there cannot be seen, and neither can what comes later."""
    with torch.no_grad():
        y = model(hidden_from(source, real), real, hidden_from(target, valid), valid)
        close(streamed(model, model.start(source, real), target, valid)[valid], y[valid])
        close(streamed(model, model.start(source), target), model(source, None, target))
        row = 1
        alone = model(source[row][real[row]][None], None, target[row][valid[row]][None])[0]
        close(y[row][valid[row]], alone)
        later = torch.cat([target[:, :8], words(M - 8, seed=9)], 1)
        close(model(source, real, later, valid)[:, :8][valid[:, :8]], y[:, :8][valid[:, :8]])


# laws over the catalogue


@claiming(Can.CAUSAL | Can.STREAM | Can.PADDING, cases=PATHS, causal=True)
def test_a_translator_of_any_mixer_streams_and_sees_neither_padding_nor_the_future(case):
    model = ready(translator(settings(case, decoder_depth=2), VOCAB))
    check_translator(model, words(N), words(M, seed=2), some(3, N), some(3, M, seed=5))


@claiming(Can.CAUSAL | Can.STREAM | Can.PADDING, cases=PATHS, causal=True)
def test_a_language_model_of_any_mixer_streams_and_sees_neither_padding_nor_the_future(case):
    model, x, valid = ready(language_model(settings(case, depth=2), VOCAB)), words(M), some(3, M)
    with torch.no_grad():
        y = model(hidden_from(x, valid), valid)
        close(streamed(model, model.start(3), x), model(x))
        close(streamed(model, model.start(3), x, valid)[valid], y[valid])
        close(y[1][valid[1]], model(x[1][valid[1]][None])[0])
        close(model(torch.cat([x[:, :8], words(M - 8, seed=9)], 1))[:, :8], model(x)[:, :8])


@claiming(Can.CROSS | Can.PADDING, cases=PATHS, cross=True)
def test_every_mixer_that_can_read_a_context_reads_the_encoder(case):
    config = settings(cross=str(case.spec))
    if case.build().rate > 1:
        with pytest.raises(ValueError, match="an answer for every token"):
            translator(config, VOCAB)
        return
    model = ready(translator(config, VOCAB))
    source, target, real, valid = words(N), words(M, seed=2), some(3, N), some(3, M, seed=5)
    if case.can(Can.STREAM, cross=True):
        check_translator(model, source, target, real, valid)
        return
    with pytest.raises(ValueError, match="cannot do stream"):
        model.start(source, real)
    y = model(hidden_from(source, real), real, hidden_from(target, valid), valid)
    close(y[1][valid[1]], model(source[1][real[1]][None], None, target[1][valid[1]][None])[0])


@each_path
def test_an_encoder_of_any_mixer_takes_padding_as_absent(case):
    config = settings(case)
    read, x, valid = ready(encoder(config, tokens(config, VOCAB), front=2)), words(N), some(3, N)
    with torch.no_grad():
        y = read(hidden_from(x, valid), valid)
        assert torch.equal(y.valid, read.stack.valid(torch.cat([valid.new_ones(3, 2), valid], 1))) and (y.x[~y.valid] == 0).all()
        for row in range(3):
            alone = read(x[row][valid[row]][None])
            assert alone.valid is None
            close(y.x[row][y.valid[row]], alone.x[0])
        model = ready(Reader(read, PerSequence(WIDTH, 3, pool="max")))
        close(model(x, valid)[1], model(x[1][valid[1]][None])[0])


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_of_every_kind_and_every_wiring_in_a_translator(kind, wiring):
    model = ready(translator(settings(positions=kind, wiring=wiring, depth=2), VOCAB))
    check_translator(model, words(N), words(M, seed=2), some(3, N), some(3, M, seed=5))
    swapped = words(N)[:, [1, 0, *range(2, N)]]
    same = torch.allclose(model.encode(swapped).contexts[-1][:, 2:], model.encode(words(N)).contexts[-1][:, 2:], atol=1e-12)
    assert same == (kind == "none")


def test_a_list_of_specs_is_a_hybrid_with_an_encoder_and_a_decoder_of_different_depth():
    config = settings(mixer=["linear", "Local(3)", "conv(kernel=3)"], depth=2, decoder_depth=4, wiring="mixed", gated=True)
    model = ready(translator(config, VOCAB))
    assert [b.mixer.name for b in model.encoder.stack] == ["linear", "sparse"]
    assert [b.mixer.name for b in model.decoder] == ["linear", "sparse", "conv", "linear"]
    check_translator(model, words(N), words(M, seed=2), some(3, N), some(3, M, seed=5))


# the wires


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_wirings_are_their_definitions(wiring, norm):
    depth = 3 if wiring in ("each", "both") else 2
    model = ready(translator(settings(wiring=wiring, norm=norm, depth=3, decoder_depth=depth), VOCAB))
    source, target, real = words(N), words(M, seed=2), some(3, N)
    layers, x = [], model.encoder.embed(source, real)
    for block in model.encoder.stack:
        x = block(x, real)
        layers.append(x)
    last = layers[-1] if norm == "post" else model.encoder.stack.final_norm(layers[-1])
    if wiring == "last":
        contexts = [last] * depth
    else:
        contexts = layers = [*(model.wiring.norms[i](x) for i, x in enumerate(layers[:-1])), last]
    if wiring == "both":
        contexts = [*((x + last) / 2 for x in layers[:-1]), last]
    if wiring == "mixed":
        nn.init.normal_(model.wiring.weights)
        contexts = [sum(w * x for w, x in zip(row.softmax(0), layers, strict=True)) for row in model.wiring.weights]
    y = model.embed(target)
    for block, context in zip(model.decoder, contexts, strict=True):
        y = block(y, context=context, context_valid=real)
    y = y if norm == "post" else model.decoder.final_norm(y)
    found = model(source, real, target)
    close(found, y @ model.head.map.weight.T)
    found.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


# the paper, by torch


def copied(ours: Stack, theirs: nn.Module) -> None:
    """The weights of torch's layers into our blocks."""
    for block, layer in zip(ours, theirs.layers, strict=True):
        pairs = [(block.mixer, layer.self_attn), *([(block.cross, layer.multihead_attn)] if block.cross is not None else [])]
        with torch.no_grad():
            for mixer, attention in pairs:
                for part, weight, bias in zip(
                    (mixer.q, mixer.k, mixer.v), attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True
                ):
                    part.weight.copy_(weight)
                    part.bias.copy_(bias)
                mixer.out.load_state_dict(attention.out_proj.state_dict())
        block.channel.up.load_state_dict(layer.linear1.state_dict())
        block.channel.down.load_state_dict(layer.linear2.state_dict())
        norms = [block.mixer_norm, *([block.cross_norm] if block.cross is not None else []), block.channel_norm]
        for at, norm in enumerate(norms, 1):
            norm.load_state_dict(getattr(layer, f"norm{at}").state_dict())
    if ours.final_norm is not None:
        ours.final_norm.load_state_dict(theirs.norm.state_dict())


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_an_encoder_and_a_decoder_are_torchs_own(norm, activation):
    config = settings(norm=norm, depth=2, activation=activation)
    options = {"dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm == "pre"}
    options |= {"dtype": torch.float64, "device": DEVICE}
    reads, tells = (kind(WIDTH, HEADS, 48, **options) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    final = [nn.LayerNorm(WIDTH, device=DEVICE, dtype=torch.float64) if norm == "pre" else None for _ in range(2)]
    theirs = nn.TransformerEncoder(reads, 2, final[0], enable_nested_tensor=False), nn.TransformerDecoder(tells, 2, final[1])
    ours = ready(stack(config)), ready(stack(config, causal=True, reads=True))
    for mine, torchs in zip(ours, theirs, strict=True):
        for p in torchs.parameters():
            nn.init.normal_(p, 0.1, 0.3)
        copied(mine, torchs)
    x, y, real = data(N).requires_grad_(), data(M, seed=2).requires_grad_(), some(3, N)
    read = ours[0](x, real)
    wanted = theirs[0](x, src_key_padding_mask=~real)
    close(read[real], wanted[real])
    ahead = nn.Transformer.generate_square_subsequent_mask(M, device=DEVICE, dtype=torch.float64)
    told = ours[1](y, context=read, context_valid=real)
    expected = theirs[1](y, wanted, tgt_mask=ahead, memory_key_padding_mask=~real, tgt_is_causal=True)
    close(told, expected)
    found, known = (torch.autograd.grad(z.square().sum(), (x, y)) for z in (told, expected))
    close(found[0][real], known[0][real])
    close(found[1], known[1])


@pytest.mark.parametrize("gated", [False, True])
def test_the_feedforward_layer_is_a_convolution_with_windows_of_one(gated):
    made, x = ready(FeedForward(WIDTH, 20, gated=gated, activation="gelu")), data(N).requires_grad_()
    conv = feedforward_as_conv(made)
    close(conv(x.mT).mT, made(x))
    one, two = (torch.autograd.grad(y.square().sum(), x)[0] for y in (conv(x.mT), made(x)))
    close(one, two)
    assert sum(p.numel() for p in conv.parameters()) == sum(p.numel() for p in made.parameters())
    if not gated:  # by torch's modules alone, as the paper says it
        up, down = nn.Conv1d(WIDTH, 20, 1), nn.Conv1d(20, WIDTH, 1)
        for there, here in ((up, made.up), (down, made.down)):
            there.load_state_dict({"weight": here.weight[..., None], "bias": here.bias})
        close(nn.Sequential(up, nn.GELU(), down).to(DEVICE, torch.float64)(x.mT).mT, made(x))


def test_glorot_draws_projections_within_its_bounds():
    body = glorot(Stack.of("softmax", width=64, heads=4, ffn=192))
    bound = math.sqrt(6 / (64 + 192))
    assert bound * 0.98 < body.blocks[0].channel.up.weight.abs().max() <= bound
    for part in (body.blocks[0].mixer.q, body.blocks[0].mixer.out):
        assert math.sqrt(6 / 128) * 0.98 < part.weight.abs().max() <= math.sqrt(6 / 128)
