"""torch.distributed.checkpoint (DCP) and the state of an Optimizer, which is in the optimizers of units.

DCP's get_state_dict() and set_state_dict() ask whether `optimizer.state` is empty, and if so take a step with zero
gradients and a learning rate of zero. That question is where they are refused, before anything is changed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from torch import Tensor

from onefold.errors import StateError

DCP = "torch.distributed.checkpoint"


class StateOfUnits(defaultdict[Tensor, Any]):
    """`optimizer.state` of an Optimizer: empty."""

    def __bool__(self) -> bool:
        if sys._getframe(1).f_globals.get("__name__", "").startswith(DCP):
            raise StateError(
                f"{DCP} cannot read or set the state of onefold.Optimizer, which is sharded by units: use "
                f"onefold.save(folder, model, optimizer) and onefold.load(), or get_model_state_dict() for the model"
            )
        return len(self) > 0
