"""Any model with `start` and `extend`, ready for fast decoding: CUDA graphs on a GPU, packed weights on a CPU.

`model.extend(state, token)` for one token of every row is always the same list of kernels once its state has constant shapes.
Linear attention, recurrent networks and convolutions have such states; KV caches get them by a fixed room (`state_buffers.py`).
When the room is full the model makes one ordinary step, which drops keys that no later query sees, and the state moves into new
buffers.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.models.causal_lm import last_real
from regard.runtime.decode_graph import DecodeGraph
from regard.runtime.fused_step import fuse_steps
from regard.runtime.packed_linear import fuse_qkv, pack_linears
from regard.runtime.state_buffers import StateBuffers, buffer_key, own_caches, spare_room

MAX_DECODE_GRAPHS = 8  # states of different shapes whose graphs are kept
MIN_POSITIONS = 1024  # tables of positions have at least so many rows; twice as many whenever they end


class GraphedState(NamedTuple):
    """A state of a `GraphedDecoder` on a GPU: an ordinary one, or one that lies in the buffers of a graph.

    In buffers it goes forwards only: the next step overwrites it. `select` with `within=True` stays there; `fan` and any other
    `select` copy it out first.
    """

    value: Any  # the model's own state; None: it lies in the buffers
    graph: DecodeGraph | None = None
    turn: int = 0
    rows: Tensor | None = None  # (b) rows to take before the next step

    def plain(self) -> Any:
        """Return the model's own state."""
        if self.graph is None:
            return self.value
        self.check_turn()
        value = self.graph.value()
        return value if self.rows is None else value.select(self.rows, within=True)

    def check_turn(self) -> None:
        if self.graph is not None and self.graph.turn != self.turn:
            raise ValueError("this state was extended before, or its buffers hold another sequence now: use the model itself")

    def fan(self, k: int) -> GraphedState:
        return GraphedState(self.plain().fan(k))

    def select(self, rows: Tensor, within: bool = False) -> GraphedState:
        if self.graph is None or not within:
            return GraphedState(self.plain().select(rows, within))
        return self._replace(rows=rows if self.rows is None else self.rows[rows])


