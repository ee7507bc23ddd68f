"""Step times and peaks that the planner predicts beside those that were measured, as docs/results/predicted.md.

    python -m benchmarks.predicted            # writes the page, from the results in this folder and in docs/results
    python -m benchmarks.predicted --check    # writes nothing; fails if the page is not current

Every case is planned with the settings it ran with, and with what `onefold measure` recorded of its machine, not with
figures of the case itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.predicted_cases import DOCS, PAIR, Case, cases, machines
from benchmarks.predicted_cpu import core_costs

PAGE = Path(__file__).resolve().parents[1] / "docs/results/predicted.md"


class Error(NamedTuple):
    """Of all cases: predicted over measured, less one."""

    median: float
    worst: float
    within: int  # how many are within 20%
    count: int


def error(pairs: Sequence[tuple[float, float]]) -> Error:
    off = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return Error(statistics.median(off), max(off), sum(one <= 0.2 for one in off), len(off))


def times(found: Sequence[Case]) -> list[tuple[float, float]]:
    return [(case.estimate.step_s, case.step_s) for case in found if not case.apart]


def peaks(found: Sequence[Case]) -> list[tuple[float, float]]:
    return [(case.estimate.peak_bytes, case.peak_bytes) for case in found if case.peak_bytes]


def page() -> Iterator[str]:
    found = cases()
    yield from HEAD.splitlines()
    yield from (f"- {line}" for line in machines())
    yield ""
    time, peak = error(times(found)), error(peaks(found))
    yield f"**Time: median error {time.median:.1%}, worst {time.worst:.0%}, {time.within} of {time.count} within 20%.**"
    yield f"**Peak: median error {peak.median:.1%}, worst {peak.worst:.1%}, of {peak.count}.**"
    yield ""
    heads = ["case", "predicted", "measured", "error", "compute", "waits", "update", "peak", "measured", "error", "of"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for case in found:
        yield "| " + " | ".join(row(case)) + " |"
    yield from (
        FOOT.replace("APART", apart(found))
        .replace("PAIRS", pairs())
        .replace("SPANS", simulated_span())
        .replace("SPREAD", spread_of_pairs())
        .replace("CORES", "\n".join(f"- {line}" for line in core_costs()))
        .splitlines()
    )


def apart(found: Sequence[Case]) -> str:
    """What is said of the cases that do not count."""
    offs = [f"{one.name} {one.estimate.step_s / one.step_s - 1:+.0%}" for one in found if one.apart]
    if not offs:
        return "All cases count."
    reasons = "; ".join(dict.fromkeys(one.apart for one in found if one.apart))
    return NOT_COUNTED.replace("OFFS", "; ".join(offs)).replace("REASONS", reasons)


def simulated_span() -> str:
    """Between what a step of each simulated rank takes if no message costs anything, and where that was read."""
    found = []
    for path in sorted(DOCS.glob("simulate-*.json")):
        for row in json.loads(path.read_text()):
            last, copies = row["steps_s"][-1], row["stand_ins_s"]
            found.append(f"{row['model']} {ms(last - copies)} to {ms(last)}")
    return ", ".join(found)


def spread_of_pairs() -> str:
    """By how much the steps of one run of two NCCL ranks differ: of the steadiest run, and of the least steady one."""
    runs = [json.loads(path.read_text())["systems"] for path in DOCS.glob("nccl-*-h200.json")]
    found = sorted(max(row["steps_s"]) / min(row["steps_s"]) - 1 for systems in runs for row in systems.values())
    return f"{found[0]:.0%} to {found[-1]:.0%}"


def pairs() -> str:
    """What is said of two ranks on one GPU."""
    return "" if PAIR.exists() else NO_PAIR


def row(case: Case) -> list[str]:
    step = case.estimate.time.step
    off = "not counted" if case.apart else f"{step.total / case.step_s - 1:+.1%}"
    cells = [case.name, ms(step.total), ms(case.step_s), off]
    cells += [ms(step.compute), ms(step.exposed + step.tensor), ms(step.update + step.transfer)]
    if case.peak_bytes:
        peak = case.estimate.peak_bytes
        cells += [gb(peak), gb(case.peak_bytes), f"{peak / case.peak_bytes - 1:+.1%}"]
    else:
        cells += ["", "", ""]
    return [*cells, case.source]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    parser.add_argument("--json", action="store_true", help="print the cases, and write nothing")
    asked = parser.parse_args(arguments)
    if asked.json:
        rows = [
            {"case": case.name, "source": case.source, "predicted": case.estimate.time.step._asdict(),
             "step_s": case.step_s, "predicted_peak_bytes": case.estimate.peak_bytes, "peak_bytes": case.peak_bytes}
            for case in cases()
        ]  # fmt: skip
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return 0
    text = "\n".join(page()) + "\n"
    if asked.check:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    sys.stdout.write("".join(f"{line}\n" for line in text.splitlines() if line.startswith("**")) + f"{PAGE}\n")
    return 0


HEAD = """# Predicted and measured

