"""safetensors and state dicts whose tensors are views of flat buffers.

safetensors.torch.save_model() and load_model() refuse a tensor that is a part of its storage, since they cannot know
who has the rest. So they get copies of what state_dict() gives everybody else as views.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from onefold.model.dtensor_shards import PLAIN

CALLER = "safetensors.torch"
BETWEEN = ("torch.", "onefold.")  # of a call of state_dict(): torch's own frames, and ours


def copy_for_safetensors(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state-dict hook: replaces views by copies if safetensors asks; tied names share one copy."""
    if not _asked_by_safetensors():
        return
    copies: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    for name, value in state.items():
        if type(value) in PLAIN and value.untyped_storage().nbytes() != value.nbytes:
            key = value.data_ptr(), tuple(value.shape)
            if key not in copies:
                copies[key] = value.clone()
            state[name] = copies[key]


def _asked_by_safetensors() -> bool:
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__") == CALLER
