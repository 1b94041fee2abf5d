"""Models from a configuration: one function for each kind."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from regard.blocks.feedforward import FeedForward
from regard.blocks.stack import Stack
from regard.config import Config
from regard.mixers.attention import Attention
from regard.mixers.base import Dims
from regard.mixers.position_interface import Positions
from regard.models.causal_lm import LanguageModel
from regard.models.embedding import Embedding, Tokens, add_positions
from regard.models.encoder import Encoder
from regard.models.heads import NextToken
from regard.models.translator import Translator


def stack(config: Config, *, causal: bool = False, reads: bool = False, depth: int | None = None) -> Stack:
    """Build the stack that a configuration describes: an encoder's, or a decoder's that is causal, reads a context, or both."""
    _, inside = add_positions(config.positions, _dims(config))
    if depth is None:
        depth = config.depth if not reads or config.decoder_depth is None else config.decoder_depth
    feedforward = partial(
        FeedForward, config.width, config.ffn, activation=config.activation, gated=config.gated, dropout=config.dropout
    )
    return Stack.of(
        config.mixer,
        width=config.width,
        heads=config.heads,
        depth=depth,
        causal=causal,
        max_len=config.max_len,
        positions=inside,
        cross=config.cross if reads else None,
        context_len=config.max_len if reads else None,
        ffn=feedforward,
        norm=config.norm,
        dropout=config.dropout,
        weight_dropout=config.weight_dropout,
    )


def tokens(config: Config, vocab: int) -> Tokens:
    """Build the embedding of a vocabulary, with the positions that are added to tokens."""
    positions = added(config)
    return Tokens(vocab, config.width, positions=positions, dropout=config.dropout)


def added(config: Config) -> Positions | None:
    """Return the positions of the configuration, if they are of the kind that is added to tokens."""
    outside, _ = add_positions(config.positions, _dims(config))
    return outside


def encoder(config: Config, embed: Embedding, *, front: int = 0) -> Encoder:
    body = glorot(stack(config))
    return Encoder(embed, body, front=front)


def language_model(config: Config, vocab: int) -> LanguageModel:
    """Build a language model: tokens (b n) to scores (b n v) of what follows each.

    `config` has the sizes and the mechanism, `vocab` is the number of tokens; with `config.share` embedding and output have one
    table.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import language_model
    >>> model = language_model(Config(width=16, heads=2, depth=1, ffn=32), vocab=20)
    >>> tuple(model(torch.randint(20, (2, 5))).shape)
    (2, 5, 20)
    """
    embed = tokens(config, vocab)
    head = NextToken(config.width, vocab, table=embed.table if config.share else None)
    body = glorot(stack(config, causal=True))
    return LanguageModel(embed, body, head)


def translator(config: Config, vocab: int, target_vocab: int | None = None) -> Translator:
    """Build an encoder-decoder; with one vocabulary, `config.share` gives source, target and output the same table.

    `config` has the sizes and the mechanisms, `vocab` is the number of source tokens and, unless `target_vocab` is given, of
    target tokens.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import translator
    >>> model = translator(Config(width=16, heads=2, depth=1, ffn=32), vocab=20)
    >>> source, target = torch.randint(1, 20, (2, 5)), torch.randint(1, 20, (2, 7))
    >>> tuple(model(source, None, target).shape)
    (2, 7, 20)
    """
    source = tokens(config, vocab)
    target = tokens(config, vocab if target_vocab is None else target_vocab)
    if config.share and target_vocab is None:
        target.table = source.table
    return translator_of(config, source, target)


def translator_of(config: Config, source: Embedding, target: Tokens) -> Translator:
    """Build an encoder-decoder from the embedding of its source, of any kind, and that of its target tokens."""
    head = NextToken(config.width, target.vocab, table=target.table if config.share else None)
    body = glorot(stack(config, causal=True, reads=True))
    return Translator(encoder(config, source), target, body, head, wiring=config.wiring)


def glorot(body: Stack) -> Stack:
    """Draw the weights of projections and feed-forward layers as the Transformer does. Glorot & Bengio 2010."""
    for module in body.modules():
        maps: list[Tensor] = []
        if isinstance(module, Attention):
            projections = (module.q, module.k, module.v, module.out)
            maps = [part.weight for part in projections if isinstance(part, nn.Linear)]
        elif isinstance(module, FeedForward):
            count = 2 if module.gated else 1  # gate and value are two maps, not one of twice the size
            up = module.up.weight.detach()
            maps = [*up.chunk(count), module.down.weight]
        for weight in maps:
            nn.init.xavier_uniform_(weight)
    return body


def _dims(config: Config) -> Dims:
    return Dims(config.width, config.heads, max_len=config.max_len)
