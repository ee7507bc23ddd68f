"""Drops gradients: all of a model, those of one of several Optimizers, and those whose .grad a user has set to None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onefold.runtime.arriving_gradients import ArrivingGradients, Place
from onefold.runtime.attached import AttachedOptimizer, AttachedOptimizers
from onefold.runtime.phases import Progress
from onefold.runtime.reduce_schedule import ReduceSchedule
from onefold.runtime.replicated_gradients import ReplicatedGradients
from onefold.runtime.scaled import GradientScale
from onefold.runtime.untied import NoTiedParameters
from onefold.runtime.used_parameters import UsedParameters
from onefold.state.unit import Unit
from onefold.state.visible_gradients import VisibleGradients


class DroppingGradients:
    """Drops gradients of one model, and knows which of several Optimizers have dropped theirs since the last came."""

    def __init__(
        self,
        units: Sequence[Unit],
        places: Sequence[Place],
        *,
        schedule: ReduceSchedule,
        replicated: ReplicatedGradients,
        arriving: ArrivingGradients,
        used: UsedParameters,
        visible: VisibleGradients,
        progress: Progress,
        scale: GradientScale,
        optimizers: AttachedOptimizers,
        tied: Callable[[], NoTiedParameters],
    ) -> None:
        self._units, self._places, self._schedule, self._replicated = units, places, schedule, replicated
        self._arriving, self._used, self._visible, self._progress = arriving, used, visible, progress
        self._scale, self._optimizers, self._tied = scale, optimizers, tied
        self._dropped: set[int] = set()  # parameters whose gradients zero_grad() of one of several Optimizers dropped

    def gradients_come(self) -> None:
        """A backward has brought gradients, or a step needs them all: what was dropped before does not count."""
        self._dropped.clear()

    def completes(self, optimizer: AttachedOptimizer) -> bool:
        """Notes that an Optimizer drops its gradients. True once each of several has, and no gradient has come since:
        all are to be dropped."""
        self._dropped.update(self._of(optimizer))
        return len(self._dropped) == len(self._places)

    def _of(self, optimizer: AttachedOptimizer) -> list[int]:
        """All parameters, by number, but those that other Optimizers update."""
        others = self._optimizers.of_others(optimizer)
        return [index for index in range(len(self._places)) if index not in others]

    def drop_all(self, *, keep_as_zeros: bool) -> None:
        """Drops all gradients of the model, or sets them to zero."""
        self._schedule.drain()
        self._replicated.drop()
        for unit in self._units:
            unit.gradients.zero() if keep_as_zeros else unit.gradients.drop()
        self._progress.dropped(keep_as_zeros=keep_as_zeros)
        self._scale.forget()
        self._tied().forget()
        self._optimizers.forget_clipping()
        if not keep_as_zeros:
            self._visible.hide()
            self._used.forget_all()

    def drop_of(self, optimizer: AttachedOptimizer, *, keep_as_zeros: bool) -> None:
        """Drops all gradients but those of parameters that other Optimizers update."""
        mine = self._of(optimizer)
        self._schedule.drain()
        self._replicated.gather_all()
        shared = {self._places[index].unit for index in self._optimizers.of_others(optimizer)}
        for number, unit in enumerate(self._units):
            if number not in shared:  # a host update may still read what is dropped
                unit.gradients.zero() if keep_as_zeros else unit.gradients.drop()
        for place in (self._places[index] for index in mine):
            if place.unit in shared:
                self._units[place.unit].flat_params.wait_for_update()  # it reads what is set to zero
                self._units[place.unit].gradients.forget(place.slot)
        optimizer.forget_clipping()
        if not keep_as_zeros:
            self._visible.hide(mine)
            self._used.leave_out(mine)
            for index in mine:
                self._used.forget(index)

    def drop_hidden(self) -> None:
        """Drops the reduced gradients of parameters whose .grad a user has set to None, so that the next backward does
        not add to them."""
        dropped = self._visible.dropped()
        if dropped:
            self._schedule.drain()
            self._replicated.wait()
        for index in dropped:
            self._units[self._places[index].unit].flat_params.wait_for_update()  # it reads what is set to zero
            self._arriving.forget(index)
