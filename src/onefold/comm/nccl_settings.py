"""Variables of the environment on which NCCL's messages depend, set before the first process group is made."""

from __future__ import annotations

import os

import torch

from onefold.errors import ConfigError

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULTS = {
    # with the usual 8 hardware queues, streams of compute and of NCCL's communicators share some, and wait in them for
    # each other without need; CUDA reads this when it starts
    QUEUES: "32",
    # connections when a communicator is made, and not in a step, where ranks may come to them in different orders
    "NCCL_RUNTIME_CONNECT": "0",
    # gloo beside NCCL: connections when they are first used, not one from each rank to each other at the start
    "TORCH_GLOO_LAZY_INIT": "1",
    # sums in the switch differ in the last bit from call to call, and Onefold promises equal bits
    "NCCL_NVLS_ENABLE": "0",
}


def prepare_nccl(world: int) -> None:
    """Sets what the user has not set; raises where a setting would let messages deadlock."""
    if world > 1 and os.environ.get(QUEUES, "").strip() == "1":
        raise ConfigError(
            f"{QUEUES}=1 gives all CUDA streams one hardware queue: an all-gather and a reduce-scatter that wait for "
            f"each other's peers deadlock there, and communication does not overlap compute; unset it (only Megatron's "
            f"sequence parallelism wants it)"
        )
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


if not torch.cuda.is_initialized():
    os.environ.setdefault(QUEUES, DEFAULTS[QUEUES])
