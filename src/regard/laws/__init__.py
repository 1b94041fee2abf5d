"""The laws that every mechanism keeps, each a function of a case: `regard check` and the tests of this package run them."""

# The table has the laws in the order of these imports.
# isort: off
from regard.laws.law_case import Case
from regard.laws.law_table import LAWS, Law
from regard.laws.token_laws import (
    any_strides,
    dropout_keeps_the_mean,
    empty_inputs,
    large_inputs_stay_finite,
    one_batch_is_fitted,
    rows_are_independent,
    shape_and_gradients,
    unclaimed_is_refused,
    weights_are_loaded,
)
from regard.laws.causal_laws import future_is_unseen, no_gradient_from_the_future
from regard.laws.padding_laws import (
    attend_padding_holds_anything,
    context_padding_holds_anything,
    padded_rows_are_zero,
    padding_holds_anything,
    padding_is_absent,
    prompt_padding_holds_anything,
)
from regard.laws.stream_laws import prompts_stream_together, states_are_values, stream_is_the_whole_pass
from regard.laws.core_laws import (
    cross_attention,
    grouped_heads_are_repeated,
    head_sizes_may_differ,
    permuted_queries,
    scan_is_the_loop,
    weights_are_shown,
)
from regard.laws.attend_laws import ambiguity_is_refused, positions_are_declared, some_queries_get_what_all_get
from regard.laws.precision_laws import autocast_is_close, half_precision_streams, low_precision_is_close
from regard.laws.growth_laws import cost_grows_as_claimed, memory_grows_as_claimed
from regard.laws.mechanism_check import Finding, check_laws
from regard.laws.verdicts import DoesNotApply, LawBroken
# isort: on

__all__ = [
    "LAWS",
    "Case",
    "DoesNotApply",
    "Finding",
    "Law",
    "LawBroken",
    "ambiguity_is_refused",
    "any_strides",
    "attend_padding_holds_anything",
    "autocast_is_close",
    "check_laws",
    "context_padding_holds_anything",
    "cost_grows_as_claimed",
    "cross_attention",
    "dropout_keeps_the_mean",
    "empty_inputs",
    "future_is_unseen",
    "grouped_heads_are_repeated",
    "half_precision_streams",
    "head_sizes_may_differ",
    "large_inputs_stay_finite",
    "low_precision_is_close",
    "memory_grows_as_claimed",
    "no_gradient_from_the_future",
    "one_batch_is_fitted",
    "padded_rows_are_zero",
    "padding_holds_anything",
    "padding_is_absent",
    "permuted_queries",
    "positions_are_declared",
    "prompt_padding_holds_anything",
    "prompts_stream_together",
    "rows_are_independent",
    "scan_is_the_loop",
    "shape_and_gradients",
    "some_queries_get_what_all_get",
    "states_are_values",
    "stream_is_the_whole_pass",
    "unclaimed_is_refused",
    "weights_are_loaded",
    "weights_are_shown",
]
