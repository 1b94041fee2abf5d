"""Non-autoregressive decoding as one CUDA graph: on a GPU a whole answer is one launch, and the host waits once.

One sentence is a few hundred small kernels: their launches take longer than they do. As a CUDA graph they are one launch.
A graph has one shape, so sources are padded to multiples of `SOURCE_MULTIPLE` tokens. Where a length is predicted there are slots
for the longest possible one: the host does not wait for the prediction.

Letters: b rows, n source tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.decoding.nat_decoding import answer_tokens, check_nat_options, generate_nat, nat_tokens
from regard.mixers.base import Can
from regard.models.nat import NatTranslator
from regard.positions import Learned
from regard.runtime.cuda_graph import capture_graph
from regard.runtime.packed_linear import pack_linears

SOURCE_MULTIPLE = 16  # tokens: with graphs a source gets room in multiples of so many
MAX_GRAPHS = 32  # graphs that are kept

GraphKey = tuple[int, int, int, int]  # rows, source tokens, lengths, iterations


class NatGraph:
    """Compute answers from sources (b n), all on the device. `run` is what the graph captures."""

    def __init__(self, model: NatTranslator, key: GraphKey, device: torch.device, pool: Any) -> None:
        b, n, self.lengths, self.iterations = key
        self.model, self.pool = model, pool
        self.source = torch.zeros(b, n, dtype=torch.long, device=device)
        self.valid = torch.ones(b, n, dtype=torch.bool, device=device)
        try:
            self.tokens = self.captured(device)
        except RuntimeError as why:
            raise RuntimeError("this model cannot be captured as a CUDA graph: use graphs=False") from why

    def captured(self, device: torch.device) -> Tensor:
        """Capture the pass; return the tensor that every replay writes its answers to."""
        self.graph, tokens, self.read = capture_graph(self.run, device, pool=self.pool)
        return tokens

    def run(self) -> Tensor:
        return nat_tokens(self.model, self.source, self.valid, self.lengths, self.iterations, wait=False)

    def replay(self, source: Tensor, valid: Tensor) -> Tensor:
        self.source.copy_(source)
        self.valid.copy_(valid)
        self.graph.replay()
        return self.tokens


def pad_to_multiple(source: Tensor, valid: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """Pad sources (b n) to the next multiple of SOURCE_MULTIPLE, or to `most`; return also which of their tokens are real."""
    valid = torch.ones_like(source, dtype=torch.bool) if valid is None else valid
    n = source.shape[1]
    more = (0, max(0, min(-(-max(n, 1) // SOURCE_MULTIPLE) * SOURCE_MULTIPLE, most) - n))
    return pad(source, more), pad(valid, more)


class NatDecoder:
    """A model of `regard.models.nat`, as it is now, with the answers of `generate_nat`:

        fast = NatDecoder(model)
        fast(source, source_valid)

    Make another one when weights have changed. On a CPU weights are packed. `graphs`: a pass on a GPU is one CUDA graph, for each
    number of rows, lengths and iterations, and for each SOURCE_MULTIPLE tokens of a source.

    `model` is a NatTranslator.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.decoding import NatDecoder
    >>> from regard.models.nat import nat_translator
    >>> model = nat_translator(Config(width=16, heads=2, depth=1, ffn=32), vocab=20, kind="ctc").eval()
    >>> len(NatDecoder(model)(torch.randint(1, 20, (2, 5))))
    2
    """

    def __init__(self, model: NatTranslator, *, graphs: bool = True) -> None:
        if model.training:
            raise ValueError("a decoder is for inference, and this model is in training: call model.eval() first")
        self.model = pack_linears(model)
        self.device = next(model.parameters()).device
        self.graphs = graphs and self.device.type == "cuda"
        mixers = [block.mixer for body in (model.encoder.stack, model.decoder) for block in body]
        mixers += [block.cross for block in model.decoder if block.cross is not None]
        if self.graphs and (without := [mixer.name for mixer in mixers if Can.PADDING not in mixer.can]):
            raise ValueError(f"{without[0]} takes no padding, and a graph has room for longer sources: use graphs=False")
        limits = [block.mixer.dims.max_len for block in model.encoder.stack]
        if isinstance(model.encoder.embed.positions, Learned):
            limits.append(model.encoder.embed.positions.dims.max_len)
        self.limit = min((x for x in limits if x is not None), default=1 << 30)
        self.passes: OrderedDict[GraphKey, NatGraph] = OrderedDict()
        self.pool = torch.cuda.graph_pool_handle() if self.graphs else None  # they never run at the same time

    @torch.no_grad()
    def __call__(
        self, source: Tensor, source_valid: Tensor | None = None, *, lengths: int = 1, iterations: int = 1
    ) -> list[list[int]]:
        """Return an answer for every row, without eos and blanks; `lengths` and `iterations` are those of `generate_nat`.

        Sources may be on the host.
        """
        if not self.graphs or source.dim() != 2 or source.shape[1] > self.limit or not len(source):
            source, valid = source.to(self.device), None if source_valid is None else source_valid.to(self.device)
            return generate_nat(self.model, source, valid, lengths=lengths, iterations=iterations)
        check_nat_options(self.model, lengths, iterations)
        if torch.is_autocast_enabled(self.device.type):
            raise ValueError("a NAT decoder has one precision: convert it with .to(torch.bfloat16) instead of autocast")
        source, valid = pad_to_multiple(source, source_valid, self.limit)
        return answer_tokens(self._pass((*source.shape, lengths, iterations)).replay(source, valid))

    def _pass(self, key: GraphKey) -> NatGraph:
        if key not in self.passes:
            with torch.inference_mode(False), torch.no_grad():  # a graph outlives the mode it is made in
                self.passes[key] = NatGraph(self.model, key, self.device, self.pool)
        self.passes.move_to_end(key)
        while len(self.passes) > MAX_GRAPHS:
            self.passes.popitem(last=False)
        return self.passes[key]