class GraphedDecoder:
    """A model with `start` and `extend`, as it is now, for `generate`, `generate_stream` and `beam`.

        fast = GraphedDecoder(model)
        generate(fast, fast.start(batch), prompt, constraints=constraints)

    Scores are the model's own; weights that change later are not noticed. Queries, keys and values of a layer are one product.
    On a GPU a step of one token is one CUDA graph, for each number of rows and each shape of the state. `room` is the number of
    tokens that a KV cache has room for at first; it is doubled as needed. A model whose state has no constant shapes decodes by
    its own `extend`, and `refused` holds the reasons. On a CPU, or with graphs=False, weights are packed where
    that is possible, and states are the model's own.

    `model` is any module with `start` and `extend`.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import language_model
    >>> model = language_model(Config(width=16, heads=2, depth=1, ffn=32), vocab=20).eval()
    >>> from regard.decoding import Constraints, GraphedDecoder, generate
    >>> fast, prompt, limits = GraphedDecoder(model, room=16), torch.randint(1, 20, (2, 3)), Constraints(eos=0, max_new_tokens=4)
    >>> slow = generate(model, model.start(2), prompt, constraints=limits)
    >>> generate(fast, fast.start(2), prompt, constraints=limits) == slow
    True
    """

    def __init__(self, model: nn.Module, *, room: int = 256, graphs: bool = True) -> None:
        if model.training:
            raise ValueError("a decoder is for inference, and this model is in training mode: call model.eval() first")
        for name in ("start", "extend"):
            if not callable(getattr(model, name, None)):
                raise ValueError(f"a {type(model).__name__} does not decode token by token: it has no {name}()")
        self.model: Any = pack_linears(fuse_qkv(model))
        self.step_model: Any = None  # the same model for steps of one token, made by the first of them
        self.device = next(model.parameters()).device
        self.graphs = graphs and self.device.type == "cuda"
        self.room, self.limit = max(room, 1), _longest(model)
        self.steps: OrderedDict[Any, DecodeGraph] = OrderedDict()
        self.refused: dict[Any, str] = {}  # why a state of some shape is not extended by a graph
        self.pool = torch.cuda.graph_pool_handle() if self.graphs else None

    @torch.no_grad()
    def start(self, *args: Any, **options: Any) -> Any:
        """Return the state before the first token: the model's own `start`."""
        state = self.model.start(*args, **options)
        return GraphedState(state) if self.graphs else state

    @torch.no_grad()
    def last(self, state: Any, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Prefill: scores (b v) of what follows the last real token of a prompt (b n), and the state after it."""
        own = state.plain() if self.graphs else state
        if hasattr(self.model, "last"):
            scores, after = self.model.last(own, tokens, valid)
        else:
            scores, after = self.model.extend(own, tokens, valid)
            scores = last_real(scores, valid)
        return scores, GraphedState(after) if self.graphs else after

    @torch.no_grad()
    def extend(self, state: Any, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Scores (b n v) of what follows each of these tokens (b n), and the state after them."""
        if not self.graphs:
            return self.model.extend(state, tokens, valid)
        state.check_turn()
        graph = self._graph(state) if tokens.shape[1] == 1 and valid is None else None
        if graph is None:
            scores, after = self.model.extend(state.plain(), tokens, valid)
            return scores, GraphedState(after)
        if tokens.shape != graph.tokens.shape:
            raise ValueError(f"{len(tokens)} tokens for {len(graph.tokens)} rows")
        scores = graph.step(tokens, state.rows)
        return scores, GraphedState(None, graph, graph.turn)

    def _graph(self, state: GraphedState) -> DecodeGraph | None:
        """Return the graph that extends a state, with the state in its buffers; None: the model itself does."""
        if state.graph is not None:
            return state.graph if state.graph.left > 0 else None
        if torch.is_autocast_enabled(self.device.type):
            return None
        own = state.value
        longest = own.start if own.start is not None else int(own.t.max())
        if self.limit is not None and longest >= self.limit:
            return None  # the model itself refuses what is too long
        bound = spare_room(longest, MIN_POSITIONS, self.limit)
        room_for = partial(spare_room, base=self.room, limit=self.limit)
        key = bound, buffer_key(own, room_for)
        if key not in self.steps and key not in self.refused:
            self._make(key, own, bound, room_for)
        graph = self.steps.get(key)
        if graph is None:
            return None
        self.steps.move_to_end(key)
        graph.load(own, min([bound - longest, *(room_for(x.size) - x.size for x in own_caches(own))]))
        return graph

    def _make(self, key: Any, own: Any, bound: int, room_for: Any) -> None:
        """Make the graph of a step, or write down why there is none."""
        with torch.inference_mode(False), torch.no_grad():  # buffers outlive the mode they are made in
            if self.step_model is None:
                self.step_model = fuse_steps(self.model)
            graph = DecodeGraph(self.step_model, own, StateBuffers(own, room_for), bound, self.pool)
            try:
                why = graph.why_not(own)
                if why is None:
                    graph.captured[False] = graph.capture(False)
            except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
                why = str(error).splitlines()[0]
        if why is not None:
            self.refused[key] = why
            warnings.warn(f"a decoding step is not captured as a CUDA graph, the model itself decodes: {why}", stacklevel=2)
            return
        self.steps[key] = graph
        while len(self.steps) > MAX_DECODE_GRAPHS:
            self.steps.popitem(last=False)


def _longest(model: nn.Module) -> int | None:
    """Return the most tokens that all parts of a model were built for; None: any number."""
    limits = []
    for module in model.modules():
        dims = getattr(module, "dims", None)
        if dims is not None and not getattr(dims, "cross", False):
            limits.append(dims.max_len)
    return min((x for x in limits if x is not None), default=None)
