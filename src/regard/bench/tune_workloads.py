"""Workloads of `regard tune`: calls of every operation that has kernels, at one head size and type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.bench import tune_candidates as tried
from regard.bench.tune_candidates import Candidates
from regard.bench.workload import TYPES_BY_NAME
from regard.ops.backend import choose_backend
from regard.ops.balance import balance_matrices
from regard.ops.bucket.bucket_op import BucketCall, bucket_attention
from regard.ops.decode_step import StepCall, StepWindow, decoding_step
from regard.ops.delta.delta_op import delta_rule
from regard.ops.delta.unit_features import unit_features
from regard.ops.few_keys import MOST_KEY_ELEMENTS, few_keys_attention, fits_few_keys
from regard.ops.landmark_attention import MOST_LANDMARKS, WIDEST_LANDMARK, LandmarkRule, landmark_attention
from regard.ops.linear.causal_exp_op import causal_exp_attention
from regard.ops.linear.exp_feature_op import ExpMap, exp_key_features, exp_query_features
from regard.ops.linear.linear_op import LinearCall, decayed_prefix_sum
from regard.ops.linear.noncausal_op import noncausal_attention
from regard.ops.pair.pair_op import PairCall
from regard.ops.row_linear import RowMap, RowNorm, add_product, row_product
from regard.ops.sorted_blocks import WIDEST_SORT, SortedCall, sinkhorn_attention
from regard.ops.tile.tile_op import HeadPatterns, tile_attention
from regard.ops.triton_support import HALVES, block_of
from regard.ops.two_blocks import MOST_ELEMENTS, sorted_blocks_attention
from regard.patterns import Pattern
from regard.patterns.tiles import MASKED_SCORE, Span, ceil_div

KERNELS = "triton"  # the backend whose configurations are tuned
STEP_BATCHES = (1, 32)
SORTED_TOKENS = 64  # of a block that is sorted
SORTED_BLOCKS = 256  # of a sequence of 16,384 tokens, whose balance is divided into parts
SORT_ITERATIONS = 16
PassResults = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class TuneShape:
    """Hold the sizes of a workload: batch = tokens / length."""

    width: int = 64  # of a head
    dtype: str = "bf16"
    device: str = "cuda"
    tokens: int = 32768
    length: int = 4096
    heads: int = 8

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)

    @property
    def type(self) -> torch.dtype:
        return TYPES_BY_NAME[self.dtype]

    def normal(self, *sizes: int) -> Tensor:
        """Draw numbers (b h sizes) of the type, the heads of a token side by side, as a layer splits them."""
        n, width = sizes
        x = torch.randn(self.batch, n, self.heads, width, device=self.device)
        return x.to(self.type).transpose(1, 2)

    def tokens_of(self, count: int) -> list[Tensor]:
        """Draw tensors (b h n width)."""
        return [self.normal(self.length, self.width) for _ in range(count)]

    def state(self) -> Tensor:
        """Draw a state (b h width width) in float32."""
        return self.uniform(self.width, self.width) - 0.5

    def uniform(self, *sizes: int) -> Tensor:
        """Draw numbers (b h sizes) from 0 to 1 in float32."""
        return torch.rand(self.batch, self.heads, *sizes, device=self.device)


class TunePass(NamedTuple):
    """One call: results of the forward pass, and of forward and backward where there is a backward pass."""

    forward: PassResults
    both: PassResults | None = None


class TuneCase(NamedTuple):
    """Kernels that are tuned together, with their candidates, and the passes that they are timed on."""

    family: str
    name: str
    candidates: Candidates
    make: Callable[[TuneShape], list[TunePass]]


def _trained(f: Callable[..., Tensor], inputs: Sequence[Tensor]) -> TunePass:
    """Return the passes of a function of tensors, with gradients of all of them."""
    variables = [x.detach().requires_grad_() for x in inputs]
    with torch.no_grad():
        up = torch.randn_like(f(*inputs))

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [f(*variables)]

    def both() -> list[Tensor]:
        out = f(*variables)
        return [out.detach(), *torch.autograd.grad(out, variables, up)]

    return TunePass(forward, both)


def _tile_pass(shape: TuneShape, text: str, causal: bool) -> TunePass:
    patterns = HeadPatterns.of(Pattern.parse(text), shape.heads)
    span = Span(0, shape.length, 0, shape.length)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tile_attention(q, k, v, patterns, span, scale=shape.width**-0.5, causal=causal, backend=KERNELS)[0]

    return _trained(f, shape.tokens_of(3))


def _tile_bands(shape: TuneShape) -> list[TunePass]:
    return [_tile_pass(shape, "Local(256)", True), _tile_pass(shape, "Local(128)", False)]


def _tile_lists(shape: TuneShape) -> list[TunePass]:
    return [_tile_pass(shape, "Blocks(64, around=1) | Random(2, 64)", False)]


def _linear_call(shape: TuneShape, n: int, decay: int, norm: bool) -> LinearCall:
    """Return a call with a decay of so many numbers a token: a norm goes with features that are positive."""
    q, k, v = (shape.normal(n, shape.width) for _ in range(3))
    decays = -0.1 * shape.uniform(n, decay) if decay else None
    norms = shape.uniform(shape.width) if norm else None
    state = shape.state()
    return LinearCall(q, k, v, state, decays, norms, None, "elu" if norm else "identity", 1.0, norm)


def _linear_pass(shape: TuneShape, decay: int, norm: bool) -> TunePass:
    call = _linear_call(shape, shape.length, decay, norm)
    backend = choose_backend("linear", KERNELS, call)

    def f(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor:
        return backend.forward(call._replace(q=q, k=k, v=v, log_decay=log_decay)).out

    inputs = (call.q, call.k, call.v, call.log_decay)
    return _trained(f, [x for x in inputs if x is not None])


def _linear_chunks(shape: TuneShape) -> list[TunePass]:
    return [_linear_pass(shape, 0, True), _linear_pass(shape, 1, False)]


def _linear_features(shape: TuneShape) -> list[TunePass]:
    return [_linear_pass(shape, shape.width, False)]


def _linear_prefix(shape: TuneShape) -> list[TunePass]:
    first, decay = shape.uniform(shape.width), -0.1 * shape.uniform(shape.length, 1)
    return [_trained(lambda x: decayed_prefix_sum(x, first, log_decay=decay, backend=KERNELS), shape.tokens_of(1))]


def _exp_features(shape: TuneShape) -> list[TunePass]:
    """Return features of queries, and of keys with their running maxima."""
    directions = torch.randn(4 * shape.width, shape.width, device=shape.device)
    by = ExpMap(directions, torch.zeros(shape.heads, device=shape.device))
    first = torch.full((shape.batch, shape.heads, 1), -torch.inf, device=shape.device)
    tokens = shape.tokens_of(1)
    queries = _trained(lambda x: exp_query_features(x, by), tokens)
    return [queries, _trained(lambda x: exp_key_features(x, by, first, None).phi, tokens)]


def _causal_features(shape: TuneShape) -> list[TunePass]:
    """Return a causal pass with random features from an empty state."""
    f = 4 * shape.width
    by = ExpMap(torch.randn(f, shape.width, device=shape.device), torch.zeros(shape.heads, device=shape.device))
    heads = (shape.batch, shape.heads)
    s, z = (torch.zeros(*heads, *size, device=shape.device) for size in ((f, shape.width), (f,)))
    top = torch.full((*heads, 1), -torch.inf, device=shape.device)
    return [_trained(lambda q, k, v: causal_exp_attention(q, k, v, None, by, s, z, top)[0], shape.tokens_of(3))]


def _noncausal(shape: TuneShape) -> list[TunePass]:
    """Return passes in which every query sees all keys: elu features, and efficient attention."""
    inputs = shape.tokens_of(3)
    return [_trained(lambda q, k, v, kind=kind: noncausal_attention(q, k, v, None, kind), inputs) for kind in ("elu", "softmax")]


def _noncausal_features(shape: TuneShape) -> list[TunePass]:
    by = ExpMap(torch.randn(4 * shape.width, shape.width, device=shape.device), torch.zeros(shape.heads, device=shape.device))
    return [_trained(lambda q, k, v: noncausal_attention(q, k, v, None, "random", by), shape.tokens_of(3))]


def _delta_inputs(shape: TuneShape, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k of length 1, v and write strengths."""
    q, k, v = (shape.normal(n, shape.width) for _ in range(3))
    strengths = shape.uniform(n, 1).to(shape.type)
    return q, normalize(k, dim=-1), v, strengths


