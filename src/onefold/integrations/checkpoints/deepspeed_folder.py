"""A checkpoint folder of DeepSpeed: ZeRO stages 0 to 3, any number of ranks.

    latest                                        the name of the newest folder
    global_step3/mp_rank_00_model_states.pt       stages 0 to 2: the model, names and shapes of its parameters
    global_step3/zero_pp_rank_R_mp_rank_00_…      stage 3: the same for each rank, frozen parameters in R's part
    global_step3/[bf16_]zero_pp_rank_R_…          for each rank: its part of fp32 masters and moments, in vectors

Stages 1 and 2: the vectors of all ranks, one after the other, are the parameters of a param group in the order of
`param_shapes`, perhaps with padding behind each. Stage 3: each rank's vectors hold its part of every parameter, which
was cut into N equal parts, the last of them padded. Read in DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cost.layout import Span
from onefold.errors import CheckpointError, OnefoldError
from onefold.integrations.checkpoints.foreign import (
    Foreign,
    ForeignGroup,
    ForeignTensor,
    Joined,
    Range,
    Vector,
    is_object,
    stored,
    with_values,
)
from onefold.integrations.checkpoints.pickled import StoredTensor, read_pickled
from onefold.integrations.checkpoints.torch_files import is_optimizer, plain_checkpoint
from onefold.settings.limited import read_text

MODEL, OPTIM = "_model_states.pt", "_optim_states.pt"
OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)(_model_states\.pt|_optim_states\.pt)")
ONE_MODEL = "mp_rank_00_model_states.pt"
DEEPSPEEDS_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "data_sampler",
    "frozen_param_fragments", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "sparse_tensor_module_names",
    "autotp_uc_info", "universal_checkpoint_info",
}  # fmt: skip
VALUES = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


class Group(NamedTuple):
    """A param group, or at stage 3 a part of one, whose parameters are cut from vectors of all ranks."""

    number: int  # of the param group
    shapes: Mapping[str, Sequence[int]]
    settings: dict[str, Any]
    vectors: Mapping[str, Sequence[Vector]]  # "value" or a state -> one vector of all ranks, or at stage 3 one of each
    singles: dict[str, Any]
    paddings: Sequence[int]  # elements behind each parameter


def is_deepspeed(folder: Path) -> bool:
    return (folder / "latest").is_file() or any(folder.glob(f"*{MODEL}"))


def read_deepspeed(folder: Path, names: Sequence[str] | None, scratch: Path) -> Foreign:
    folder = _tagged(folder)
    ranks = _ranks_of(folder, OPTIM)
    models = [folder / ONE_MODEL] if (folder / ONE_MODEL).exists() else _ranks_of(folder, MODEL)
    if not models:
        raise CheckpointError(f"{folder} has no {ONE_MODEL} and no zero_pp_rank_0_mp_rank_00{MODEL}")
    read = read_pickled([*models, *ranks], scratch)
    states, parts = read[: len(models)], read[len(models) :]
    for path, state in zip(models, states, strict=True):
        if not (isinstance(state, dict) and isinstance(state.get("module"), dict)):
            raise CheckpointError(f"{path} holds no 'module', so it is no file of model states of DeepSpeed")
    if not parts:
        return _without_zero(folder, states[0], names)
    optimizers = [_optimizer(path, part) for path, part in zip(ranks, parts, strict=True)]
    stage = _stage(optimizers[0])
    _check_ranks(folder, stage, states, optimizers)
    groups = list(_groups_of_stage_3(states[0], optimizers) if stage == 3 else _groups(folder, states[0], optimizers))
    first = states[0]
    return Foreign(
        f"DeepSpeed {first.get('ds_version')}, stage {stage}, {len(ranks)} ranks: {folder}",
        _tensors(folder, states, groups, stage),
        _merged(groups),
        first.get("global_steps"),
        skipped=first.get("skipped_steps") or 0,
        loss_scale=_loss_scale(optimizers[0]),
        config=first.get("ds_config") or {},
        extra=_extra(first),
    )


# -- files ----------------------------------------------------------------------------------------------------------


def _tagged(folder: Path) -> Path:
    """The folder of one checkpoint: this one, or the newest in it."""
    if not (folder / "latest").is_file():
        return folder
    try:
        tag = read_text(folder / "latest", 1 << 12).strip()
    except OnefoldError as error:
        raise CheckpointError(f"{error}; name a folder global_step… in {folder}") from error
    if not tag or Path(tag).name != tag or not (folder / tag).is_dir():
        raise CheckpointError(f"{folder / 'latest'} names {tag!r}, which is no folder beside it; name one that is")
    return folder / tag


def _ranks_of(folder: Path, ending: str) -> list[Path]:
    """The files of ranks 0, 1, …; raises if one is missing, or if a model was split over ranks otherwise."""
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = OF_RANK.fullmatch(path.name)
        if "expert" in path.name or path.name.startswith("layer_") or (match and int(match[2])):
            raise CheckpointError(
                f"{path} is a part of a model with experts, tensor parallelism or pipeline stages; such folders are "
                f"unsupported: convert the folder with DeepSpeed's ds_to_universal.py or save full weights there"
            )
        if match and match[3] == ending:
            if int(match[1]) in found:
                raise CheckpointError(f"{path} and {found[int(match[1])].name} are both of rank {match[1]}; keep one")
            found[int(match[1])] = path
    if missing := sorted(set(range(max(found, default=-1) + 1)) - found.keys()):
        name = f"zero_pp_rank_{missing[0]}_mp_rank_00{ending}"
        raise CheckpointError(f"{folder} has no {name}, though there are files of higher ranks; copy all of the folder")
    return [found[rank] for rank in sorted(found)]


def _optimizer(path: Path, part: Any) -> dict[str, Any]:
    found = part.get("optimizer_state_dict") if isinstance(part, dict) else None
    if not isinstance(found, dict) or not ({VALUES[1], VALUES[3]} & found.keys()):
        raise CheckpointError(f"{path} holds no part of fp32 masters, so it is no file of optimizer states of ZeRO")
    return found


def _stage(optimizer: Mapping[str, Any]) -> int:
    stage = optimizer.get("zero_stage", 1)  # the optimizer for bf16 does not say it, and is like stage 1
    stage = stage["args"][0] if is_object(stage) else stage
    if stage not in VALUES:
        raise CheckpointError(f"the folder is of ZeRO stage {stage!r}; known are 0 to 3")
    return int(stage)


def _check_ranks(folder: Path, stage: int, states: Sequence[Any], optimizers: Sequence[Mapping[str, Any]]) -> None:
    counts = optimizers[0].get("partition_count")
    wanted = max(counts) if isinstance(counts, list) else counts
    if wanted != len(optimizers):
        raise CheckpointError(
            f"{folder} was written by {wanted} ranks and has {len(optimizers)} files *{OPTIM}; copy all of the folder"
        )
    if stage == 3 and len(states) != wanted:
        raise CheckpointError(f"{folder} was written by {wanted} ranks and has {len(states)} files *{MODEL}")


# -- stages 1 to 3 --------------------------------------------------------------------------------------------------


def _groups(folder: Path, model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    """Stages 1 and 2: one vector of each param group, cut over the ranks."""
    paddings = optimizers[0].get("param_alignment_paddings")
    for number, shapes in enumerate(model["param_shapes"]):
        base = [one["base_optimizer_state"] for one in optimizers]
        states = [_state_of_group(one, number) for one in base]
        rows = {key: [state[key] for state in states] for key, value in states[0].items() if _is_vector(value)}
        rows["value"] = [one[VALUES[1]][number] for one in optimizers]
        settings = dict(base[0]["param_groups"][number]) if is_optimizer(base[0]) else {}
        singles = _singles(states[0], settings, optimizers[0])
        behind = paddings[number] if paddings else [0] * len(shapes)
        yield Group(number, shapes, settings, {key: [Vector(parts)] for key, parts in rows.items()}, singles, behind)


def _state_of_group(base: Any, number: int) -> Mapping[str, Any]:
    """The state of a param group, in DeepSpeed's rigid form or the older elastic one."""
    if is_optimizer(base):
        found: Mapping[str, Any] = base["state"].get(base["param_groups"][number]["params"][0], {})
        return found
    return base[number] if isinstance(base, list) else {}


