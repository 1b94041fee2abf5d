"""Laws: what every mechanism in the catalogue is asked, for free. REGARD_DEVICE=cuda asks the same of a GPU.

The laws themselves are in the package, `regard.laws`: here they meet every example of every row, with positions inside too.
"""

from functools import partial

import conftest
import test_attend
import test_padding
import test_precision
from conftest import CASES, DOUBLES, LAW_CASES, PATHS
from regard import laws

law_test = partial(conftest.law_test, cases=LAW_CASES)
UNCOUNTED = {"identity", "fnet"}  # no product of matrices: a copy, and a Fourier transform that no counter counts


def test_what_covers_another_case_is_no_double_itself():
    names = {repr(case) for case in CASES}
    assert DOUBLES.keys() | set(DOUBLES.values()) <= names and not DOUBLES.keys() & set(DOUBLES.values())


test_shape_and_every_weight_learns = law_test(laws.shape_and_gradients)
test_the_future_cannot_be_seen = law_test(laws.future_is_unseen)
test_no_gradient_comes_from_the_future = law_test(laws.no_gradient_from_the_future)
test_padding_is_as_if_absent = law_test(laws.padding_is_absent)
test_rows_of_nothing_but_padding_are_zero = law_test(laws.padded_rows_are_zero)
test_stream_is_forward = law_test(laws.stream_is_the_whole_pass)
test_prompts_of_different_length_stream_together = law_test(laws.prompts_stream_together)
test_scan_is_the_loop = law_test(laws.scan_is_the_loop)
test_cross_attention_and_its_stream = law_test(laws.cross_attention)
test_beams_can_be_reordered_and_states_are_values = law_test(laws.states_are_values)
test_rows_do_not_meet_and_calls_repeat = law_test(laws.rows_are_independent)
test_inputs_need_not_be_contiguous = law_test(laws.any_strides)
test_nothing_and_one_token = law_test(laws.empty_inputs)
test_huge_scores_stay_finite = law_test(laws.large_inputs_stay_finite)
test_different_widths_and_grouped_heads = law_test(laws.head_sizes_may_differ)
test_grouped_heads_are_repeated_heads = law_test(laws.grouped_heads_are_repeated)
test_cost_grows_as_claimed = law_test(laws.cost_grows_as_claimed, cases=CASES, unfit=lambda case: case.row.name in UNCOUNTED)
test_memory_grows_as_claimed = law_test(laws.memory_grows_as_claimed, cases=CASES)
test_identity_probe_reproduces_the_output = law_test(laws.weights_are_shown, unfit=lambda case: not case.example.weights)
test_what_is_not_claimed_raises = law_test(laws.unclaimed_is_refused)
test_dropout_is_for_training_and_keeps_the_mean = law_test(laws.dropout_keeps_the_mean)
test_a_saved_mechanism_repeats_itself = law_test(laws.weights_are_loaded)
test_overfits_one_batch = law_test(laws.one_batch_is_fitted, cases=PATHS)


def test_every_law_is_tested_and_has_a_sentence_and_advice():
    files = (globals(), vars(test_attend), vars(test_padding), vars(test_precision))
    tested = {test.law.name for file in files for name, test in file.items() if name.startswith("test_") and hasattr(test, "law")}
    assert tested == set(laws.LAWS) and set(laws.LAWS) <= set(laws.__all__)
    assert len({law.sentence for law in laws.LAWS.values()}) == len(laws.LAWS)
    assert all(law.sentence.endswith(".") and law.advice and not law.advice.endswith(".") for law in laws.LAWS.values())
