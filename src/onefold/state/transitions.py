"""How every state machine moves: by its table of transitions. An event that the table does not have raises."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from onefold.errors import StateError

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def follow(table: Mapping[tuple[State, Event], State], state: State, event: Event, whose: str = "the model") -> State:
    """The state that an event leads to; an error names `whose` state it is, a unit's or the model's."""
    after = table.get((state, event))
    if after is None:
        what = event.name.lower().replace("_", " ")
        raise StateError(f"{whose}: {what} cannot follow here: {state.value}; this is a fault of onefold, report it")
    return after
