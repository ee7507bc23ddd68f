"""The setting `shard(offload=…)`: which training state is kept in host memory or on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onefold.errors import ConfigError
from onefold.settings.placement import Tier

TIERS = {None: Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Which training state is kept in host memory or on disk instead of the device.

    >>> import onefold
    >>> onefold.Zero(stage=2, offload=onefold.Offload(optimizer="host")).offload.optimizer
    'host'
    """

    optimizer: Literal["host", "disk", "auto"] | None = None
    """Where the fp32 master and the optimizer state are kept, and where the update runs with them: "host" memory or
    "disk". "auto" keeps as many units on the device as fit beside activations, those with which a step is planned to be
    fastest, puts the others in host memory, and on disk what does not fit there, if there is a `path`. The first step
    decides, which shows what activations take; `placement` says which, and why. None: on the device."""

    parameters: Literal["host", "disk"] | None = None
    """Stage 3: where this rank's shards of parameters are kept; they are copied to the device for use. None: on the
    device, except that optimizer="auto" keeps the parameters of units that do not fit there in host memory, or on disk
    if there is a `path`. "host" or "disk" applies to every sharded unit. With optimizer="auto" these units are then
    updated on the host, and "auto" only chooses between host memory and disk for their optimizer state."""

    path: str | Path | None = None
    """For "disk", and for "auto" if it may use a disk: a folder on a fast disk of this node. Its files are scratch
    space and are removed when the run ends."""

    device_bytes: int | None = None
    """With "auto": the most bytes that training may take on the device, activations included; 95% of it is filled.
    None: the memory of the device that nothing else uses. In plans and rehearsals, where no step is measured, it is for
    states alone; without it, there and on a CPU, states may take 70% of the device."""

    host_bytes: int | None = None
    """With "auto" and a `path`: the most bytes that each rank may take in host memory, with the gradients that wait
    there for `step`; those of the first step may take more. A warning says if a step cannot do with so few. None: 90%
    of what is available on the fullest node, divided among its ranks."""

    spare_bytes: int | None = None
    """Host memory, in bytes, for updates that run in backward before it is known whether gradients are clipped: with
    stage 3 in 16 bits and optimizer state in host memory; 10 to 14 bytes per parameter serve all of them. 0: updates
    wait for `step`. None: three quarters of what the host has left after the first step; without a GPU, 0."""

    def __post_init__(self) -> None:
        if self.optimizer not in (*TIERS, AUTO):
            raise ConfigError(f"Offload(optimizer={self.optimizer!r}) is unknown; use 'host', 'disk', 'auto' or None")
        if self.parameters not in TIERS:
            raise ConfigError(f"Offload(parameters={self.parameters!r}) is unknown; use 'host', 'disk' or None")
        if self.parameters is not None and self.optimizer is None:
            raise ConfigError(
                f"Offload(parameters={self.parameters!r}) without the optimizer would copy shards to the device for "
                f"every update; set optimizer='host', 'disk' or 'auto' too"
            )
        if self.path is not None and (not isinstance(self.path, str | Path) or self.path == ""):
            raise ConfigError(f"Offload(path={self.path!r}) is not a path; give a folder on a fast disk of this node")
        on_disk = "disk" in (self.optimizer, self.parameters)
        if on_disk and self.path is None:
            raise ConfigError("offload to disk needs path= (--offload-path): a folder on a fast disk of this node")
        if self.path is not None and not on_disk and self.optimizer != AUTO:
            raise ConfigError(f"Offload(path={str(self.path)!r}) is for 'disk' or 'auto'; leave it out, or ask for one")
        for name in ("device_bytes", "host_bytes"):
            if (given := getattr(self, name)) is None:
                continue
            if type(given) is not int or given <= 0:
                raise ConfigError(f"Offload({name}={given!r}) is not a positive number of bytes")
            if self.optimizer != AUTO:
                raise ConfigError(f"Offload({name}=…) is for optimizer='auto'; ask for 'auto', or leave it out")
        if self.spare_bytes is not None and (type(self.spare_bytes) is not int or self.spare_bytes < 0):
            raise ConfigError(f"Offload(spare_bytes={self.spare_bytes!r}) is not a number of bytes")
        if self.spare_bytes and self.optimizer in (None, "disk"):
            raise ConfigError("Offload(spare_bytes=…) is for optimizer='host' or 'auto'; ask for one, or leave it out")
        if self.host_bytes is not None and self.path is None:
            raise ConfigError(
                "Offload(host_bytes=…) bounds host memory before units go to disk; give path= too, or leave it out"
            )

    @classmethod
    def of(cls, value: Any) -> Offload:
        """From the setting of `shard`: a tier for the optimizer state, or an Offload."""
        if value is None or isinstance(value, str):
            return cls(optimizer=value)  # type: ignore[arg-type]
        if not isinstance(value, cls):
            raise ConfigError(f"offload={value!r} is neither 'host', 'auto' nor an Offload(optimizer=…, parameters=…)")
        return value

    def check_stage(self, stage: int | str) -> None:
        """Raises if a stage cannot offload this: replicated state would be updated on every rank."""
        if self.optimizer is not None and stage == 0:
            raise ConfigError("offload needs sharded optimizer state: use stage 1, 2 or 3 (on one rank, too)")
        if self.parameters is not None and stage != 3:
            raise ConfigError(f"Offload(parameters={self.parameters!r}) needs stage=3, found stage={stage!r}")

    @property
    def optimizer_tier(self) -> Tier:
        """The tier of units whose optimizer state is not kept on the device."""
        return Tier.HOST if self.optimizer == AUTO else TIERS[self.optimizer]

    @property
    def parameters_tier(self) -> Tier:
        return TIERS[self.parameters]

    def __str__(self) -> str:
        """The settings that all ranks must share; paths may differ."""
        spills = "to disk" if self.path is not None else "nowhere"
        budgets = f", device_bytes={self.device_bytes}, host_bytes={self.host_bytes}, spills {spills}"
        budget = budgets if self.optimizer == AUTO else ""
        return f"offload: optimizer={self.optimizer!r}, parameters={self.parameters!r}{budget}"
