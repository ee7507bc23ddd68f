"""Steps of two CPU ranks over links of a given rate: network namespaces joined by a veth pair that `tc` slows down; and
over the loopback device.

    python -m benchmarks.shaped_links                           # 50 Mbit/s to 10 Gbit/s; root, with ip and tc
    python -m benchmarks.shaped_links --mbit 50 --steps 2 --out runs
    python -m benchmarks.shaped_links --mbit --loopback 1x32    # works of benchmarks.cpu, over loopback alone

Over every link the ranks first measure it, as `onefold measure` does. Then steps of the stages and steps of compute
alone (each rank trains a model of its own) take turns, so that other programs slow all of them down alike. The load of
the machine is noted before and after. `python -m benchmarks.predicted` compares the steps with what the planner gives
for that link and this CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import onefold
from benchmarks.results import RESULTS, file_of, machine, shown_command, versions, write
from benchmarks.systems.table import SYSTEMS
from benchmarks.work import Work, two_ranks
from onefold.planner.device.clock import Clock
from onefold.planner.device.links import links
from tests.harness.netns import WIRE, can_join_nodes, move_to, two_nodes

MBIT = (50, 200, 1000, 10_000)
ALONE = "floor"  # ranks train apart
STAGES = ("stage0", "stage1", "stage2", "stage3")
WORK = Work(
    name="shaped-4.2m", layers=4, dim=256, batch=1, seq=32, vocab=2048, precision="fp32", lr=1e-3, device="cpu",
    ranks=2, threads=1,
)  # fmt: skip
WARM_UP = 2
PATIENCE_S = 300.0


def rank_of(rank: int, work: Work, nodes: list[int], port: int, steps: int, queue: Any) -> None:
    """One rank, in its own namespace if there are some."""
    if nodes:
        move_to(nodes[rank])  # before any thread is there
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1" if nodes else "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": WIRE if nodes else "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    onefold.init(timeout_s=PATIENCE_S)
    found: dict[str, Any] = {"links": links(Clock(torch.device("cpu")))}
    ready = {name: SYSTEMS[name].build(work) for name in (ALONE, *STAGES)}
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    cpu: dict[str, list[float]] = {name: [] for name in ready}
    turns = [name for stage in STAGES for name in (ALONE, stage)]
    for number in range(WARM_UP + steps):
        tokens = work.tokens(rank, number)
        for name in turns:
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            ready[name].step(tokens)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - used)
    found["systems"] = {
        name: {
            "median_s": statistics.median(warm(name, times)),
            "least_s": min(warm(name, times)),
            "median_cpu_s": statistics.median(warm(name, cpu[name])),  # of rank 0, all threads
            "steps_s": warm(name, times),
        }
        for name, times in seconds.items()
    }
    if rank == 0:
        queue.put(found)
    dist.barrier()
    onefold.shutdown()


def warm(name: str, times: list[float]) -> list[float]:
    """Without the rounds that warm up: compute alone has a step for each stage in a round."""
    return times[WARM_UP * (len(STAGES) if name == ALONE else 1) :]


def without(words: list[str], option: str) -> list[str]:
    at = words.index(option) if option in words else len(words)
    return [*words[:at], *words[at + 2 :]]


def over(mbit_per_s: int | None, work: Work, steps: int) -> dict[str, Any]:
    """What the two ranks found over one link; None: the loopback device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = os.getloadavg()[0]
    with two_nodes(mbit_per_s) if mbit_per_s else nullcontext([]) as nodes:
        queue = mp.get_context("spawn").SimpleQueue()
        ranks = mp.spawn(rank_of, (work, [node.pid for node in nodes], port, steps, queue), 2, join=False)
        while not ranks.join():
            pass
        load = [before, os.getloadavg()[0]]
        return {"mbit_per_s": mbit_per_s, "work": dataclasses.asdict(work), "load": load, **queue.get()}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=int, nargs="*", default=list(MBIT), help="rates of links")
    parser.add_argument("--loopback", nargs="*", choices=list(two_ranks()), default=[], help="works over loopback too")
    parser.add_argument("--beside", default="", help="what else ran on the machine, for the record")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for the JSON")
    options = parser.parse_args(words)
    if options.mbit and not can_join_nodes():
        sys.stderr.write("two network namespaces cannot be joined here: run as root, with ip and tc (iproute2)\n")
        return 1
    found: dict[str, Any] = {
        "machine": machine(False), "versions": versions(), "beside": options.beside,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shown_command("benchmarks.shaped_links", without(words, "--beside")), "warm_up": WARM_UP, "over": [],
    }  # fmt: skip
    file = file_of(options.out, "shaped-links", found)
    for rate, work in [(rate, WORK) for rate in options.mbit] + [
        (None, two_ranks()[name]) for name in options.loopback
    ]:
        row = over(rate, work, options.steps)
        found["over"].append(row)
        write(file, found)
        took = ", ".join(f"{name} {1e3 * one['median_s']:,.0f} ms" for name, one in row["systems"].items())
        sys.stdout.write(f"{f'{rate} Mbit/s' if rate else f'loopback, {work.name}'}: {took}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
