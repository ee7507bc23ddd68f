"""What ranks talk over: gloo, or NCCL among several ranks that share one GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tests.harness.device import VARIABLE
from tests.harness.mps import Mps, mps_daemon


@dataclass(frozen=True)
class World:
    """A backend, and the environment that each rank needs for it."""

    backend: str = "gloo"

    def environ(self, rank: int) -> dict[str, str]:
        return {}

    def opened(self) -> AbstractContextManager[Mps | None]:
        """What must run while a pool of ranks does."""
        return nullcontext()


@dataclass(frozen=True)
class SharedGpu(World):
    """Ranks on GPU 0 over NCCL.

    NCCL refuses two ranks of one host on the same device. So each rank claims a host of its own, and NCCL sends
    everything through sockets of the loopback device.
    """

    backend: str = "cpu:gloo,cuda:nccl"

    def environ(self, rank: int) -> dict[str, str]:
        # CUBLAS: else products on several streams may differ in their last bits. Queues: a GPU has none left for six
        # processes of 32 each.
        fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
        return {VARIABLE: "cuda", **fixed, **shared_gpu_environ(rank)}

    def opened(self) -> AbstractContextManager[Mps | None]:
        return mps_daemon()


def shared_gpu_environ(rank: int) -> dict[str, str]:
    """For one of several NCCL ranks on GPU 0."""
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",  # what DeepSpeed reads
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }


GLOO, SHARED_GPU = World(), SharedGpu()
