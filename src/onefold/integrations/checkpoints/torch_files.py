"""What torch.save wrote of a plain model and its optimizer: in one file as a dict, or the optimizer in a second one.
Checkpoint files of Lightning are such dicts.

A torch optimizer numbers its parameters. Newer versions write their names, too, if it was built from
`named_parameters()`. Otherwise the numbers are matched with the model's tensors: each param group has them in the
model's order, and the state has their shapes. Where that leaves more than one possibility, the user gives the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onefold.errors import CheckpointError
from onefold.integrations.checkpoints.foreign import Foreign, ForeignGroup, ForeignTensor, stored, with_values
from onefold.integrations.checkpoints.pickled import StoredTensor, read_pickled

MODEL = ("model", "module", "state_dict", "model_state_dict")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
LIGHTNING = "optimizer_states"  # a list of them, in a checkpoint file of Lightning's
STEP = ("global_step", "global_steps", "step", "iteration")
EXTRA_STATE = "_extra_state"
WAYS = 100_000  # partial matches that are followed at most
GIVE_NAMES = "give the names in the optimizer's order (--names FILE, or names= in Python)"


def read_torch_files(path: Path, second: Path | None, names: Sequence[str] | None, scratch: Path) -> Foreign:
    """A file of torch.save; `second` has the optimizer, if that was saved into a file of its own."""
    values = read_pickled([path, *([second] if second else [])], scratch)
    first = values[0]
    if not isinstance(first, dict):
        raise CheckpointError(f"{path} holds no dict; wanted is a state dict, or a dict of a model and an optimizer")
    model, rest = _part(first, MODEL)
    if model is None:
        model, rest = first, {}
    optimizer, rest = _part(rest, OPTIMIZER)
    if isinstance(rest.get(LIGHTNING), list):
        optimizer, rest = _only(path, rest[LIGHTNING]), {key: value for key, value in rest.items() if key != LIGHTNING}
    if second is not None:
        found = values[1]
        inner = _part(found, OPTIMIZER)[0] if isinstance(found, dict) else None
        optimizer = inner if inner is not None else found
    if optimizer is not None and not is_optimizer(optimizer):
        raise CheckpointError(f"{second or path} holds no state dict of an optimizer: no 'state' and 'param_groups'")
    step = next((rest[key] for key in STEP if type(rest.get(key)) is int), None)
    return plain_checkpoint(str(path), model, optimizer, names=names, step=step, extra=rest)


def is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys()


def plain_checkpoint(
    where: str,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    *,
    names: Sequence[str] | None,
    step: int | None,
    extra: Mapping[str, Any],
    buffers: Sequence[str] = (),
    masters: Sequence[StoredTensor] = (),
) -> Foreign:
    """The checkpoint of a state dict of a model and one of an optimizer. `masters` are the fp32 values of the
    optimizer's parameters, in its order, where the model computes in 16 bits."""
    if not all(isinstance(name, str) for name in model) or not any(isinstance(v, StoredTensor) for v in model.values()):
        raise CheckpointError(f"{where} holds no state dict of a model under any of {', '.join(MODEL)}, nor is it one")
    modules = {
        name.removesuffix(EXTRA_STATE).removesuffix("."): with_values(value)
        for name, value in model.items()
        if name.split(".")[-1] == EXTRA_STATE
    }
    tensors = {name: value for name, value in model.items() if isinstance(value, StoredTensor)}
    tensors = {name: value for name, value in tensors.items() if name.split(".")[-1] != EXTRA_STATE}
    first: dict[tuple[int, str], str] = {}
    also: dict[str, list[str]] = {}
    for name, value in tensors.items():
        also.setdefault(first.setdefault((id(value.file), value.key), name), []).append(name)
    groups: list[ForeignGroup] | None = None
    states: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        kept = {name: tensors[name] for name in also if name not in buffers}
        order = _names(where, optimizer, kept, names)
        groups = [
            ForeignGroup([order[i] for i in group["params"]], {k: v for k, v in group.items() if k != "params"})
            for group in optimizer["param_groups"]
        ]
        states = {order[index]: state for index, state in optimizer["state"].items()}
        tensors |= dict(zip((name for group in groups for name in group.names), masters))
    trained = {name for group in groups or () for name in group.names}
    found = [
        _tensor(name, tensors[name], tuple(more[1:]), states.get(name, {}), groups is None or name in trained)
        for name, more in also.items()
    ]
    return Foreign(f"torch.save: {where}", found, groups, step, modules=modules, extra=with_values(dict(extra)))


