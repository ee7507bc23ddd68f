"""Bytes of training state on one rank, from sizes and the placement table. The runtime's own reports use this too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from onefold.cost.layout import ALIGN
from onefold.cost.sizes import UnitSize
from onefold.errors import ConfigError
from onefold.settings.placement import Placement, Scope, Tier
from onefold.settings.values import STATE_BYTES

PAGE = 4096  # bytes: the length of a file is a multiple
LEAF = 256  # bytes: the offset of a tensor in a file is a multiple


class StateCost(NamedTuple):
    """Bytes of state that an optimizer class keeps: per element, and per parameter it sees (step counts)."""

    per_element: int
    per_tensor: int = 0
    one_pass: bool = False  # whether Onefold's kernels support it, which need no scratch where 16 bits compute
    whole: bool = False  # tensors are updated whole, each by the rank that owns it
    rest_per_element: int | None = None  # of what another class beside it updates: all but matrices of hidden layers
    per_block: int = 0  # per ALIGN elements: the scales of state in 8 bits
    small: bool = False  # in a small form, which kernels update in one pass in every precision

    @property
    def form(self) -> str:
        """That of the moments: fp32, bf16 or 8bit."""
        return "fp32" if not self.small else "8bit" if self.per_block else "bf16"

    def vectors(self, numel: int) -> int:
        """Bytes of all state that has a value for each element, or for each block of them."""
        return numel * self.per_element + -(-numel // ALIGN) * self.per_block

    def in_form(self, form: str) -> StateCost:
        """The cost with moments in another form; a small one counts its steps, if there are any moments.

        >>> StateCost(8, 4).in_form("8bit").vectors(6400)
        13000
        """
        moments = self.per_element // 4
        if form == "fp32" or not moments:
            return self
        scales = moments if form == "8bit" else 0
        return self._replace(per_element=moments * STATE_BYTES[form], per_tensor=4, per_block=scales, small=True)


# Of torch's classes by name, with torch's own settings: what running them shows, written down to plan without torch.
STATE_COSTS = {
    "adamw": StateCost(8, 4, one_pass=True), "adam": StateCost(8, 4, one_pass=True), "sgd": StateCost(0, one_pass=True),
    "momentum": StateCost(4, one_pass=True), "adagrad": StateCost(4, 4), "rmsprop": StateCost(4, 4),
    "muon": StateCost(4, 4, whole=True, rest_per_element=8),
}  # fmt: skip


def named_cost(name: str, form: str = "fp32") -> StateCost:
    """The bytes of state of an optimizer by name, with its moments in a form.

    >>> named_cost("AdamW").per_element, named_cost("AdamW", "bf16").per_element
    (8, 4)
    """
    if name.lower() not in STATE_COSTS:
        raise ConfigError(f"optimizer {name!r} is unknown; use one of {', '.join(STATE_COSTS)}")
    cost = STATE_COSTS[name.lower()]
    check_form(form, name, known=cost.one_pass)
    return cost.in_form(form)


def check_form(form: object, name: str, *, known: bool) -> None:
    """Raises for a form of optimizer state that does not exist, or that the class `name` does not have."""
    if not isinstance(form, str) or form not in STATE_BYTES:
        raise ConfigError(f"state={form!r} is unknown; use one of {', '.join(map(repr, STATE_BYTES))}")
    if form != "fp32" and not known:
        raise ConfigError(
            f"state={form!r}: {name} has no such form of its state; use torch's AdamW, Adam or SGD (without amsgrad, "
            f"maximize, capturable, differentiable and dampening), or state='fp32'"
        )


class StateBytes(NamedTuple):
    """Bytes of the states that ZeRO shards, on one rank."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def parameter_bytes(unit: UnitSize, placement: Placement, tier: Tier = Tier.DEVICE) -> int:
    """Bytes of parameters that this rank keeps on a tier while nothing is unsharded: all, or its shard; and on the
    device one placeholder element for each parameter that may be hidden."""
    if placement.parameters is Scope.REPLICATED and not (unit.trained and placement.hidden_between_passes):
        numel = unit.numel if unit.trained else unit.used_numel
        return numel * unit.widths.compute if tier is Tier.DEVICE else 0
    kept = (unit.shard if placement.parameters is Scope.SHARDED else unit.numel) * unit.widths.compute
    placeholders = unit.param_count * unit.widths.compute if tier is Tier.DEVICE else 0
    if tier is not placement.parameters_tier:
        return placeholders
    return placeholders + (file_bytes(kept) if tier is Tier.DISK else kept)


