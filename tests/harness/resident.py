"""What the kernel says of this process's memory."""

import platform
from pathlib import Path

# On ARM torch allocates by mimalloc, which keeps memory that was freed.
KEPT_BYTES = (32 << 20) if platform.machine() in ("aarch64", "arm64") else 0


def resident_bytes(key: str) -> int:
    """Of VmRSS, what is resident now, or VmHWM, the most that ever was."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
