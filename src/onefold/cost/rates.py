"""Seconds of a device's parts by shape and dtype, as `onefold measure` recorded them. Numbers only.

Between measured sizes, rates are interpolated in logarithms; beyond them, the rate of the nearest size holds. Products
whose sides no vector width divides are slower by a factor, so they are compared only with each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from onefold.errors import ConfigError

T = TypeVar("T")
FORMAT = 1
NEAREST = 4  # measured shapes that a rate is interpolated from
VECTOR = 8  # elements: products with a side that is no multiple of it take slower kernels
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # of an element
ALIKE = {"fp16": "bf16", "bf16": "fp16", "tf32": "fp32"}  # the dtype whose figures stand for those of another
Rows = Sequence[Sequence[float]]


class Both(NamedTuple):
    """Seconds of a forward and of its backward."""

    forward: float
    backward: float


class Product(NamedTuple):
    """Seconds of the three products of a linear layer."""

    forward: float
    input_grad: float
    weight_grad: float


class Link(NamedTuple):
    """Messages between ranks."""

    latency_s: float
    rate: float  # bytes per second that each rank sends


class Rates:
    """The record of one device. `record` is what `onefold measure` writes."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = record
        self._known: dict[Any, Any] = {}

    def __deepcopy__(self, memo: object) -> Rates:
        return self  # of a plan that is written as a dict

    def remember(self, key: object, make: Callable[[], T]) -> T:
        """Caches what is worked out of this record, since plans ask for it many times."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    @property
    def device(self) -> str:
        return str(self.record["device"])

    @property
    def cuda(self) -> bool:
        return bool(self.record.get("kind") == "cuda")

    @property
    def launch_s(self) -> float:
        """Seconds of the host to launch one kernel."""
        return float((self.record.get("host") or {}).get("launch", 0.0))

    def _rows(self, part: str, dtype: str, kind: str | None = None) -> Rows:
        tables = self.record.get(part) or {}
        found: Any = tables.get(dtype) or tables.get(ALIKE.get(dtype, "")) or next(iter(tables.values()), {})
        rows: Rows = found if kind is None else found.get(kind, ())
        return rows

    @property
    def computes(self) -> bool:
        """Whether all is recorded that the seconds of a block need."""
        return all(self.record.get(part) for part in ("products", "attention", "elementwise", "loss"))

    def product(self, dtype: str, tokens: float, inputs: int, outputs: int) -> Product:
        """Of a linear layer with so many tokens."""

        def make() -> Product:
            rows = self._rows("products", dtype)
            even = [row for row in rows if _even(*row[1:3]) == _even(inputs, outputs)] or rows
            flops = 2 * tokens * inputs * outputs
            sizes, done = [row[:3] for row in even], [2 * row[0] * row[1] * row[2] for row in even]
            rates = ([one / row[at] for one, row in zip(done, even)] for at in (3, 4, 5))
            return Product(*(flops / nearby((tokens, inputs, outputs), sizes, rate) for rate in rates))

        return self.remember((dtype, tokens, inputs, outputs), make)

    def attention(self, dtype: str, length: int, width: int, rows: float) -> Both:
        """Of causal attention; `rows` are sequences x heads x length."""
        table = self._rows("attention", dtype)
        nearest = min({row[1] for row in table}, key=lambda known: abs(math.log(known / width)))
        of_width = [row for row in table if row[1] == nearest]
        scale = rows * max(width / nearest, 1.0)
        return Both(*(scale * _line(length, [(row[0], row[at] / row[2]) for row in of_width]) for at in (3, 4)))

    def elementwise(self, dtype: str, kind: str, numel: float) -> Both:
        """Of `norm`, `gelu`, `add`, `copy` or `sum` over so many elements.

        Small kernels on a GPU, most of all those of backward, were timed at the pace of the host that launches them; in
        training the host runs ahead. So no kernel takes longer than a launch and its share of the largest one that was
        measured."""
        table = self._rows("elementwise", dtype, kind)
        found = [_line(numel, [(row[0], row[at]) for row in table]) for at in (1, 2)]
        if self.cuda:
            largest = max(table, key=lambda row: row[0])
            found = [min(one, self.launch_s + numel * largest[at] / largest[0]) for at, one in enumerate(found, 1)]
        return Both(*found)

    def moved(self, dtype: str, nbytes: float, kernels: int) -> float:
        """Seconds of so many kernels that together read and write so many bytes, at the rate of a large copy."""
        numel, seconds = max(self._rows("elementwise", dtype, "copy"), key=lambda row: row[0])[:2]
        return nbytes * seconds / (2 * BYTES[dtype] * numel) + kernels * self.launch_s

    def loss(self, dtype: str, tokens: float, words: int) -> Both:
        """Of the cross entropy of logits."""
        table = self._rows("loss", dtype)
        return Both(*(_line(tokens * words, [(row[0] * row[1], row[at]) for row in table]) for at in (2, 3)))

    def blocks(self, dtype: str) -> Rows:
        """Whole blocks: tokens, hidden size, width of a head, length, seconds of forward and of backward."""
        return self._rows("blocks", dtype)

    def sustained(self, dtype: str) -> Rows:
        """Blocks that ran for seconds: tokens, hidden size, width of a head, length, seconds of both passes."""
        return self._rows("sustained", dtype)

    def update_rate(self, tier: str, per_element: float, form: str = "fp32") -> float | None:
        """Bytes per second that an update on the `device` or the `host` reads and writes, of an optimizer with about so
        many bytes per parameter and moments in this form; None if neither it nor fp32 moments were measured."""
        updates = self.record.get("updates") or {}
        rows = updates.get(small_updates(tier, form)) or updates.get(tier)
        if not rows:
            return None
        best = min(rows, key=lambda row: abs(row[1] - per_element))
        return float(best[0] * best[1] / best[2])

    @property
    def copy_rate(self) -> float | None:
        """Bytes per second between host and device each way, while both run."""
        found = (self.record.get("copies") or {}).get("both")
        return None if found is None else float(found)

    def link_rate(self, collective: str = "all_gather") -> Link | None:
        """Of a collective between the ranks that measured it; None if not measured."""
        found = self.record.get("links") or {}
        if not found.get(collective):
            return None
        ranks, rows = found["ranks"], sorted(found[collective])
        (least, first_s), (most, last_s) = rows[0], rows[-1]
        rate = most * (ranks - 1) / ranks / last_s
        moving_s = least * (ranks - 1) / ranks / rate  # of the smallest message, which over a slow link is most of it
        return Link(max(0.0, first_s - moving_s), rate)

    @property
    def cores(self) -> Link | None:
        """The CPU time that messages between CPU ranks take from compute: of each, and by the bytes that a rank sends.
        None if not measured."""
        found = self.record.get("links") or {}
        if not found.get("cores"):
            return None
        shares = (found["ranks"] - 1) / found["ranks"]
        (least, first_s), *_, (most, last_s) = sorted(found["cores"])
        rate = (most - least) * shares / max(last_s - first_s, 1e-12)
        return Link(max(0.0, first_s - least * shares / rate), rate)

    @property
    def block_host_s(self) -> float:
        """Seconds of the host for one block in a step of one rank."""
        return float((self.record.get("host") or {}).get("block", 0.0))

    @property
    def unit_host_s(self) -> float:
        """Seconds of the host for the messages of one unit; the block that was measured is one."""
        return max(0.0, float((self.record.get("host") or {}).get("sharded_block", 0.0)) - self.block_host_s)

    def best_flops(self, dtype: str) -> float:
        """The highest rate of products of this dtype."""
        rows = self._rows("products", dtype)
        return max((2 * row[0] * row[1] * row[2] / min(row[3:]) for row in rows), default=0.0)

    def lines(self) -> list[str]:
        """What was measured, in a few lines."""
        found, record = [f"{self.device}, torch {self.record['versions']['torch']}, {self.record['date']}"], self.record
        rates = [f"{name} {self.best_flops(name) / 1e12:.4g}" for name in record.get("products") or ()]
        found += [f"products, TFLOP/s at best: {', '.join(rates)}"] if rates else []
        for tier in record.get("updates") or ():
            speeds = ", ".join(f"{row[0] / row[2] / 1e9:.3g}" for row in record["updates"][tier])
            found.append(f"AdamW on the {tier}, billion parameters/s: {speeds}")
        if record.get("copies"):
            found.append("copies, GB/s: " + ", ".join(f"{k} {v / 1e9:.3g}" for k, v in record["copies"].items()))
        if link := self.link_rate():
            found.append(f"all-gather over {record['links']['ranks']} ranks: {link.rate / 1e9:.3g} GB/s sent by each")
        if record.get("host"):
            found.append(f"host: {1e6 * record['host']['launch']:.3g} µs for a launch, "
                         f"{1e3 * record['host']['block']:.3g} ms for a block")  # fmt: skip
        left = record.get("left_out") or ()
        return found + ([f"not measured: {', '.join(left)}"] if left else [])


def small_updates(tier: str, form: str) -> str:
    """What a record calls updates on a tier with moments in a small form."""
    return f"{tier}, {form} moments"


def _even(inputs: float, outputs: float) -> bool:
    return not (inputs % VECTOR or outputs % VECTOR)


def nearby(wanted: Sequence[float], sizes: Sequence[Sequence[float]], values: Sequence[float]) -> float:
    """A value at a size, from those at the nearest sizes, each of which weighs by its distance; all in logarithms."""
    logs = [math.log(one) for one in wanted]
    far = [sum((math.log(a) - b) ** 2 for a, b in zip(size, logs)) for size in sizes]
    near = sorted(range(len(sizes)), key=far.__getitem__)[:NEAREST]
    weights = [1 / (far[at] + 1e-9) ** 2 for at in near]
    return math.exp(sum(w * math.log(values[at]) for w, at in zip(weights, near)) / sum(weights))


def _line(at: float, points: Sequence[tuple[float, float]]) -> float:
    """Seconds at a size: between two measured sizes on a straight line of logarithms, beyond them in proportion."""
    points = sorted(points)
    if at <= points[0][0]:
        return points[0][1] * at / points[0][0]
    if at >= points[-1][0]:
        return points[-1][1] * at / points[-1][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if at <= x1:
            share = math.log(at / x0) / math.log(x1 / x0)
            return math.exp((1 - share) * math.log(y0) + share * math.log(y1))
    raise AssertionError(at)


def read_rates(path: Path) -> Rates:
    """The record in a file that `onefold measure` wrote."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON; give a file that `onefold measure` wrote") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or "device" not in found:
        raise ConfigError(f"{path} is no record of a device; give a file that `onefold measure` wrote")
    return Rates(found)


@lru_cache(maxsize=8)
def shipped_rates(kind: str) -> Rates | None:
    """The record of a kind of device that comes with this package, by its name in the hardware table."""
    file = files("onefold.cost") / "devices" / f"{kind}.json"
    return Rates(json.loads(file.read_text())) if file.is_file() else None
