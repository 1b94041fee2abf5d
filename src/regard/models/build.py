"""Models from a configuration: one function for each kind."""

from __future__ import annotations

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
    """The body that a configuration describes: an encoder's, or a decoder's that is causal, reads a context, or both."""
    inside = add_positions(config.positions, _dims(config))[1]
    own = config.depth if not reads or config.decoder_depth is None else config.decoder_depth
    return Stack.of(
        config.mixer,
        width=config.width,
        heads=config.heads,
        depth=own if depth is None else depth,
        causal=causal,
        max_len=config.max_len,
        positions=inside,
        cross=config.cross if reads else None,
        context_len=config.max_len if reads else None,
        ffn=lambda: FeedForward(
            config.width, config.ffn, activation=config.activation, gated=config.gated, dropout=config.dropout
        ),
        norm=config.norm,
        dropout=config.dropout,
        weight_dropout=config.weight_dropout,
    )


def tokens(config: Config, vocab: int) -> Tokens:
    """Embeddings of a vocabulary, and where its tokens stand."""
    return Tokens(vocab, config.width, positions=added(config), dropout=config.dropout)


def added(config: Config) -> Positions | None:
    """The positions of the configuration, if they are of the kind that is added to tokens."""
    return add_positions(config.positions, _dims(config))[0]


def encoder(config: Config, embed: Embedding, *, front: int = 0) -> Encoder:
    return Encoder(embed, glorot(stack(config)), front=front)


def language_model(config: Config, vocab: int) -> LanguageModel:
    embed = tokens(config, vocab)
    head = NextToken(config.width, vocab, table=embed.table if config.share else None)
    return LanguageModel(embed, glorot(stack(config, causal=True)), head)


def translator(config: Config, vocab: int, target_vocab: int | None = None) -> Translator:
    """With one vocabulary for both sides, `config.share` makes one table of it for source, target and output."""
    source = tokens(config, vocab)
    target = tokens(config, vocab if target_vocab is None else target_vocab)
    if config.share and target_vocab is None:
        target.table = source.table
    head = NextToken(config.width, target.vocab, table=target.table if config.share else None)
    body = glorot(stack(config, causal=True, reads=True))
    return Translator(encoder(config, source), target, body, head, wiring=config.wiring)


def glorot(body: Stack) -> Stack:
    """The weights of projections and feed-forward layers drawn as the Transformer's are. Glorot & Bengio 2010."""
    for module in body.modules():
        maps: list[Tensor] = []
        if isinstance(module, Attention):
            maps = [part.weight for part in (module.q, module.k, module.v, module.out) if isinstance(part, nn.Linear)]
        elif isinstance(module, FeedForward):
            gate_and_value = module.up.weight.detach().chunk(2 if module.gated else 1)  # two maps, not one of twice the size
            maps = [*gate_and_value, module.down.weight]
        for weight in maps:
            nn.init.xavier_uniform_(weight)
    return body


def _dims(config: Config) -> Dims:
    return Dims(config.width, config.heads, max_len=config.max_len)
