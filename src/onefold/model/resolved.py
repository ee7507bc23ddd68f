"""What shard() decided about one model: a frozen description, made once.

Construction, engine, hooks, checkpoints and reports read it instead of inspecting the model again. It holds no tensor
of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from onefold.cost.layout import ParamInfo
from onefold.model.dtensor_shards import TensorShards
from onefold.model.unit_spec import UnitSpec
from onefold.settings.placement import Placement, Scope
from onefold.settings.precision import Precision
from onefold.settings.zero import AUTO, Zero


@dataclass(frozen=True, kw_only=True)
class Resolved:
    settings: Zero
    """As shard() was called, with the stage decided."""

    precision: Precision
    """With every field decided, for this device and backend."""

    device: torch.device
    """Where the model trains."""

    ranks: int
    """Number of ranks that a unit is sharded over (mesh axis "shard")."""

    replicas: int
    """Number of ranks that hold the same shard (mesh axis "replica")."""

    meta: bool
    """The model was built on the meta device and gets its parameters in shard()."""

    params: tuple[ParamInfo, ...]
    """All parameters, in registration order."""

    units: tuple[UnitSpec, ...]
    """All parameters cut into units, with the placement of each; frozen ones too."""

    placement: Placement
    """The stage's row of the placement table; single units may differ (keep_whole, automatic tiers)."""

    blocks: tuple[str, ...]
    """Names of the modules that are the model's blocks, in registration order."""

    kept_fp32: tuple[str, ...]
    """Names of the outermost modules that compute in fp32 though the model computes in 16 bits."""

    tensor_shards: TensorShards
    """Of parameters that are split over the mesh axis "tp": where this rank's part lies."""

    dtypes: Mapping[str, torch.dtype]
    """Of all parameters, before shard()."""

    digest: str
    """Of settings, parameters, buffers and units: the same on all ranks that hold the same parameters."""

    why: str
    """What Offload(optimizer="auto") chose for optimizer state, and the reason; "" where nothing was left to it."""

    why_at_shard: str = ""
    """The automatic choices that shard() makes and no step changes, the stage, with the reasons."""

    why_parameters: str = ""
    """Where Offload(optimizer="auto") keeps parameters if not all are on the device, and the reason."""

    device_ranks: int = 1
    """With Offload(optimizer="auto"): how many ranks share this rank's GPU."""

    candidates: frozenset[int] = frozenset()
    """The trained units, by number, whose optimizer state the first step may move to the device."""

    @property
    def activations_wait(self) -> bool:
        """True with activations="auto": the policy is chosen when the first block runs."""
        return self.settings.activations == AUTO

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Blocks that backward computes again; with activations="auto", those that it may."""
        return () if self.settings.activations == "keep" else self.blocks[:: self.settings.checkpoint_every]

    @property
    def sharded_names(self) -> frozenset[str]:
        """Names of parameters of which a rank keeps a shard; not of DTensors, which are on their mesh's device."""
        sharded = (unit.layout.slots for unit in self.units if unit.placement.parameters is Scope.SHARDED)
        return frozenset(slot.name for slots in sharded for slot in slots if slot.name not in self.tensor_shards)

    @property
    def replicated_frozen(self) -> frozenset[str]:
        """Names of frozen parameters that every rank keeps whole, in their own tensors."""
        return frozenset(slot.name for unit in self.units if not unit.flat for slot in unit.layout.slots)
