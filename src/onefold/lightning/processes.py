"""The ranks that Lightning, torchrun or Slurm started, joined by onefold's own init().

Lightning's own process group has a store that listens on every interface; init() keeps ranks of one node on loopback.
"""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment

from onefold import init


def join(environment: ClusterEnvironment, ranks_per_node: int, timeout_s: float) -> None:
    """Joins the ranks, as the environment of Lightning counts them. Collective."""
    os.environ |= {
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": str(environment.main_port),
        "RANK": str(environment.global_rank()),
        "WORLD_SIZE": str(environment.world_size()),
        "LOCAL_RANK": str(environment.local_rank()),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }
    init(timeout_s=timeout_s)
