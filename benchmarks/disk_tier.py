"""How fast state goes to disk and comes back, beside `dd` on the same disk.

    python benchmarks/disk_tier.py [--folder DIR] [--files 8] [--mebibytes 64] [--rounds 5] [--json]

All move as many random bytes, in place: to and from files that have been written before. Each round runs each of them
once, in an order that rotates, so that all see the same disk; the first round is not counted. A ratio is the median of
the rounds' ratios to one dd past the page cache (oflag=direct, iflag=direct), which reads what it writes from memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from onefold.offload.disk import THREADS, Scratch
from onefold.offload.host_memory import bytes_of, host_bytes

Ways = dict[str, dict[str, Callable[[], None]]]  # by direction and name
BLOCK_BYTES = 16 << 20
YARDSTICK = "dd, direct"


def dd(source: Path, target: Path, blocks: int, *words: str, processes: int = 1) -> None:
    """So many processes at once, each with its share."""
    share = -(-blocks // processes)
    command = ["dd", f"if={source}", f"of={target}", f"bs={BLOCK_BYTES}", f"count={share}", *words]
    running = []
    for start in range(0, blocks, share):
        seek = [] if target == Path("/dev/null") else [f"seek={start}"]
        running.append(subprocess.Popen([*command, f"skip={start}", *seek], stderr=subprocess.DEVNULL))
    if any([process.wait() for process in running]):
        raise SystemExit(f"dd {' '.join(words)} failed; it may be that this file system takes no O_DIRECT")


def by_dd(source: Path, target: Path, blocks: int) -> Ways:
    null, direct = Path("/dev/null"), ("oflag=direct", "conv=notrunc")
    return {
        "write": {
            YARDSTICK: lambda: dd(source, target, blocks, *direct),
            f"{THREADS} × dd, direct": lambda: dd(source, target, blocks, *direct, processes=THREADS),
            "dd, flushed": lambda: dd(source, target, blocks, "conv=notrunc,fdatasync"),
        },
        "read": {
            YARDSTICK: lambda: dd(target, null, blocks, "iflag=direct"),
            f"{THREADS} × dd, direct": lambda: dd(target, null, blocks, "iflag=direct", processes=THREADS),
        },
    }


def by_us(scratch: Scratch, content: torch.Tensor, count: int) -> Ways:
    nbytes = content.numel() // count
    buffers = [host_bytes(nbytes, pinned=False).copy_(part) for part in content.split(nbytes)]
    files = [scratch.file(nbytes, f"file {number}") for number in range(count)]

    def all_of(verb: str) -> None:
        for pending in [getattr(file, verb)(buffer) for file, buffer in zip(files, buffers)]:
            pending.wait()

    name = "ours, direct" if scratch.direct else "ours, buffered"
    return {"write": {name: lambda: all_of("write")}, "read": {name: lambda: all_of("read")}}


def bench(ways: Ways, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by direction and name, round by round."""
    seconds: dict[str, dict[str, list[float]]] = {verb: {name: [] for name in ways[verb]} for verb in ways}
    for number in range(rounds + 1):
        for verb in ways:
            names = list(ways[verb])
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                started = time.perf_counter()
                ways[verb][name]()
                seconds[verb][name].append(time.perf_counter() - started)
    return {verb: {name: taken[1:] for name, taken in seconds[verb].items()} for verb in seconds}


def report(seconds: dict[str, dict[str, list[float]]], megabytes: float) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {verb: {} for verb in seconds}
    for verb, by_name in seconds.items():
        print(f"{verb:<20}{'MB/s':>8}{'to dd':>9}")
        for name, taken in by_name.items():
            rate = megabytes / statistics.median(taken)
            ratio = statistics.median(dd_s / taken_s for dd_s, taken_s in zip(by_name[YARDSTICK], taken))
            found[verb][name] = {"megabytes_per_s": rate, "ratio_to_dd": ratio}
            print(f"  {name:<18}{rate:8,.0f}{ratio:8.2f}×")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--mebibytes", type=int, default=64, help="of each file; a multiple of 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    nbytes = asked.files * asked.mebibytes << 20
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=asked.folder)))
        source = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=in_memory))) / "source"
        content = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8).repeat(nbytes // BLOCK_BYTES)
        source.write_bytes(bytes_of(content))
        ways = by_dd(source, folder / "dd", nbytes // BLOCK_BYTES)
        for buffered in (False, True):
            scratch = stack.enter_context(closing(Scratch(folder, nbytes, buffered=buffered)))
            for verb, more in by_us(scratch, content, asked.files).items():
                ways[verb] |= more
        print(f"{asked.files} files of {asked.mebibytes} MiB, median of {asked.rounds} rounds")
        found = report(bench(ways, asked.rounds), nbytes / 1e6)
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
