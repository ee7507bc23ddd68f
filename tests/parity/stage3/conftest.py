"""Stage 3 cases that fail today, by name. They run with --open; the changelog lists them as known gaps.

Take a line out when its cases pass.
"""

from __future__ import annotations

import pytest

OPEN = (
    # ranks that skip, repeat or route differently from each other wait in a circle: ends in a CommError
    "another on each rank",
    "on rank 0 only",
    "test_an_expert_may_get_no_tokens_on_some_ranks",
    # several rounds of a unit in one backward are not taken at the same moments as at stage 0: last bits differ
    "test_checkpointed_blocks_train_to_the_same_bits[two blocks in two checkpoints-True",
    "test_checkpointed_blocks_may_run_in_two_backwards_of_a_step",
    "test_checkpoints_work_at_any_look_ahead_with_one_unit_per_block[0-True]",
    # peaks and torch's own modules, some of which fail
    "test_peak.py",
    "test_torch_modules.py",
    # the list of gathers of the first steps
    "test_a_step_sends_three_psi_less_what_backward_has_or_needs_no_more",
    "test_the_first_step_gathers_no_unit_twice_in_a_pass",
    "test_gathers_follow_the_model_forward_and_its_reverse_backward",
    "test_forwards_inside_full_parameters_send_nothing",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "stage3" in item.nodeid and any(name in item.nodeid for name in OPEN):
            item.add_marker(pytest.mark.open)
