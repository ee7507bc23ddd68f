"""The stages of a pipeline in one checkpoint: each stage saves its part under the full model's names.

Names must differ between stages, except those of tied parameters. Param groups have the same settings in all stages,
and in the checkpoint the parameters of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.checkpoint.protocol.state import params_of
from onefold.errors import CheckpointError
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import Engine


class StageContents(NamedTuple):
    """The parameters and param groups of one rank's stage, exchanged as JSON."""

    stage: int
    names: list[str]
    tied: list[str]
    groups: list[list[str]]  # names of each param group


def stage_contents(engine: Engine, optimizers: Sequence[Optimizer]) -> StageContents:
    alone = engine.comms.pp.size == 1  # then no other stage can have the same names
    names = [] if alone else [name for param in params_of(engine) for name in (param.name, *param.also)]
    tied = list(engine.tied.names)
    groups = [group["names"] for optimizer in optimizers for group in optimizer.notes()["groups"]]
    return StageContents(engine.comms.pp.rank, names, tied, groups)


def joined_groups(parts: Sequence[StageContents]) -> list[list[str]]:
    """The names in each param group over all stages; raises if two stages use one name."""
    stages = {part.stage: part for part in parts}
    owner: dict[str, StageContents] = {}
    for part in stages.values():
        for name in part.names:
            other = owner.setdefault(name, part)
            if other is not part and name not in part.tied:
                raise CheckpointError(
                    f"{name} is in stages {other.stage} and {part.stage} of the pipeline; give each part the names it "
                    f"has in the whole model (ModuleDict with the layers' numbers), or name it in PipelineStage(tied=)"
                )
    if len({len(part.groups) for part in stages.values()}) > 1:
        counts = ", ".join(str(len(part.groups)) for part in stages.values())
        raise CheckpointError(f"the stages of the pipeline have {counts} param groups; give each stage the same groups")
    rows = zip(*(part.groups for part in stages.values()), strict=True)
    return [list(dict.fromkeys(name for names in row for name in names)) for row in rows]


def names_elsewhere(parts: Sequence[StageContents], stage: int) -> frozenset[str]:
    """Names of parameters that only other stages have."""
    others = {name for part in parts if part.stage != stage for name in part.names}
    return frozenset(others.difference(*(part.names for part in parts if part.stage == stage)))
