"""What the kernel says of this process's memory."""

from pathlib import Path


def resident_bytes(key: str) -> int:
    """Of VmRSS, what is resident now, or VmHWM, the most that ever was."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
