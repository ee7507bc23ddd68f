"""How many threads a host update may use: this rank's share of the cores that its process is allowed to use.

torch's own number of threads is no guide: torchrun sets OMP_NUM_THREADS=1 for ranks that all compute at once, while a
host update runs when the training threads wait for their GPUs.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def threads_here() -> int:
    """Cores allowed to this process, divided by the ranks on this machine; at least 1.

    >>> threads_here() >= 1
    True
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(allowed, quota(GROUPS, Path("/proc/self/cgroup")))) // ranks_here())


def ranks_here() -> int:
    """Ranks of this run on this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def quota(groups: Path, mine: Path) -> float:
    """Cores that the cgroups of this process allow; infinity where they set no limit."""
    granted = [math.inf]
    for line in _text(mine).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2: one tree, and each group above counts
            inside = groups / name.lstrip("/")
            tree = [inside, *inside.parents][: len(inside.relative_to(groups).parts) + 1]
            granted += [_ratio(*_text(folder / "cpu.max").split()) for folder in tree]
        elif "cpu" in controllers.split(","):
            tree = [groups / "cpu" / name.lstrip("/"), groups / "cpu"]  # inside a container its group is the root
            granted += [_ratio(_text(f / "cpu.cfs_quota_us"), _text(f / "cpu.cfs_period_us")) for f in tree]
    return min(granted)


def _ratio(*words: str) -> float:
    """Cores, from microseconds allowed in each period; "max" and -1 mean no limit."""
    try:
        allowed, period = map(int, words)
    except (TypeError, ValueError):
        return math.inf
    return max(1.0, allowed / period) if allowed > 0 and period > 0 else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