def gradient_bytes(unit: UnitSize, placement: Placement, tier: Tier = Tier.DEVICE) -> int:
    """Bytes of gradients that this rank keeps on a tier between backward and step; of units that the host updates, its
    shard on the host and nothing on the device."""
    if not unit.trained or tier is not (Tier.HOST if placement.updated_on_host else Tier.DEVICE):
        return 0
    if placement.updated_on_host or placement.gradients is Scope.SHARDED:
        return unit.shard * unit.widths.grad
    one_rank = unit.shard == unit.numel
    return (unit.used_numel if one_rank and unit.widths.unflattened else unit.numel) * unit.widths.grad


def updated_numel(unit: UnitSize, placement: Placement) -> int:
    """Elements of a unit that this rank updates."""
    if not unit.trained:
        return 0
    return unit.body_numel if placement.optimizer is Scope.REPLICATED else unit.owned_numel


def optimizer_bytes(unit: UnitSize, placement: Placement, cost: StateCost, tier: Tier = Tier.DEVICE) -> int:
    """Bytes of master and optimizer state on a tier; one vector per unit, as if all parameters were in one param group.
    Step counts are not kept in files but in host memory."""
    numel = updated_numel(unit, placement)
    counts = cost.per_tensor if numel else 0
    if placement.optimizer_tier is Tier.DISK:
        in_file = file_bytes(numel * unit.widths.master, moment_bytes(unit, numel, cost))
        return in_file if tier is Tier.DISK else counts if tier is Tier.HOST else 0
    held = numel * unit.widths.master + moment_bytes(unit, numel, cost) + counts
    return held if tier is placement.optimizer_tier else 0


def moment_bytes(unit: UnitSize, numel: int, cost: StateCost) -> int:
    """Bytes of optimizer state of so many elements of a unit. Of whole tensors, as if all ranks owned equal parts."""
    if cost.rest_per_element is None:
        return cost.vectors(numel)
    whole = numel * unit.whole_numel // max(1, unit.used_numel)
    return whole * cost.per_element + (numel - whole) * cost.rest_per_element


def file_bytes(*tensors: int) -> int:
    """Bytes of a file that keeps tensors of these sizes."""
    return -(-sum(-(-nbytes // LEAF) * LEAF for nbytes in tensors) // PAGE) * PAGE


def state_bytes(
    units: Sequence[UnitSize], placements: Sequence[Placement], cost: StateCost, tier: Tier = Tier.DEVICE
) -> StateBytes:
    """Bytes of all states on one tier; of gradients, those between backward and step."""
    # Units come by the hundred and are of few sizes. A placement and widths are many units' own objects.
    known: dict[Any, StateBytes] = {}
    parameters = gradients = optimizer = 0
    for unit, placement in zip(units, placements, strict=True):
        key = (*unit[1:7], id(unit.widths), unit.trained, unit.whole_numel, id(placement))
        one = known.get(key)
        if one is None:
            one = known[key] = StateBytes(
                parameter_bytes(unit, placement, tier),
                gradient_bytes(unit, placement, tier),
                optimizer_bytes(unit, placement, cost, tier),
            )
        parameters, gradients, optimizer = parameters + one[0], gradients + one[1], optimizer + one[2]
    return StateBytes(parameters, gradients, optimizer)
