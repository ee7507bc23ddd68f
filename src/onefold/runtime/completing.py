"""Completes the gradients of a step on all ranks: who used which parameters, and reductions that some rank has missed.

1 Before another backward of the same step, gradients that came late to an earlier one are reduced, at every stage, so
  that sums have the same order.
2 Before clipping or updating, a rank whose backward reached no parameter, or never ran, joins its peers' all-gathers
  and, with zeros, their reductions. Then the ranks tell each other which parameters they used (used_parameters.py) and
  which units hold gradients that were not reduced, and reduce those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comms
from onefold.runtime.accumulating import Accumulating
from onefold.runtime.attached import AttachedOptimizers
from onefold.runtime.done_alike import DoneAlike
from onefold.runtime.order_agreement import agree_on_order
from onefold.runtime.phases import Due, Event, Phase, Progress
from onefold.runtime.reduce_schedule import ReduceSchedule
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.runtime.replicated_gradients import ReplicatedGradients
from onefold.runtime.unsharding import Unsharding
from onefold.runtime.untied import NoTiedParameters
from onefold.runtime.used_parameters import Heard, UsedParameters
from onefold.state.unit import Unit
from onefold.state.visible_gradients import VisibleGradients


class CompletingGradients:
    """What ranks tell each other about the gradients of one model's step. Every method is collective."""

    def __init__(
        self,
        units: Sequence[Unit],
        comms: Comms,
        pool: Pool,
        *,
        schedule: ReduceSchedule,
        unsharding: Unsharding,
        accumulating: Accumulating,
        replicated: ReplicatedGradients,
        used: UsedParameters,
        visible: VisibleGradients,
        progress: Progress,
        alike: DoneAlike,
        optimizers: AttachedOptimizers,
        tied: Callable[[], NoTiedParameters],
    ) -> None:
        self._units, self._comms, self._pool = units, comms, pool
        self._schedule, self._unsharding, self._accumulating = schedule, unsharding, accumulating
        self._replicated, self._used, self._visible = replicated, used, visible
        self._progress, self._alike, self._optimizers, self._tied = progress, alike, optimizers, tied

    def begin_reductions(self) -> None:
        """Before a new backward, reduces gradients that arrived after the reductions of an earlier one."""
        if self._progress.phase is Phase.REDUCTIONS_STARTED:
            self._hear(Call.BACKWARD)
            self._progress.move(Event.LATE_REDUCED)
        self.open_reductions()

    def open_reductions(self) -> None:
        """Reductions of a backward, or of one that this rank takes part in with zeros, may start from here on."""
        self._comms.shard.reductions_wait()  # their memory was read by the last step
        self._comms.replica.reductions_wait()
        self._schedule.begin(final=self._accumulating.final)

    def complete(self, call: Call) -> None:
        """Once per step, before `call`: agrees on what was used, and reduces what is left."""
        self._join_missed_reductions(call)
        if self._optimizers.policy.keeps_gradients:
            while self._hear(call).more:  # another rank has more micro-batches: join its reductions, with zeros
                self.open_reductions()
                self._schedule.flush(start=True)
            self._tied().sum()
        else:  # what ranks used of a unit travelled beside its reduction, the only one
            self._agree_on_order()
            self._schedule.drain()
        if self._replicated.wanted:
            self._schedule.drain()
            self._replicated.gather_all()
        self._progress.move(Event.AGREED)

    def _hear(self, call: Call) -> Heard:
        """Between two backwards of a step, and before step(): hears what ranks used, and reduces what came late."""
        more, units = call is Call.BACKWARD, len(self._units)
        said = self._schedule.waiting() + self._alike.said()
        heard = self._used.agree(self._comms.everyone, self._visible.dropped(), said, more=more)
        if heard.more and not more and self._replicated.wanted:  # this rank's all-gathers are on their way
            refuse(call, Situation.UNEVEN_BACKWARDS)
        if not heard.used:
            refuse(call, Situation.NO_RANK_HAS_GRADIENTS)
        accumulated = not heard.more and self._alike.compare(heard.others[units:])
        self._agree_on_order()
        self._schedule.reduce_late(heard.others[:units])
        if accumulated and not self._accumulating.wide_everywhere:
            self._keep_wide_sums_everywhere()
        return heard

    def _keep_wide_sums_everywhere(self) -> None:
        """Gradients have accumulated on some rank, as all ranks have heard."""
        if self._replicated.wanted and self._comms.everyone.size > 1:
            self._schedule.drain()
            self._accumulating.keep_wide_sums_everywhere()
            self._replicated.gather_again()
        else:
            self._accumulating.keep_wide_sums_everywhere()

    def _join_missed_reductions(self, call: Call) -> None:
        """If this rank's backward reached no parameter, or never ran, takes part in the all-gathers and, with zeros, in
        the reductions that its peers wait for."""
        if self._optimizers.policy.awaits_step:
            return  # every unit has been reduced and updated in backward
        due = self._progress.due
        if due is Due.NOTHING or (self._used.any and due is not Due.ZEROS):
            if not self._used.any:
                refuse(call, Situation.NO_GRADIENTS)
            return
        if due is not Due.ZEROS:
            self._unsharding.open_backward()
            self._unsharding.close_backward()
        self.begin_reductions()
        self._schedule.flush(start=True)
        self._progress.joined_missed_reductions()

    def _agree_on_order(self) -> None:
        if agree_on_order(self._comms.everyone, self._schedule, self._unsharding):
            self._pool.trim()  # in the first backward units may have waited for another order
