"""Bytes on the wire: a short run of each system in a network of its own, where the kernel counts what they send.

In a fresh network namespace nobody else uses the loopback device, so its counter is theirs: payload, headers and
acknowledgements. Where the kernel allows no namespace, nothing is reported. What a system moves through shared memory
is not on the wire.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence

from benchmarks.results import Counted
from benchmarks.turns import Record, one_by_one, run
from benchmarks.work import Work
from tests.harness.netns import REFUSED, in_namespace

WARM_UP, STEPS = 2, 3  # the first steps also agree on things


def wire_bytes(work: Work, systems: Sequence[str], *, timeout_s: float) -> Counted:
    asked = json.dumps({"work": dataclasses.asdict(work), "systems": list(systems), "timeout_s": timeout_s})
    command = [sys.executable, "-m", "benchmarks.wire", asked]
    ran = in_namespace(command, timeout_s=timeout_s * len(systems))
    if ran.returncode == REFUSED:
        return Counted({}, "this machine allows no network namespace")
    if ran.returncode != 0:
        return Counted({}, f"the run in a network of its own failed: {ran.stderr.strip().splitlines()[-1:]}")
    return Counted(json.loads(ran.stdout.splitlines()[-1]))


def inside(work: Work, systems: Sequence[str], timeout_s: float) -> dict[str, float]:
    """Called in the namespace. Systems that fail are not counted: they say why in the run that is timed."""
    records: dict[str, Record] = {}
    turns = one_by_one(systems, steps=WARM_UP + STEPS, rounds=1)
    run(work, turns, records, timeout_s=timeout_s, hear=lambda *_: None, counts_wire=True)
    found = {}
    for name, record in records.items():
        counts = [step.sent_bytes for step in record.steps[WARM_UP:] if step.sent_bytes is not None]
        if counts and not record.error:
            found[name] = statistics.median(counts) / work.ranks
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        sys.exit("benchmarks.cpu runs this in a network of its own; try python -m benchmarks.cpu --quick")
    asked = json.loads(sys.argv[1])
    print(json.dumps(inside(Work.read(asked["work"]), asked["systems"], asked["timeout_s"])))
