"""Values of settings that the planner's formulas know too. Without torch, which takes seconds to import."""

from __future__ import annotations

ACTIVATIONS = ("keep", "checkpoint", "checkpoint+host", "partition", "partition+host")
MASTERS = ("fp32", "split")
STATE_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}  # per element of each moment of the optimizer, by its form
MASTER_BYTES = {None: 0, "fp32": 4, "split": 2}  # per element, beside the parameters
SHARED_BYTES = 32 << 20  # of small blocks in one unit, and of units outside blocks: a small model has several then
