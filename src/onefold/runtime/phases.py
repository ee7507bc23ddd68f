"""Where a model is between two optimizer steps: two small machines, each with one table of transitions.

`Phase` says how far the gradients of the step are: IDLE → BACKWARD → REDUCTIONS_STARTED → AGREED, and back to IDLE by
zero_grad(). There is no phase FORWARD or STEPPED: forwards run in every phase (evaluation between backward and step,
micro-batches, pipelines that run several forwards before the first backward), and step() leaves gradients as they are,
so that calling it again uses them again. A model whose values are of no use (a failed load, a failed host update) is in
no phase of its own either: ranks may still have to answer each other, so `Engine.broken` is a situation beside the
phase.

`Due` says which reductions this rank must still join, with zeros if need be, because its peers will start them.
"""

from __future__ import annotations

from enum import Enum, auto

from onefold.state.transitions import follow


class Phase(Enum):
    """What there is of the gradients of a step."""

    IDLE = "nothing is reduced: no gradients, local sums only, or zeros"
    BACKWARD = "a backward is bringing gradients"
    REDUCTIONS_STARTED = "a backward has ended and started all its reductions; ranks have not agreed on who used what"
    AGREED = "all ranks know which parameters anyone used, and all reductions of the step have been started"


class Event(Enum):
    OPENED = auto()  # the first gradient of a backward is coming
    REDUCTIONS_STARTED = auto()  # a backward has ended, and its reductions are started
    SUMMED = auto()  # a backward has ended, and its gradients are kept as local sums
    LATE_REDUCED = auto()  # what came too late for the last reductions is reduced
    AGREED = auto()  # the ranks know which parameters anyone used
    DROPPED = auto()  # gradients are dropped, or used up


PHASES: dict[tuple[Phase, Event], Phase] = {
    (Phase.IDLE, Event.OPENED): Phase.BACKWARD,
    (Phase.IDLE, Event.AGREED): Phase.AGREED,  # local sums, reduced by step() alone
    (Phase.IDLE, Event.DROPPED): Phase.IDLE,
    (Phase.BACKWARD, Event.REDUCTIONS_STARTED): Phase.REDUCTIONS_STARTED,
    (Phase.BACKWARD, Event.SUMMED): Phase.IDLE,
    (Phase.BACKWARD, Event.AGREED): Phase.BACKWARD,  # step() or zero_grad() in a hook: backward goes on
    (Phase.BACKWARD, Event.DROPPED): Phase.BACKWARD,
    (Phase.REDUCTIONS_STARTED, Event.OPENED): Phase.BACKWARD,
    (Phase.REDUCTIONS_STARTED, Event.LATE_REDUCED): Phase.IDLE,
    (Phase.REDUCTIONS_STARTED, Event.AGREED): Phase.AGREED,
    (Phase.REDUCTIONS_STARTED, Event.DROPPED): Phase.IDLE,
    (Phase.AGREED, Event.OPENED): Phase.BACKWARD,
    (Phase.AGREED, Event.DROPPED): Phase.IDLE,
}


class Due(Enum):
    """Which reductions peers expect of this rank."""

    NOTHING = "no training forward has run since the last reductions"
    BACKWARD = "a training forward has run, and its backward has not come"
    ZEROS = "its backward has come, and reached no parameter of this rank"


def after_phase(phase: Phase, event: Event) -> Phase:
    """The phase that an event leads to; an event that cannot happen in a phase raises."""
    return follow(PHASES, phase, event)


def after_forward(due: Due, *, reducing: bool) -> Due:
    """A training forward begins; without `reducing` its backward keeps local sums."""
    return Due.BACKWARD if reducing and due is Due.NOTHING else due


def after_backward(due: Due, *, gradients: bool, reducing: bool) -> Due:
    """A backward has ended, which brought gradients or none, and reduced them or kept local sums."""
    if due is Due.NOTHING or (gradients and reducing):
        return Due.NOTHING
    return Due.BACKWARD if gradients else Due.ZEROS


def after_drop(due: Due) -> Due:
    """All gradients are dropped. A rank whose backward reached no parameter counts again as one whose backward has not
    come, because its peers still expect its reductions."""
    return Due.BACKWARD if due is Due.ZEROS else due


class Progress:
    """Where one model is: the phase of its gradients, and what its peers wait for. Only events change it."""

    def __init__(self) -> None:
        self.phase, self.due = Phase.IDLE, Due.NOTHING

    def move(self, event: Event) -> None:
        self.phase = after_phase(self.phase, event)

    def forward_began(self, *, reducing: bool) -> None:
        """A training forward begins."""
        self.due = after_forward(self.due, reducing=reducing)

    def backward_ended(self, *, reducing: bool) -> bool:
        """True if the backward that has ended brought gradients."""
        gradients = self.phase is Phase.BACKWARD
        self.due = after_backward(self.due, gradients=gradients, reducing=reducing)
        if gradients:
            self.move(Event.REDUCTIONS_STARTED if reducing else Event.SUMMED)
        return gradients

    def joined_missed_reductions(self) -> None:
        """This rank has taken part in the reductions that its peers waited for."""
        self.due = Due.NOTHING

    def dropped(self, *, keep_as_zeros: bool) -> None:
        """Gradients were dropped, or are zeros now."""
        self.move(Event.DROPPED)
        if not keep_as_zeros:
            self.due = after_drop(self.due)
