"""One flat unit: a few parameters whose values and gradients live, move and are updated together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onefold.comm import Comm
from onefold.gradients import Gradients
from onefold.layout import UnitLayout
from onefold.memory import Pool
from onefold.placement import Placement
from onefold.values import Values
from onefold.views import FlatViews


class Unit:
    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[nn.Parameter],
        placement: Placement,
        comm: Comm,
        replicas: Comm,
        pool: Pool,
    ) -> None:
        self.layout, self.params, self.placement = layout, list(params), placement
        self.name = layout.name
        self.mine = layout.shard(comm.rank)
        views = FlatViews(layout, params)
        self.values = Values(views, params, placement.parameters, comm)
        self.gradients = Gradients(views, placement.gradients, comm, replicas, pool)
