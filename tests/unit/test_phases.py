"""The tables of a model's phases and of the states of its units: what follows what, and what cannot."""

from enum import Enum
from typing import Any

import pytest

from onefold.errors import StateError
from onefold.runtime.phases import PHASES, Due, Event, Phase, after_backward, after_drop, after_forward, after_phase
from onefold.state.flat_parameters import PARAMETER_STATES, ParameterEvent, ParameterState
from onefold.state.gradient_state import GRADIENT_STATES, GradientEvent, GradientState
from onefold.state.transitions import follow

TABLES: list[tuple[dict[Any, Any], type[Enum], type[Enum]]] = [
    (PHASES, Phase, Event),
    (PARAMETER_STATES, ParameterState, ParameterEvent),
    (GRADIENT_STATES, GradientState, GradientEvent),
]
FORBIDDEN = [
    pytest.param(table, state, event, id=f"{state.name}-{event.name}")
    for table, states, events in TABLES
    for state in states
    for event in events
    if (state, event) not in table
]

STEP = [Event.OPENED, Event.REDUCTIONS_STARTED, Event.AGREED, Event.DROPPED]


def test_a_step_goes_through_every_phase_and_ends_where_it_began():
    phase, seen = Phase.IDLE, []
    for event in STEP:
        phase = after_phase(phase, event)
        seen.append(phase)
    assert seen == [Phase.BACKWARD, Phase.REDUCTIONS_STARTED, Phase.AGREED, Phase.IDLE]


@pytest.mark.parametrize("phase", Phase)
def test_gradients_can_be_dropped_in_every_phase_and_a_running_backward_goes_on(phase):
    assert after_phase(phase, Event.DROPPED) is (Phase.BACKWARD if phase is Phase.BACKWARD else Phase.IDLE)


@pytest.mark.parametrize(("table", "state", "event"), FORBIDDEN)
def test_what_is_not_in_a_table_raises(table, state, event):
    with pytest.raises(StateError, match=r"cannot follow here: .*; this is a fault of onefold, report it"):
        follow(table, state, event)


@pytest.mark.parametrize(("table", "states", "events"), TABLES)
def test_every_state_can_be_entered_and_left_and_every_event_happens(table, states, events):
    assert {state for state, _ in table} == set(states) == set(table.values())
    assert {event for _, event in table} == set(events)
    assert all(len(state.value.split()) > 4 for state in states), "a member says what is in memory"


GRADIENT_LIVES = {
    "update at step()": ["REDUCTION_ENDED", "REDUCTION_ENDED", "DROPPED"],
    "update in backward": ["REDUCTION_ENDED", "USED", "DROPPED"],
    "update on the host at step()": ["REDUCTION_ENDED", "SENT_TO_HOST", "DROPPED"],
    "update on the host in backward": ["REDUCTION_ENDED", "LENT", "DROPPED"],
    "another backward after a gradient went to the host": [
        "REDUCTION_ENDED", "SENT_TO_HOST", "REDUCTION_ENDED", "SENT_TO_HOST", "DROPPED"
    ],
    "zeros are kept": ["REDUCTION_ENDED", "DROPPED", "ZEROED", "REDUCTION_ENDED", "DROPPED"],
}  # fmt: skip


@pytest.mark.parametrize("life", GRADIENT_LIVES)
def test_gradients_of_a_step_end_where_they_began(life):
    state = GradientState.EMPTY
    for event in GRADIENT_LIVES[life]:
        state = follow(GRADIENT_STATES, state, GradientEvent[event])
    assert state is GradientState.EMPTY


@pytest.mark.parametrize("state", GradientState)
def test_only_a_reduced_gradient_leaves_the_device(state):
    for event in (GradientEvent.SENT_TO_HOST, GradientEvent.LENT, GradientEvent.USED):
        assert ((state, event) in GRADIENT_STATES) is (state is GradientState.REDUCED)


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
