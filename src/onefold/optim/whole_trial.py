"""Whether an optimizer class needs whole tensors, and no more than one at a time; found by running it, as in
elementwise.py.

The class updates two small matrices with one optimizer, and copies of them with an optimizer each; the results must
agree. Muon, LAMB, LARS, Adafactor and Shampoo do. A class that scales by a norm over all its tensors does not. For each
shape of a model's tensors a first update shows whether the class takes it, and what state it keeps.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from onefold.cost.layout import padded
from onefold.cost.states import LEAF, StateCost
from onefold.errors import OptimizerError
from onefold.offload.image import LEAST_NUMEL
from onefold.optim.trials import GRADIENTS, REMEDY, SendsMessages, alike, bare_step, group_settings, on_numbers, trained

SHAPE = (24, 40)  # of the trial's matrices: not square, so that state of rows, columns and elements differ in size
FAKE_FROM = 1 << 18  # elements: larger tensors are tried without memory


@on_numbers()
def examine_whole(
    cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Any], StateCost]:
    """The class's default hyperparameters and the bytes of its state; raises unless each tensor's update depends on
    that tensor alone."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, *SHAPE, generator=generator, dtype=dtype)
    grads = [torch.randn(2, *SHAPE, generator=generator, dtype=dtype) * size for size in GRADIENTS]
    together, apart = ([nn.Parameter(value.to(device, copy=True)) for value in values] for _ in range(2))
    try:
        joint = cls(together, **kwargs)
        before = group_settings(joint)
        seen, alone = trained(joint, together, [list(rows) for rows in grads]), []
        for index, param in enumerate(apart):
            one = cls([param], **kwargs)
            alone.append(trained(one, [param], [[rows[index]] for rows in grads]))
    except SendsMessages:
        raise
    except Exception as error:
        raise OptimizerError(
            f"{cls.__name__} can update neither shards nor whole tensors one by one: {error}. {REMEDY}"
        ) from error
    if not alike(seen, [torch.cat(rows) for rows in zip(*alone, strict=True)]):
        raise OptimizerError(
            f"{cls.__name__} is not element-wise, and needs several tensors at once: two tensors updated by one "
            f"optimizer and by an optimizer each got different values, and no rank has all tensors. {REMEDY}"
        )
    if changed := [key for key, value in group_settings(joint).items() if before.get(key) != value]:
        raise OptimizerError(
            f"{cls.__name__} keeps state in its param group ({', '.join(changed)}), but every tensor has a param group "
            f"of its own, so that state would differ between tensors. {REMEDY}"
        )
    form = StateForm.of(dict(one.state[param]), SHAPE)
    return dict(joint.defaults), StateCost(form.vector_bytes // param.numel(), form.other_bytes)


class StateForm(NamedTuple):
    """The state that a class keeps for a tensor of one shape."""

    like: dict[str, tuple[torch.dtype, torch.device]]  # of tensors, by name
    vector_bytes: int  # of tensors of the parameter's shape
    other_bytes: int
    tensors: tuple[tuple[int, int], ...]  # the elements and the bytes of each tensor

    @classmethod
    def of(cls, state: dict[str, Any], shape: tuple[int, ...]) -> StateForm:
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        vectors = sum(leaf.nbytes for leaf in tensors if leaf.shape == shape)
        like = {key: (value.dtype, value.device) for key, value in state.items() if isinstance(value, Tensor)}
        sizes = tuple((leaf.numel(), leaf.nbytes) for leaf in tensors)
        return cls(like, vectors, sum(leaf.nbytes for leaf in tensors) - vectors, sizes)

    @property
    def kept(self) -> tuple[int, int]:
        """Bytes of the tensors that move between device, host and disk with their unit, and of those too small to."""
        large = sum(nbytes for numel, nbytes in self.tensors if numel >= LEAST_NUMEL)
        return large, sum(nbytes for _, nbytes in self.tensors) - large

    @property
    def in_file(self) -> tuple[int, int]:
        """Bytes of what a file would keep, each tensor padded, and of what would stay in memory."""
        kept = sum(padded(nbytes, LEAF) for numel, nbytes in self.tensors if numel >= LEAST_NUMEL)
        return kept, sum(nbytes for numel, nbytes in self.tensors if numel < LEAST_NUMEL)


@on_numbers()
def first_whole_state(
    cls: type[torch.optim.Optimizer],
    kwargs: dict[str, Any],
    settings: dict[str, Any],
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> StateForm:
    """What the class keeps for a tensor of this shape after its first update; raises what the class raises."""

    def run() -> dict[str, Any]:
        param = nn.Parameter(torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(0.5))
        optimizer = cls([param], **kwargs)
        optimizer.param_groups[0].update(settings)
        param.grad = torch.full_like(param, 0.25)
        bare_step(optimizer)
        return dict(optimizer.state[param])

    if torch.Size(size).numel() >= FAKE_FROM:
        with suppress(Exception), FakeTensorMode():  # a class that looks at values runs on a tensor with memory
            return StateForm.of(run(), size)
    return StateForm.of(run(), size)