def _delta_pass(shape: TuneShape) -> TunePass:
    state = shape.state()

    def f(q: Tensor, k: Tensor, v: Tensor, strengths: Tensor) -> Tensor:
        return delta_rule(q, k, v, strengths, state, backend=KERNELS)[0]

    return _trained(f, _delta_inputs(shape, shape.length))


def _delta_rules(shape: TuneShape) -> list[TunePass]:
    """Return many short sequences, and one long sequence, where a state walks through more chunks."""
    long = replace(shape, length=16 * shape.length)
    return [_delta_pass(shape), _delta_pass(long)]


def _unit_vectors(shape: TuneShape) -> list[TunePass]:
    return [_trained(lambda x: unit_features(x, silu=True, fused=True), shape.tokens_of(1))]


def _bucket_pass(shape: TuneShape, rounds: int, buckets: int, unit_keys: bool) -> TunePass:
    """Return attention among tokens of labels of uneven size, as those of a hash are."""
    q, k, v = shape.tokens_of(3)
    count = shape.batch * shape.heads * rounds * shape.length
    weights = torch.rand(buckets, device=shape.device) + 0.1
    drawn = torch.multinomial(weights, count, replacement=True)
    labels = drawn.int().view(shape.batch, shape.heads, rounds, shape.length)
    scale = 1.0 if unit_keys else shape.width**-0.5
    call = BucketCall(q, k, v, labels, None, buckets, 128, True, not unit_keys, unit_keys, scale, 0.0)
    return _trained(lambda q, k, v: bucket_attention(call._replace(q=q, k=k, v=v), KERNELS), call[:3])