def _groups_of_stage_3(model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    """Stage 3: param groups are cut into sub-groups of whole parameters, each with one vector on each rank."""
    inner = [one["optimizer_state_dict"] for one in optimizers]
    shapes = iter([row for some in model["param_shapes"] for row in some.items()])
    for sub, vector in enumerate(optimizers[0][VALUES[3]]):
        number = next(i for i, group in enumerate(inner[0]["param_groups"]) if sub in group["params"])
        taken: dict[str, Sequence[int]] = {}
        filled = 0
        while filled < vector.numel and (row := next(shapes, None)) is not None:
            taken[row[0]] = row[1]
            filled += -(-math.prod(row[1]) // len(optimizers))
        first = inner[0]["state"].get(sub, {})
        rows = {"value": [Vector([one[VALUES[3]][sub]]) for one in optimizers]}
        for key in (key for key, value in first.items() if _is_vector(value)):
            rows[key] = [Vector([one["state"][sub][key]]) for one in inner]
        settings = dict(inner[0]["param_groups"][number])
        yield Group(number, taken, settings, rows, _singles(first, settings, optimizers[0]), [0] * len(taken))


def _merged(groups: Sequence[Group]) -> list[ForeignGroup]:
    """The param groups, each from all of its parts."""
    merged: dict[int, ForeignGroup] = {}
    for group in groups:
        merged.setdefault(group.number, ForeignGroup([], group.settings)).names.extend(group.shapes)
    return [merged[number] for number in sorted(merged)]


def _is_vector(value: Any) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1


def _singles(state: Mapping[str, Any], settings: dict[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Step counts, which DeepSpeed's own optimizers keep in their param group."""
    settings.pop("params", None)
    found = {key: value for key, value in state.items() if not _is_vector(value)}
    step = settings.pop("step", optimizer.get("base_optimizer_state_step"))
    return {"step": step, **found} if state and step is not None else found


def _cut(group: Group, ranks: int, stage: int) -> Iterator[tuple[str, dict[str, Joined]]]:
    """Each parameter of a param group with its value and state."""
    start = 0
    for (name, shape), behind in zip(group.shapes.items(), group.paddings, strict=True):
        numel = math.prod(shape)
        part = -(-numel // ranks) if stage == 3 else numel
        found = {}
        for key, vectors in group.vectors.items():
            ranges = [one for vector in vectors for one in vector.ranges(Span(start, start + part))]
            found[key] = Joined(f"{name} ({key})", shape, _first(ranges, numel), vectors[0].dtype)
        yield name, found
        start += part + behind


def _first(ranges: Sequence[Range], numel: int) -> list[Range]:
    """The first elements of these ranges: what follows them is padding."""
    kept: list[Range] = []
    for one in ranges:
        left = numel - sum(range.span.numel for range in kept)
        kept += [Range(one.tensor, one.span.clip(Span(one.span.start, one.span.start + left)))] if left else []
    return kept


def _tensors(folder: Path, states: Sequence[Any], groups: Sequence[Group], stage: int) -> list[ForeignTensor]:
    """All tensors in the model's order."""
    model, ranks = states[0], len(states) if stage == 3 else 1
    trained = {name: (group, parts) for group in groups for name, parts in _cut(group, ranks, stage)}
    shared: dict[str, list[str]] = {}
    for alias, name in (model.get("shared_params") or {}).items():
        shared.setdefault(name, []).append(alias)
    aliases = {alias for names in shared.values() for alias in names}
    found = []
    for name in [*model["module"], *(name for name in trained if name not in model["module"])]:
        also = tuple(shared.get(name, ()))
        if name in trained:
            group, parts = trained[name]
            value = parts.pop("value")
            found.append(ForeignTensor(name, "trained", value, also, parts, group.singles))
        elif name in (model.get("frozen_param_shapes") or {}):
            found.append(ForeignTensor(name, "frozen", _frozen(name, states), also))
        elif name not in aliases and isinstance(model["module"][name], StoredTensor):
            value, kind = model["module"][name], "buffer" if name in model["buffer_names"] else "frozen"
            if kind == "buffer" or stage < 3:  # else the second name of a parameter, empty like the first
                found.append(ForeignTensor(name, kind, stored(name, value), also))
    return found


def _frozen(name: str, states: Sequence[Any]) -> Joined:
    shape = states[0]["frozen_param_shapes"][name]
    parts = Vector([state["frozen_param_fragments"][name] for state in states])
    ranges = parts.ranges(Span(0, parts.numel))
    return Joined(name, shape, _first(ranges, math.prod(shape)), parts.dtype)


# -- the rest -------------------------------------------------------------------------------------------------------


def _without_zero(folder: Path, state: Mapping[str, Any], names: Sequence[str] | None) -> Foreign:
    """Stage 0: the optimizer is in the file of the model; where 16 bits computed, with fp32 masters."""
    optimizer = state.get("optimizer")
    model = dict(state["module"])
    if isinstance(optimizer, dict) and "fp32_groups_flat" in optimizer:
        raise CheckpointError(
            f"{folder} is of stage 0 with flat fp32 masters, whose order is not written down; save it at stage 1"
        )
    if isinstance(optimizer, dict) and not is_optimizer(optimizer):
        masters = [value for group in optimizer.get("fp32_groups", ()) for value in group]
        optimizer = optimizer.get("optimizer_state_dict")
    else:
        masters = []
    found = plain_checkpoint(
        str(folder), model, optimizer, names=names, step=state.get("global_steps"), extra=_extra(state),
        buffers=state.get("buffer_names") or (), masters=masters,
    )  # fmt: skip
    origin = f"DeepSpeed {state.get('ds_version')}, stage 0: {folder}"
    return replace(found, origin=origin, config=state.get("ds_config") or {}, skipped=state.get("skipped_steps") or 0)


def _loss_scale(optimizer: Mapping[str, Any]) -> float | None:
    scaler = optimizer.get("loss_scaler")
    state = scaler.get("state") if isinstance(scaler, dict) and is_object(scaler) else None
    scale = state.get("cur_scale") if isinstance(state, dict) else None
    return float(scale) if optimizer.get("dynamic_loss_scale") and isinstance(scale, int | float) else None


def _extra(state: Mapping[str, Any]) -> dict[str, Any]:
    """The client state and the schedule, which load() returns."""
    return {key: with_values(value) for key, value in state.items() if key not in DEEPSPEEDS_OWN and value is not None}
