"""What stands around the body of a model: embeddings and heads by their formulas, padding as if absent, mistakes as sentences."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import DEVICE, HEADS, WIDTH, close, data, some
from regard.blocks import Stack
from regard.config import Config
from regard.mixers.base import Dims, Places
from regard.models import (
    Encoder,
    LanguageModel,
    MaskedToken,
    Matcher,
    Matching,
    NextToken,
    Patches,
    PerSequence,
    PerVector,
    Reader,
    Spelled,
    Tokens,
    Translator,
    Vectors,
    language_model,
    pooled,
    translator,
)
from regard.models.build import encoder, stack, tokens
from regard.positions import positions
from test_models import VOCAB, M, N, hidden_from, ready, settings, words

# the way in


def test_tied_tables_are_one_parameter_that_learns_from_both_ends():
    model = translator(settings(), VOCAB).to(DEVICE)
    table = model.head.map.weight
    assert model.encoder.embed.table.weight is table and model.embed.table.weight is table
    assert sum(p is table for p in model.parameters()) == 1
    model(torch.full((1, 3), 5, device=DEVICE), None, torch.full((1, 4), 6, device=DEVICE))[..., 7].sum().backward()
    assert (table.grad[[5, 6, 7]].abs().sum(1) > 0).all() and (table.grad[[8, 9]] == 0).all()
    two = translator(settings(), VOCAB, VOCAB + 3)
    assert two.encoder.embed.table.weight.shape == (VOCAB, WIDTH) and two.embed.table.weight is two.head.map.weight
    apart = translator(settings(share=False), VOCAB)
    assert len({id(x) for x in (apart.encoder.embed.table.weight, apart.embed.table.weight, apart.head.map.weight)}) == 3
    spoken = language_model(settings(), VOCAB)
    assert spoken.head.map.weight is spoken.embed.table.weight
    assert language_model(settings(share=False), VOCAB).head.map.weight.shape == (VOCAB, WIDTH)


def test_tokens_are_scaled_and_placed_and_positions_go_on_after_a_state():
    embed = ready(Tokens(VOCAB, WIDTH, positions=positions("sinusoidal", Dims(WIDTH, HEADS))))
    x = words(N)
    places = embed.positions.table(N, DEVICE).to(torch.float64)
    close(embed(x), embed.table.weight[x] * math.sqrt(WIDTH) + places)
    plain = ready(Tokens(VOCAB, WIDTH, scale=False))
    close(plain(x), plain.table.weight[x])
    assert plain(x[:, :0]).shape == (3, 0, WIDTH)
    model = Stack.of("softmax", width=WIDTH, heads=HEADS, causal=True).to(DEVICE, torch.float64)
    valid = some(3, N)
    _, state = model.extend(model.start(3), embed(x, valid), valid)
    for row in range(3):
        close(embed(x, None, state)[row], embed.table.weight[x[row]] * math.sqrt(WIDTH) + positioned(embed, valid[row].sum()))


def positioned(embed, start):
    return embed.positions.table(int(start) + N, DEVICE)[int(start) :].to(torch.float64)


def test_vectors_are_a_linear_map():
    embed, x, valid = ready(Vectors(5, WIDTH)), data(N, width=5), some(3, N)
    close(embed(x), x @ embed.map.weight.T + embed.map.bias)
    close(embed(x, valid)[valid], embed(x)[valid])
    assert (embed(x, valid)[~valid] == 0).all()


@pytest.mark.parametrize("placed", [None, "learned"])
def test_patches_are_cut_out_and_mapped(placed):
    where = None if placed is None else positions(placed, Dims(WIDTH, HEADS, max_len=12))
    embed, x = ready(Patches(3, 4, WIDTH, positions=where)), data(8 * 12, width=2 * 3).reshape(3, 6, 8, 12)[:, :3]
    cut = F.unfold(x, 4, stride=4).mT  # (b n c * 4 * 4)
    expected = cut @ embed.map.weight.flatten(1).T + embed.map.bias
    close(embed(x), expected if where is None else where.add(expected, Places.of(expected)))
    read = ready(Encoder(embed, Stack.of("softmax", width=WIDTH, heads=HEADS), front=1))
    assert read(x).x.shape == (3, 7, WIDTH)
    assert ready(Reader(read, PerSequence(WIDTH, 5, pool="token")))(x).shape == (3, 5)


def spelled_by_hand(embed, word, letters):
    """One word: the best answer of every filter at any of its letters, beside the word."""
    e = embed.letters(letters[letters != 0])
    around = F.pad(e, (0, 0, 1, 1))
    filters = embed.window.weight.permute(0, 2, 1)  # (spelling, 3, 64)
    answers = [(filters * around[i : i + 3]).sum((1, 2)) + embed.window.bias for i in range(len(e))]
    best = torch.stack(answers).amax(0).relu() if answers else e.new_zeros(len(filters))
    return embed.map(torch.cat([embed.words(word), best]))


def test_spelled_words_are_windows_of_letters_and_padding_of_both_is_as_if_absent():
    embed = ready(Spelled(VOCAB, 30, WIDTH, spelling=10, positions=positions("sinusoidal", Dims(WIDTH, HEADS))))
    letters = words(N * 7, vocab=30).view(3, N, 7) % 29 + 1
    lengths = words(N, seed=3, vocab=8)
    letters = letters.where(torch.arange(7, device=DEVICE) < lengths[..., None], 0)
    x, valid = torch.cat([words(N)[..., None], letters], -1), some(3, N)
    y = embed(x)
    for b, n in ((0, 0), (1, 5), (2, 12)):
        close(y[b, n] - embed.positions.table(N, DEVICE)[n], spelled_by_hand(embed, x[b, n, 0], x[b, n, 1:]))
    close(embed(F.pad(x, (0, 4))), y)  # more padding behind the letters
    padded = embed(torch.where(valid[..., None], x, 0), valid)
    assert (padded[~valid] == 0).all()
    for row in range(3):
        close(padded[row][valid[row]], embed(x[row][valid[row]][None])[0])
    embed(x).square().sum().backward()
    assert (embed.letters.weight.grad[0] == 0).all()


def test_some_words_are_forgotten_in_training_alone_so_that_spelling_is_learned():
    embed = ready(Spelled(VOCAB, 30, WIDTH, forget=0.3))
    x = torch.cat([torch.full((8, 250, 1), 9), torch.full((8, 250, 3), 4)], -1).to(DEVICE)
    assert torch.equal(embed(x), embed(x)) and (embed(x) == embed(x)[0, 0]).all()
    unknown = x.clone()
    unknown[..., 0] = 1
    forgotten = torch.isclose(embed.train()(x), embed.eval()(unknown)).all(-1)
    assert abs(forgotten.double().mean().item() - 0.3) < 0.04


# the way out


@pytest.mark.parametrize("pool", ["token", "mean", "max"])
def test_pooling_is_over_real_tokens(pool):
    x, valid = data(N), some(3, N)
    valid[0, :4] = False
    y = pooled(torch.where(valid[..., None], x, 1e9), valid, pool)
    take = {"token": lambda z: z[0], "mean": lambda z: z.mean(0), "max": lambda z: z.amax(0)}[pool]
    for row in range(3):
        close(y[row], take(x[row][valid[row]]))
        close(pooled(x, None, pool)[row], take(x[row]))
    assert (pooled(x, torch.zeros_like(valid), pool) == 0).all() and (pooled(x[:, :0], None, pool) == 0).all()
    head = ready(PerSequence(WIDTH, 5, pool=pool))
    close(head(x, valid), pooled(x, valid, pool) @ head.map.weight.T + head.map.bias)


def test_heads_are_their_formulas():
    x = data(N)
    label = ready(PerVector(WIDTH, 5))
    close(label(x), x @ label.map.weight.T + label.map.bias)
    table = nn.Embedding(VOCAB, WIDTH)
    masked = ready(MaskedToken(WIDTH, VOCAB, table=table))
    inner = F.layer_norm(F.gelu(masked.change(x)), (WIDTH,), masked.norm.weight, masked.norm.bias)
    close(masked(x), inner @ table.weight.T + masked.next.map.bias)
    assert masked.next.map.weight is table.weight and (masked.next.map.bias == 0).all()
    said = ready(NextToken(WIDTH, VOCAB))
    close(said(x), x @ said.map.weight.T)


def test_a_matcher_reads_both_sides_alike_and_padding_is_as_if_absent():
    config = settings()
    model = ready(Matcher(encoder(config, tokens(config, VOCAB)), Matching(WIDTH, 3)))
    x, y, one, two = words(N), words(M, seed=2), some(3, N), some(3, M, seed=5)
    u, v = (pooled(model.encoder(z, valid).x, valid, "mean") for z, valid in ((x, one), (y, two)))
    first, last = model.head.map[0], model.head.map[-1]
    found = model(hidden_from(x, one), hidden_from(y, two), one, two)
    close(found, last(first(torch.cat([u, v, u * v, (u - v).abs()], -1)).relu()))
    close(found[1], model(x[1][one[1]][None], y[1][two[1]][None])[0])


# sentences

CAUSAL, OPEN, READS = (
    Stack.of("softmax", width=WIDTH, heads=HEADS, causal=c, cross=r) for c, r in ((True, None), (False, None), (True, "softmax"))
)
EMBED = Tokens(VOCAB, WIDTH)
HEAD = NextToken(WIDTH, VOCAB)
MISTAKES = {
    "float tokens": (lambda: EMBED(torch.zeros(3, 4)), "whole numbers of shape .* not torch.float32"),
    "bool tokens": (lambda: EMBED(torch.zeros(3, 4).bool()), "whole numbers of shape .* not torch.bool"),
    "one sequence without a batch": (lambda: EMBED(words(5)[0].cpu()), r"\(batch, length\), not torch.int64 of shape \(5,\)"),
    "valid of another length": (lambda: EMBED(words(5).cpu(), torch.ones(3, 4).bool()), r"\(batch, length\) = \(3, 5\)"),
    "valid of numbers": (lambda: EMBED(words(5).cpu(), torch.ones(3, 5)), "bool tensor, True = real token"),
    "positions that act inside": (
        lambda: Tokens(VOCAB, WIDTH, positions=positions("rotary", Dims(WIDTH, HEADS))),
        "rotary positions act inside the mixers",
    ),
    "vectors of another width": (
        lambda: Vectors(5, 8)(torch.zeros(3, 4, 6)),
        r"\(batch, length, 5\), not torch.float32 of shape \(3, 4, 6\)",
    ),
    "whole numbers as vectors": (lambda: Vectors(5, 8)(words(5)[..., None].expand(-1, -1, 5).cpu()), "not torch.int64"),
    "an image that cannot be cut": (lambda: Patches(3, 4, 8)(torch.zeros(1, 3, 8, 9)), "both divisible by 4, not"),
    "an image of bytes": (lambda: Patches(3, 4, 8)(torch.zeros(1, 3, 8, 8).byte()), "not torch.uint8"),
    "an image with padding": (lambda: Patches(1, 2, 8)(torch.zeros(1, 1, 2, 2), torch.ones(1, 1).bool()), "read whole"),
    "words without letters": (lambda: Spelled(9, 9, 8)(words(4).cpu()), r"\(batch, length, 1 \+ letters\)"),
    "letters that are no numbers": (lambda: Spelled(9, 9, 8)(torch.zeros(1, 2, 3)), "not torch.float32"),
    "a causal encoder": (lambda: Encoder(EMBED, CAUSAL), "its stack is not causal"),
    "an encoder that reads": (lambda: Encoder(EMBED, READS), "reads no context"),
    "a language model that sees all": (lambda: LanguageModel(EMBED, OPEN, HEAD), "must not see what it is to say"),
    "a decoder that does not read": (
        lambda: Translator(Encoder(EMBED, OPEN), EMBED, CAUSAL, HEAD),
        "must read the encoder: build its stack with cross=",
    ),
    "each with two depths": (
        lambda: translator(settings(wiring="each", decoder_depth=2), VOCAB),
        "as many encoder as decoder layers, not 1 and 2",
    ),
    "both with two depths": (
        lambda: translator(settings(wiring="both", depth=3, decoder_depth=2), VOCAB),
        "wiring='both' needs as many encoder as decoder layers, not 3 and 2",
    ),
    "a wiring that is none": (lambda: translator(settings(wiring="all"), VOCAB), "one of last, each, both, mixed, not 'all'"),
    "layers of different lengths": (
        lambda: encoder(settings(mixer="pooled_queries(rate=2)"), EMBED)(words(4).cpu(), layers=True),
        "different lengths cannot be read side by side",
    ),
    "a mixer without the past alone": (lambda: language_model(settings(mixer="fnet"), VOCAB), "cannot do causal"),
    "positions inside what has no queries": (
        lambda: translator(settings(mixer="conv", positions="rotary"), VOCAB),
        "conv has no queries and keys",
    ),
    "a shared table of another size": (lambda: NextToken(8, 9, table=nn.Embedding(9, 4)), r"\(9, 4\), but \(9, 8\)"),
    "a pool that is none": (lambda: PerSequence(8, 2, pool="sum"), "no pool is called 'sum': there is token, mean, max"),
    "too long a source": (lambda: translator(settings(max_len=4), VOCAB)(words(5).cpu(), None, words(2).cpu()), "max_len=4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_sentence(name):
    make, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_the_mean_of_a_long_half_precision_sequence_does_not_overflow():
    x, valid = (
        torch.full((1, 2048, 1), 64.0, dtype=torch.float16, device=DEVICE),
        torch.ones(1, 2048, dtype=torch.bool, device=DEVICE),
    )
    assert pooled(x, valid, "mean").item() == 64 and pooled(x, valid, "mean").dtype == torch.float16


@pytest.mark.parametrize("head", [PerSequence, Matching])
def test_an_unknown_pool_is_refused_when_a_head_is_built(head):
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        head(8, 3, pool="means")


@pytest.mark.parametrize("reads", [False, True])
def test_a_decoder_has_its_own_depth_and_none_is_not_zero(reads):
    config = Config(width=16, heads=2, ffn=16, depth=2)
    assert len(stack(config, reads=reads).blocks) == 2
    assert len(stack(config.replace({"decoder_depth": 3}), reads=reads).blocks) == (3 if reads else 2)
    if reads:
        with pytest.raises(ValueError, match="depth"):
            stack(config.replace({"decoder_depth": 0}), reads=True)


@pytest.mark.parametrize("gated", [False, True])
def test_every_map_of_a_feed_forward_layer_is_drawn_by_its_own_size(gated):
    torch.manual_seed(0)
    up = encoder(Config(width=64, heads=4, ffn=192, depth=1, gated=gated), Vectors(3, 64)).stack.blocks[0].channel.up.weight
    assert up.abs().max().item() == pytest.approx(math.sqrt(6 / (64 + 192)), rel=1e-3)