def _bucket_labels(shape: TuneShape) -> list[TunePass]:
    return [_bucket_pass(shape, 4, 32, True), _bucket_pass(shape, 1, 16, False)]


def _pair_pass(call: PairCall, names: Sequence[str]) -> TunePass:
    """Return a call of all pairs with gradients of some of its fields."""
    backend = choose_backend("pair", KERNELS, call)
    inputs = [getattr(call, name) for name in names]
    return _trained(lambda *x: backend.forward(call._replace(**dict(zip(names, x, strict=True)))), inputs)


def _all_pairs(shape: TuneShape) -> list[TunePass]:
    """Return relu weights, causal and not, a table, and factors."""
    q, k, v = shape.tokens_of(3)
    scale = shape.width**-0.5
    relu = PairCall(q, k, v, norm="sum", scale=scale)
    table = torch.randn(shape.heads, shape.length, shape.length, device=shape.device).to(shape.type)
    columns = ceil_div(shape.length, shape.width)
    x, y = shape.uniform(shape.length, columns), shape.uniform(shape.length, shape.width)
    made = PairCall(q[..., :0], k[..., :0], v, causal=True)
    return [
        _pair_pass(relu, "qkv"),
        _pair_pass(relu._replace(causal=True, norm="count"), "qkv"),
        _pair_pass(made._replace(table=table), ("v", "table")),
        _pair_pass(made._replace(x=x, y=y), "vxy"),
    ]


def _additive_pairs(shape: TuneShape) -> list[TunePass]:
    few = replace(shape, tokens=shape.length)
    q, k, v = few.tokens_of(3)
    w = torch.randn(shape.heads, shape.width, device=shape.device)
    return [_pair_pass(PairCall(q.float(), k.float(), v, w, causal=True), "qkvw")]


def _of_batch(shape: TuneShape, batch: int) -> TuneShape:
    return replace(shape, tokens=batch, length=1)


def _window_pass(shape: TuneShape) -> TunePass:
    """Return a step over a cache of 512 slots, with a window of 256 tokens and 4 sinks."""
    room, t, b = 512, 511, shape.batch
    at = torch.arange(room, device=shape.device).expand(b, -1).contiguous()
    where = torch.full((b, 1), t, device=shape.device)
    slot = torch.full((1,), t, device=shape.device)
    keys, values = (shape.normal(room, shape.width) for _ in range(2))
    q, k, v = (shape.normal(1, shape.width) for _ in range(3))
    window, scale = StepWindow(255, 1, 4, 4), shape.width**-0.5
    call = StepCall(q, keys, values, at, at < t, where, window, scale, k, v, slot)
    return TunePass(lambda: [decoding_step(call)])


