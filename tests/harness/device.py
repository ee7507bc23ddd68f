"""Which device the models of this rank belong on. The same rank functions run on a CPU and on a shared GPU."""

from __future__ import annotations

import os

VARIABLE = "ONEFOLD_TEST_DEVICE"


def device() -> str:
    """On a rank: "cpu", or "cuda" in a world of ranks that share a GPU."""
    return os.environ.get(VARIABLE, "cpu")
