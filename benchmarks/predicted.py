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

from benchmarks.predicted_cases import Case, cases, machines

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
    return [(case.estimate.step_s, case.step_s) for case in found]


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
    yield from FOOT.splitlines()


def row(case: Case) -> list[str]:
    step = case.estimate.time.step
    cells = [case.name, ms(step.total), ms(case.step_s), f"{step.total / case.step_s - 1:+.1%}"]
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
case is planned with the settings it ran with. Nothing is fitted to the cases: seconds come from what `onefold measure`
recorded of the machine, by shape and dtype. `python -m benchmarks.predicted` writes this page from the files that the
last column names; `tests/bench/test_predicted.py` compares the two. Rows of `predicted_cases.py` are runs whose figures
were noted there, and of which no file was kept.

What was measured of the machines:
"""
FOOT = """
*Waits* are messages that compute does not hide. *Update* is the optimizer, and transfers that nothing hides. A peak is
what torch's allocator counted; the planner's has 3% of what a step allocates and frees on top, for fragments.

*Where it is wrong.* Nearly all steps took longer than planned, those of wide models most. Why is not known: one guess
is that a GPU slows down when it computes for seconds, which `onefold measure --only sustained` would show. The ranks of
64 and of 1024 are second steps of an older version; what of their time is not compute was not looked into. Eager Qwen
writes its norms out in several kernels, where the planner counts fused ones.

*What is left out.* The run of 16.2B, whose placement was chosen automatically, and the two processes of
`benchmarks/activations.py`, whose messages go through the host. CPU ranks, over shaped links or not: no CPU has been
recorded.
"""

if __name__ == "__main__":
    sys.exit(main())
