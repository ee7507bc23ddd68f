"""onefold.Muon: Muon for the matrices of hidden layers and AdamW for the rest, in one Optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from onefold.comm.agreement import on_all
from onefold.errors import OptimizerError
from onefold.optim import newton_schulz
from onefold.optim.loss_scale import LossScale
from onefold.optim.muon_placement import ADAMW, MUON, Place, Split, Stage, decide
from onefold.optim.newton_schulz import COEFFICIENTS, EPS
from onefold.optim.optimizer import Optimizer
from onefold.optim.spikes import Spikes
from onefold.runtime.engine import engine_of

Key = tuple[str, object]  # of a param group
EVERY: list[Key] = [(MUON, "whole"), (ADAMW, 2), (ADAMW, 1)]  # param groups of every stage of a pipeline


class Muon(Optimizer):
    """Muon for the matrices of hidden layers, and AdamW for embeddings, heads, norms and biases, in one Optimizer.

    Modules and shapes decide which parameter goes where; `onefold.placement(model)` shows it, and `place` changes it.
    The filters of a convolution are the rows of one matrix; stacks of matrices (experts) are updated matrix by matrix.
    `split` has Muon update rows of a matrix as matrices of their own: fused q, k and v, or heads. Both name parameters,
    or patterns of names. Everything else is as for `onefold.Optimizer`.

    >>> import torch, onefold
    >>> onefold.init()
    >>> layers = [torch.nn.Linear(4, 12), torch.nn.Linear(12, 12), torch.nn.Linear(12, 2)]
    >>> model = onefold.shard(torch.nn.Sequential(*layers), stage=2)
    >>> optimizer = onefold.Muon(model, lr=0.02, adamw={"lr": 3e-4}, split={"1.weight": 3})
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step(); optimizer.zero_grad()
    """

    _chooses_groups = True

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        ns_dtype: Literal["bf16", "fp32"] = "bf16",
        adamw: Mapping[str, Any] | None = None,
        place: Place | None = None,
        split: Split | None = None,
        loss_scale: LossScale | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        step_in_backward: bool = False,
        skip_spikes: Spikes | None = None,
    ) -> None:
        """The settings up to `adjust_lr_fn` are those of torch.optim.Muon; Newton-Schulz runs in `ns_dtype`. `adamw`
        has settings of AdamW: by default torch's, fused, but with `adjust_lr_fn="match_rms_adamw"` Muon's `lr`. Its
        weight decay is for embeddings and heads; norms and biases have none. `place` says "muon" or "adamw" of
        parameters, `split` the number of equal parts or the rows of each part."""
        engine = engine_of(model)
        blocks, comms = engine.resolved.blocks, engine.comms
        stage = Stage(comms.pp.rank == comms.pp.size - 1, engine.tied.names) if comms.pp.size > 1 else None
        sizes = {name: part.shape for name, part in engine.resolved.tensor_shards.items() if part is not None}
        on_all(comms.world, lambda: _check_settings_of_adamw(adamw or {}), "Muon()")
        self._decided = on_all(
            comms.world, lambda: decide(model, blocks, place or {}, split or {}, stage, sizes), "Muon()"
        )
        keys = [*(EVERY if stage is not None else ()), *(self._key_of(param) for param in model.parameters())]
        self._keys = list(dict.fromkeys(keys))
        shared = {"lr": lr} if adjust_lr_fn == "match_rms_adamw" else {}
        rest = {"fused": True, **shared, **(adamw or {})}
        super().__init__(
            model, newton_schulz.Muon, groups=[self._group(engine.params, key, rest) for key in self._keys],
            loss_scale=loss_scale, on_nonfinite=on_nonfinite, skip_spikes=skip_spikes,
            step_in_backward=step_in_backward,
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
            eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, ns_dtype=ns_dtype,
        )  # fmt: skip

    def _check_hyperparameters(self) -> None:
        """On every rank, before a message is sent: only the owner of a matrix reads these."""
        super()._check_hyperparameters()
        for number, (group, (by, matrices)) in enumerate(zip(self.param_groups, self._keys, strict=True)):
            if by != MUON:
                continue
            try:
                newton_schulz.check_settings(group)
            except (TypeError, ValueError) as error:
                raise OptimizerError(f"param group {number} cannot be used: {error}") from error
            if group["matrices"] != matrices:
                raise OptimizerError(
                    f"param group {number} has 'matrices' {group['matrices']!r} now, but was made with {matrices!r}; "
                    f"make a new onefold.Muon with other split="
                )

    def _group(self, params: Sequence[nn.Parameter], key: Key, adamw: dict[str, Any]) -> dict[str, Any]:
        mine = [param for param in params if self._key_of(param) == key]
        by, what = key
        if by != ADAMW:
            return {"params": mine, "matrices": what}
        return {"params": mine, "cls": torch.optim.AdamW, **adamw, **({"weight_decay": 0.0} if what == 1 else {})}

    def _key_of(self, param: nn.Parameter) -> Key:
        """Parameters with one key share a param group: Muon's by their matrices, AdamW's by whether they decay."""
        decision = self._decided[id(param)]
        return (decision.by, min(param.ndim, 2) if decision.by == ADAMW else decision.matrices)

    def _group_to_join(self, param: nn.Parameter) -> int:
        return self._keys.index(self._key_of(param))

    def _reason(self, param: nn.Parameter) -> str:
        return self._decided[id(param)].why


def _check_settings_of_adamw(adamw: Mapping[str, Any]) -> None:
    for name in ("params", "cls"):
        if name in adamw:
            raise OptimizerError(
                f"adamw= names {name!r}, and is for settings of AdamW only; say with place= which parameters AdamW "
                f"updates, and make another class a second onefold.Optimizer"
            )
