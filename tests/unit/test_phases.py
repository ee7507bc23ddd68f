"""The tables of a model's phases: what follows what, and what cannot."""

import pytest

from onefold.errors import StateError
from onefold.runtime.phases import PHASES, Due, Event, Phase, after_backward, after_drop, after_forward, after_phase

STEP = [Event.OPENED, Event.REDUCED, Event.AGREED, Event.DROPPED]


def test_a_step_goes_through_every_phase_and_ends_where_it_began():
    phase, seen = Phase.IDLE, []
    for event in STEP:
        phase = after_phase(phase, event)
        seen.append(phase)
    assert seen == [Phase.BACKWARD, Phase.REDUCED, Phase.AGREED, Phase.IDLE]


@pytest.mark.parametrize("phase", Phase)
def test_gradients_can_be_dropped_in_every_phase_and_a_running_backward_goes_on(phase):
    assert after_phase(phase, Event.DROPPED) is (Phase.BACKWARD if phase is Phase.BACKWARD else Phase.IDLE)


@pytest.mark.parametrize(
    ("phase", "event"), [(phase, event) for phase in Phase for event in Event if (phase, event) not in PHASES]
)
def test_what_is_not_in_the_table_raises(phase, event):
    with pytest.raises(StateError, match="cannot follow"):
        after_phase(phase, event)


def test_reductions_are_due_from_a_training_forward_to_a_backward_that_reduces():
    assert after_forward(Due.NOTHING, reducing=False) is Due.NOTHING
    due = after_forward(Due.NOTHING, reducing=True)
    assert due is Due.BACKWARD
    due = after_backward(due, gradients=True, reducing=False)  # a micro-batch of a pipeline keeps its sums
    assert due is Due.BACKWARD
    assert after_backward(due, gradients=True, reducing=True) is Due.NOTHING


def test_a_backward_that_reached_nothing_leaves_zeros_due_until_gradients_are_dropped():
    due = after_backward(Due.BACKWARD, gradients=False, reducing=True)
    assert due is Due.ZEROS
    assert after_forward(due, reducing=True) is Due.ZEROS
    assert after_drop(due) is Due.BACKWARD and after_drop(Due.NOTHING) is Due.NOTHING
