"""How much more memory a forward may take than those before, by the sizes of its inputs."""

from __future__ import annotations

import math

import pytest
import torch

from onefold.runtime.seen_inputs import Growth, SeenInputs


def growths(*sizes: tuple[int, ...]) -> list[float]:
    seen = SeenInputs()
    return [seen.growth([torch.empty(size)]) for size in sizes]


def test_batches_grow_linearly_and_sequences_at_most_with_their_square() -> None:
    assert growths((2, 8), (6, 8), (6, 16), (3, 32)) == [math.inf, 3.0, 4.0, 4.0]


def test_what_is_no_longer_than_something_seen_is_known() -> None:
    """Also after shorter and longer inputs; inputs that are longer in one dimension only are not known."""
    assert growths((8, 8), (2, 32), (8, 8), (2, 9), (1, 32), (3, 32)) == [math.inf, 16.0, 1.0, 1.0, 1.0, 1.5]


@pytest.mark.parametrize("other", [[torch.empty(2, 8, 1)], [torch.empty(2, 8)] * 2])
def test_inputs_of_another_form_are_not_known(other: list[torch.Tensor]) -> None:
    seen = SeenInputs()
    seen.growth([torch.empty(2, 8)])
    assert seen.growth(other) == math.inf and seen.growth(other) == 1.0


def test_the_largest_of_several_inputs_counts() -> None:
    seen = SeenInputs()
    seen.growth([torch.empty(2, 8), torch.empty(2)])
    assert seen.growth([torch.empty(2, 16), torch.empty(4)]) == 4.0


def test_growth_is_true_only_if_something_grows() -> None:
    assert not Growth() and Growth(times=1.5) and Growth(sums=True)