Step times and peaks of device memory as the planner gives them, beside those that were measured, case by case. Each
case is planned with the settings it ran with. Nothing is fitted to the cases but two numbers
of src/onefold/cost/tiles.py, which are fitted to the peaks of the long sequences. Seconds come from what
`onefold measure` recorded of the device, by shape and dtype. Those of CPU ranks are multiplied by how much slower
compute alone was in the same run, since other programs used the cores too. `python -m benchmarks.predicted` writes this
page from the files that the last column names; `tests/bench/test_predicted.py` compares the two. Rows of
`predicted_cases.py` are runs whose figures were noted there, and of which no file was kept.

What was measured of the machines:
"""
NOT_COUNTED = """*Not counted: OFFS.* Messages of these two ranks go over loopback, and depend on the host of the day. A
run of a pair counts only beside links that were recorded on the same day on the same kind of machine. These are not:
run on REASONS. They ran older code too. Their peaks count.
"""
NO_PAIR = """Two NCCL ranks on one GPU, until
`python -m benchmarks.measure_pair` has recorded on an H200 what they reach on the day of the runs. It was
recorded once on a machine with a slow host, on which messages over loopback depend: with that record the six stored
runs, of another day and machine, were planned 15% too fast to 55% too slow."""
FOOT = """
*Waits* are messages that compute does not hide. *Update* is the optimizer, and transfers that nothing hides. A peak is
what torch's allocator counted; the planner's has 3% of what a step allocates and frees on top, for fragments.

## What a step is made of

| part | what is counted | part of the record |
|---|---|---|
| products | every linear layer: forward, gradients of input and weight | `products`, by shape |
| attention | by length and width of heads | `attention` |
| between products: GPT | norms, nonlinearity, residual sums, gradients of biases | `elementwise` |
| between products: decoder | bytes of every operator as transformers writes it, and a launch each | copy, launch |
| between products: `compile=True` | bytes as fused: every tensor once (`cost/between.py`) | copy, launch |
| kernels together | a factor: whole blocks over the sum of their kernels, at least 1 | `blocks`, `sustained` |
| ends | output layer, cross entropy in fp32, embeddings | `products`, `loss`, copy |
| gradients | bytes of copies into flat buffers, of sums over micro-batches and ranks: see below | `updates` |
| host | launches of all blocks and messages, if they take longer than the device | `host` |
| messages | of every unit, in order: see below | `links` |
| update | bytes of states, masters and gradients | `updates` |
| transfers | host updates, PCIe and disk, as far as compute does not hide them | `updates`, `copies`, `disk` |

*Small kernels.* A kernel over less than about 16 million elements was timed at the pace of the host that launches it,
and in training the host runs ahead. So no kernel is counted as longer than a launch and its share, by elements, of the
largest one that was measured.

*Sums over ranks.* A rank that sums 16-bit gradients in fp32 converts the first part, adds the others one by one, scales
the sum and rounds it, and each of these kernels reads and writes its whole operands (`cost/summing.py`): 11.25 bytes
per parameter over 8 ranks of a node, 15.3 over 64 ranks on 8 nodes, where parts are also sorted by rank.
`tests/planner/test_summing.py` compares these bytes with those that the kernels read and write. What an all-to-all
itself reads and writes is not counted.

*Messages.* All-gathers start `prefetch` units ahead of their use, reductions when their unit has computed. Both share
the link, and the last reduction has nothing left to hide behind: with few units that is a large part. At stages 1 and 2
a unit's all-gather starts once it is updated, while later units are still reduced. Of two ranks on one GPU the record
says, for messages of a block's size, how much longer they take beside compute, how long both kinds take at the same
time, and how much longer compute takes while messages are in flight, which counts as waiting. Before an all-gather a
rank copies its own shard into the buffer.