def _window_steps(shape: TuneShape) -> list[TunePass]:
    return [_window_pass(_of_batch(shape, b)) for b in STEP_BATCHES]


def _linear_step_pass(shape: TuneShape) -> TunePass:
    call = _linear_call(shape, 1, 0, True)
    backend = choose_backend("linear", KERNELS, call)

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [x for x in backend.forward(call) if x is not None]

    return TunePass(forward)


def _linear_steps(shape: TuneShape) -> list[TunePass]:
    return [_linear_step_pass(_of_batch(shape, b)) for b in STEP_BATCHES]


def _delta_step_pass(shape: TuneShape) -> TunePass:
    state, inputs = shape.state(), _delta_inputs(shape, 1)

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return list(delta_rule(*inputs, state, backend=KERNELS))

    return TunePass(forward)


def _delta_steps(shape: TuneShape) -> list[TunePass]:
    return [_delta_step_pass(_of_batch(shape, b)) for b in STEP_BATCHES]


def _row_pass(shape: TuneShape, rows: int) -> TunePass:
    """Return a norm, a product with an activation, and a product that is added: the channel mixer of a block."""
    width = 8 * shape.width
    dtype = TYPES_BY_NAME[shape.dtype]
    draw = partial(torch.randn, dtype=dtype, device=shape.device)
    norm = RowNorm(draw(width), draw(width), 1e-5, False)
    up, down = RowMap(draw(4 * width, width), draw(4 * width), "relu"), RowMap(draw(width, 4 * width), draw(width))
    x = draw(rows, width)

    def forward() -> list[Tensor]:
        y, base = row_product(x, norm, up, down)
        return [add_product(base, y, down)]

    return TunePass(forward)


def _rows(shape: TuneShape) -> list[TunePass]:
    return [_row_pass(shape, rows) for rows in (1, 4)]


def _no_second_derivatives(*_: Tensor) -> Tensor:
    raise NotImplementedError("workloads have no second derivatives")


