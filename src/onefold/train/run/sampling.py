"""Which window of the data is sample number i: a pure function of (seed, i). Integers only.

The data are cut into windows of seq + 1 tokens that share none. Every k-th group of windows is for validation. In each
epoch the training windows come in an order of their own, each once: a Feistel network, a permutation that needs no
memory. So a run's place in its data is one integer, and step s has the same samples whatever the number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from onefold.errors import ConfigError

GROUP_TOKENS = 16384  # of neighbouring windows that go to one side of the split
ROUNDS = 6
MASK = (1 << 64) - 1


class Windows(NamedTuple):
    """All windows of a stream of tokens, and who gets which.

    >>> Windows.of(tokens=1000, seq=9, val_fraction=0.1).train
    90
    """

    seq: int
    total: int
    period: int  # one group in so many is for validation
    group: int  # windows

    @classmethod
    def of(cls, *, tokens: int, seq: int, val_fraction: float) -> Windows:
        total = tokens // (seq + 1)
        if total < 2:
            raise ConfigError(
                f"{tokens:,} tokens make {total} windows of {seq + 1}, and one is for validation; "
                f"give at least {2 * (seq + 1):,} tokens, or a smaller --seq"
            )
        period = min(max(2, round(1 / val_fraction)), total)
        return cls(seq, total, period, max(1, min(GROUP_TOKENS // (seq + 1), total // period)))

    @property
    def _cycles(self) -> int:
        return self.total // (self.period * self.group)

    @property
    def train(self) -> int:
        """How many are for training."""
        rest = self.total - self._cycles * self.period * self.group
        most = (self.period - 1) * self.group
        return self._cycles * most + min(rest, most)

    @property
    def val(self) -> int:
        return self._cycles * self.group

    def train_window(self, index: int) -> int:
        cycle, place = divmod(index, (self.period - 1) * self.group)
        return cycle * self.period * self.group + place

    def val_window(self, index: int) -> int:
        cycle, place = divmod(index, self.group)
        return (cycle + 1) * self.period * self.group - self.group + place

    def start(self, window: int) -> int:
        """Its first token; it has seq + 1 of them."""
        return window * (self.seq + 1)

    def sample(self, seed: int, number: int) -> int:
        """The window that is sample `number` of a run."""
        epoch, place = divmod(number, self.train)
        return self.train_window(permute(place, self.train, mix(seed, epoch)))

    def evaluated(self, count: int) -> list[int]:
        """So many windows of the validation part, spread over it; the same ones every time."""
        count = min(count, self.val)
        return [self.val_window(i * self.val // count) for i in range(count)]


def permute(index: int, size: int, key: int) -> int:
    """Where `index` goes in a permutation of range(size) that the key chooses."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:  # a walk along the permutation of the next power of four, until it is back among us
        left, right = index >> half, index & low
        for step in range(ROUNDS):
            left, right = right, left ^ (mix(key + step, right) & low)
        index = left << half | right
        if index < size:
            return index


def mix(a: int, b: int) -> int:
    """Two integers to 64 bits that look random."""
    word = (a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = ((word ^ (word >> shift)) * factor) & MASK
    return word ^ (word >> 31)


def share(consumed: int, *, ranks: int, rank: int, micro_batch: int, micro: int) -> range:
    """The samples of one rank's micro-batch in a step that starts at sample `consumed`."""
    first = consumed + (micro * ranks + rank) * micro_batch
    return range(first, first + micro_batch)