def _tensor(
    name: str, value: StoredTensor, also: tuple[str, ...], state: Mapping[str, Any], trained: bool
) -> ForeignTensor:
    vectors = {k: v for k, v in state.items() if isinstance(v, StoredTensor) and v.shape == value.shape and k != "step"}
    singles = {key: item for key, item in state.items() if key not in vectors}
    kind = ("trained" if trained else "frozen") if value.dtype.is_floating_point else "buffer"
    states = {key: stored(f"{name} ({key})", item) for key, item in vectors.items()}
    return ForeignTensor(name, kind, stored(name, value), also, states, singles)


def _part(found: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The first of these keys whose value is a dict, and what is left."""
    key = next((key for key in keys if isinstance(found.get(key), dict)), None)
    return (None if key is None else found[key]), {k: v for k, v in found.items() if k != key}


def _only(path: Path, optimizers: Sequence[Any]) -> Any:
    """The optimizer of a checkpoint of Lightning's; None if it has none."""
    if len(optimizers) > 1:
        raise CheckpointError(
            f"{path} holds the states of {len(optimizers)} optimizers, and only one can be imported; for the weights "
            f"alone call load_from_checkpoint of the LightningModule, before it is sharded"
        )
    return next(iter(optimizers), None)


# -- which number is which parameter --------------------------------------------------------------------------------


def _names(
    where: str, optimizer: Mapping[str, Any], tensors: Mapping[str, StoredTensor], given: Sequence[str] | None
) -> dict[int, str]:
    groups = optimizer["param_groups"]
    numbers = [index for group in groups for index in group["params"]]
    if given is None and all("param_names" in group for group in groups):
        given = [name for group in groups for name in group["param_names"]]
    shapes = {index: _shape(optimizer["state"].get(index, {})) for index in numbers}
    if given is None:
        given = _matched(where, [[shapes[i] for i in group["params"]] for group in groups], tensors)
    if len(given) != len(numbers):
        raise CheckpointError(f"{where}: the optimizer has {len(numbers)} parameters, but {len(given)} names are given")
    for index, name in zip(numbers, given, strict=True):
        if name not in tensors:
            raise CheckpointError(f"{where}: the optimizer has a parameter {name!r}, which the model has not")
        if shapes[index] not in (None, tensors[name].shape):
            raise CheckpointError(
                f"{where}: {name!r} has the shape {tensors[name].shape}, its optimizer state {shapes[index]}; "
                f"{GIVE_NAMES}, or is the optimizer that of another model?"
            )
    return dict(zip(numbers, given, strict=True))


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter, told by its state; None if it has none, or only single values."""
    shapes = [v.shape for k, v in state.items() if isinstance(v, StoredTensor) and k != "step"]
    return max(shapes, key=len, default=None)


class Taken(NamedTuple):
    """A name that a group has taken, and the one before it."""

    before: Taken | None
    group: int
    name: str


def _matched(
    where: str, groups: Sequence[Sequence[tuple[int, ...] | None]], tensors: Mapping[str, StoredTensor]
) -> list[str]:
    """Names of all parameters, group after group, if the shapes allow one match only."""
    names = [name for name, value in tensors.items() if value.dtype.is_floating_point]
    unused = len(names) - sum(map(len, groups))
    start = (0,) * len(groups)
    # Ways to have handed out the first names: how far each group is -> how many ways there are, and one of them.
    ways: dict[tuple[int, ...], tuple[int, Taken | None]] = {start: (1, None)}
    for name in names:
        after: dict[tuple[int, ...], tuple[int, Taken | None]] = {}
        for place, (count, last) in ways.items():
            choices = [(place, last)] if unused > 0 else []
            for number, group in enumerate(groups):
                at = place[number]
                if at < len(group) and group[at] in (None, tensors[name].shape):
                    further = (*place[:number], at + 1, *place[number + 1 :])
                    choices.append((further, Taken(last, number, name)))
            for further, taken in choices:
                known = after.get(further, (0, taken))
                after[further] = (known[0] + count, known[1])
        ways = after
        if len(ways) > WAYS:
            raise CheckpointError(f"{where}: the optimizer's parameters can be matched in too many ways; {GIVE_NAMES}")
    count, last = ways.get(tuple(map(len, groups)), (0, None))
    if count != 1:
        how = "in no way" if count == 0 else f"in {count} ways"
        raise CheckpointError(
            f"{where}: the optimizer's {sum(map(len, groups))} parameters match the model's {len(names)} tensors {how} "
            f"by their order and shapes; {GIVE_NAMES}"
        )
    found: list[list[str]] = [[] for _ in groups]
    while last is not None:
        found[last.group].insert(0, last.name)
        last = last.before
    return [name for group in found for name in group]