def _few_slots(shape: TuneShape, most: int) -> list[TunePass]:
    """Return attention to at most so many slots, as many as a program holds, with a number for each as linformer has."""
    q, device = shape.tokens_of(1)[0], torch.device(shape.device)
    keys = min(most, MOST_KEY_ELEMENTS[shape.type in HALVES] // block_of(shape.width, device))
    if not fits_few_keys(q, keys, shape.width):
        return []
    bias = torch.zeros(1, 1, keys, device=device).expand(shape.batch, -1, -1)
    scale, plain = shape.width**-0.5, _no_second_derivatives
    inputs = [q, *(shape.normal(keys, shape.width) for _ in range(2))]
    return [_trained(lambda q, k, v: few_keys_attention(q, k, v, bias, scale, plain), inputs)]


def _landmarks(shape: TuneShape, iterations: int) -> list[TunePass]:
    """Return nystrom without padding, which has kernels for halves."""
    if shape.width > WIDEST_LANDMARK or shape.type not in HALVES:
        return []
    rule = LandmarkRule(min(MOST_LANDMARKS, shape.length // 2), iterations, 1e-3, shape.width**-0.5)
    return [_trained(lambda q, k, v: landmark_attention(q, k, v, rule, _no_second_derivatives), shape.tokens_of(3))]


def _sorted_shapes(shape: TuneShape) -> list[TuneShape]:
    return [shape, replace(shape, length=4 * shape.length)]


def _blocks(shape: TuneShape) -> list[Tensor]:
    """Draw q, k and v in blocks (b h c p width)."""
    p = min(SORTED_TOKENS, shape.length // 4)
    return [x.unflatten(2, (shape.length // p, p)) for x in shape.tokens_of(3)]


def _two_blocks_pass(shape: TuneShape, causal: bool) -> TunePass:
    q, k, v = _blocks(shape)
    shares = shape.uniform(q.shape[2], q.shape[2])
    inputs, plain = (q, k, v, shares.tril(-1) if causal else shares), _no_second_derivatives
    return _trained(lambda q, k, v, shares: sorted_blocks_attention(q, k, v, shares, causal, MASKED_SCORE, plain), inputs)


def _two_blocks(shape: TuneShape) -> list[TunePass]:
    """Return blocks that see their own keys and those that shares mix, at two lengths, causal and not."""
    p, wide = (block_of(size, torch.device(shape.device)) for size in (SORTED_TOKENS, shape.width))
    if p * wide > MOST_ELEMENTS[shape.type in HALVES]:
        return []
    return [_two_blocks_pass(each, causal) for each in _sorted_shapes(shape) for causal in (False, True)]


def _sorted_pass(shape: TuneShape) -> TunePass:
    sort = torch.randn(shape.heads, shape.width, shape.width, device=shape.device) / shape.width**0.5

    def f(q: Tensor, k: Tensor, v: Tensor, sort: Tensor) -> Tensor:
        return sinkhorn_attention(SortedCall(q, k, v, sort, None, 0.75, SORT_ITERATIONS), _no_second_derivatives)

    return _trained(f, [*_blocks(shape), sort.to(shape.type)])


def _sorted_blocks(shape: TuneShape) -> list[TunePass]:
    """Return sinkhorn without order at two lengths."""
    return [_sorted_pass(each) for each in _sorted_shapes(shape)] if shape.width <= WIDEST_SORT else []


def _balances(shape: TuneShape) -> list[TunePass]:
    """Return the balance of matrices that no program holds."""
    long = _sorted_shapes(shape)[1]
    logits = 4 * long.uniform(SORTED_BLOCKS, SORTED_BLOCKS)
    return [_trained(lambda x: balance_matrices(x, SORT_ITERATIONS, False), [logits])]


TUNE_CASES = (
    TuneCase("tile", "bands", tried.TILE_BANDS, _tile_bands),
    TuneCase("tile", "lists of tiles", tried.TILE_LISTS, _tile_lists),
    TuneCase("linear", "one decay or none", tried.LINEAR_CHUNKS, _linear_chunks),
    TuneCase("linear", "a decay per feature", tried.LINEAR_FEATURES, _linear_features),
    TuneCase("linear", "prefix sums", tried.LINEAR_PREFIX, _linear_prefix),
    TuneCase("linear", "random features", tried.EXP_FEATURES, _exp_features),
    TuneCase("linear", "causal random features", tried.CAUSAL_FEATURES, _causal_features),
    TuneCase("linear", "no order", tried.NONCAUSAL, _noncausal),
    TuneCase("linear", "no order, random features", tried.NONCAUSAL_FEATURES, _noncausal_features),
    TuneCase("delta", "delta rule", tried.DELTA_RULE, _delta_rules),
    TuneCase("delta", "vectors of length 1", tried.UNIT_FEATURES, _unit_vectors),
    TuneCase("bucket", "hashes and clusters", tried.BUCKETS, _bucket_labels),
    TuneCase("pair", "relu, tables and factors", tried.PAIRS, _all_pairs),
    TuneCase("pair", "additive", tried.ADDITIVE, _additive_pairs),
    TuneCase("step", "window", tried.WINDOW_STEP, _window_steps),
    TuneCase("step", "linear attention", tried.LINEAR_STEP, _linear_steps),
    TuneCase("step", "delta rule", tried.DELTA_STEP, _delta_steps),
    TuneCase("step", "linear maps of rows", tried.ROW_LINEAR, _rows),
    TuneCase("few", "64 slots", tried.FEW_KEYS, partial(_few_slots, most=64)),
    TuneCase("few", "128 slots", tried.FEW_KEYS, partial(_few_slots, most=128)),
    TuneCase("few", "landmarks", tried.LANDMARKS, partial(_landmarks, iterations=6)),
    TuneCase("few", "landmarks, ridge", tried.RIDGE, partial(_landmarks, iterations=0)),
    TuneCase("sort", "two blocks", tried.TWO_BLOCKS, _two_blocks),
    TuneCase("sort", "scores of blocks", tried.BLOCK_SCORES, _sorted_blocks),
    TuneCase("sort", "balance", tried.BALANCE, _balances),
)