*CPU ranks* move messages with the cores that compute. So what compute hides of messages is added to it, as the CPU time
that they take, which `onefold measure` records as `cores`. A byte costs the cores more over an Ethernet link than over
loopback, whose packets are larger, and more over a slow link than over a fast one. What each byte that a rank sends
takes:

CORES

The runs on the Neoverse-N1 are older, and have for `cores` the rate of their fastest link.

*Why whole blocks never count as less than their kernels.* The record of the H200 has whole forwards that take up to 6%
less than their four products alone, which cannot be at one clock. Each block was timed after a pause in which it was
made on the host, the products without pauses: so the clock of the blocks was probably higher, and training has no
pauses. `onefold measure` now makes blocks on the device, and has it compute before each.

*Which cases the model was made with, and which only test it.* The factor of whole blocks is from the record, and was
compared with all cases that this page had then; the bytes of the decoder's operators are counted, and were compared
with the three Qwen runs without a compiler. The runs of `clipping-2.78b-h200.json` and the lean ones (compiled,
moments and sums in bf16) were planned after that. Two lean ones were 10% off: since then
the plan knows that their loss is one kernel, which reads logits twice and writes them once, and that their
activations="auto" recomputes as many blocks as do not fit. How reductions overlap was found with two steps over a link
of 50 Mbit/s that are not among the cases; that cores move messages, with stage 3 over loopback, 1x32; what that takes
by kind of link, and the copies of own shards, with CPU times and profiles of the same work on an AMD EPYC, before the
steps over shaped links there. Before the kernels of sums over ranks were counted one by one, the simulated ranks of 64
and of 1024 were planned 26% and 18% too fast: that is how the omission was found, so these two do not test it, and the
ranks of 8 do. Before the all-gathers of stage 2 overlapped reductions, and compute was slowed by messages, the pairs
were planned 22% too fast to 31% too slow. The one is how the runtime orders its messages, the other a figure of the
record of links; no number was fitted to these runs, but it was they that showed what was missing.

*Where it is wrong.* Stage 3 between CPU ranks is planned too fast where messages are not the limit, by up to 16%. Why
is not known; the runs over loopback are of a version whose all-gathers did not send and receive at the same time. Plans
of H200 steps are mostly a few percent too fast. One guess is that a GPU that computes for seconds is held to its power
limit: `onefold measure --only sustained` measures that, and the record has none. Where the norm of gradients is
computed and below its limit (clip-never), host updates start in backward, and the plan counts them after it. Stage 3
of two NCCL ranks is planned up to 16% too fast. One guess: the record has compute beside one kind of message, and
backward has both kinds beside compute. The slowest of a run's five steps takes SPREAD longer than its fastest.

*Simulated ranks.* What was measured of one rank of 64 or of 1024 is its last step without the seconds of the copies
that stand for messages. These run on streams of their own, beside compute, so a step in which messages cost nothing
takes between that and the whole step: SPANS.

*Muon.* Its products are planned at the rate of a model of 24 layers, as models of unknown shapes are. The first run
that was compared was planned 21% too slow: that rate was of one layer and its loss, and is not any more. By itself
Newton–Schulz was measured at 526 TFLOP/s, where 426 are planned; what is no product takes the rest.

APART
*How CPU ranks were measured.* Two ranks with one thread each, in network namespaces joined by a link that `tc` slows
down (`python -m benchmarks.shaped_links`, as root), or over the loopback device (`python -m benchmarks.cpu`). Other
programs used the cores too, so steps of compute alone took turns with the stages, and the record's seconds are
multiplied by the measured over the planned time of compute alone. The link is as the ranks measured it before the
steps; that of loopback is of `sweep-cpu.json`. The cores were idle before the Neoverse-N1's run
over shaped links. During that of the EPYC other programs' tests used the cores: compute alone took two to three
times its CPU time, steps are medians of six, and the run was ended before its part over loopback.

*What is left out.* The runs of 14B and 16.2B, whose placement was chosen automatically, and the two processes of
`benchmarks/activations.py`, whose messages go through the host. PAIRS
"""

if __name__ == "__main__":
    sys.exit(main())
