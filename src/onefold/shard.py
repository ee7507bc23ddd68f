"""shard(): assembles units, schedule, engine and hooks around a model, in place.

1 Look at the model and lay it out; any mistake here is kept. 2 All ranks agree, or all raise. 3 Values are brought in
line with rank 0, or compared. 4 Parameters move into their units' flat buffers, one unit at a time. 5 Hooks go on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onefold.activations.automatic import AutomaticActivations
from onefold.activations.policy import attach_policy, check_activations
from onefold.comm.agreement import AGREE, agree, agree_on_salt, compare_values, digest, fingerprint, together
from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm, Comms
from onefold.comm.inflight import adopt_orphans
from onefold.comm.mesh import Axes, axes_of
from onefold.comm.meter import Label, Meter
from onefold.cost.sizes import of_layout
from onefold.cost.states import updated_numel
from onefold.errors import ConfigError, MismatchError, ModelError
from onefold.model.blocks import find_blocks
from onefold.model.dtensor_shards import (
    TensorShards,
    agree_on_tensor_shards,
    is_dtensor,
    local_tensor,
    set_local_tensor,
)
from onefold.model.meta import Builder
from onefold.model.survey import FROZEN, Survey, place, place_all, survey
from onefold.offload.host_memory import trim_heap
from onefold.offload.tiers import Tiers
from onefold.runtime.automatic import automatic_stage, automatic_tiers, room_left
from onefold.runtime.engine import Engine, Pipeline, engine_of
from onefold.runtime.hooks import attach
from onefold.settings.offload import Offload
from onefold.settings.placement import Scope, Tier
from onefold.settings.precision import Precision
from onefold.settings.zero import AUTO, Zero
from onefold.state.rounding import narrowed
from onefold.state.unit import Unit

LOG = logging.getLogger("onefold")
ModelT = TypeVar("ModelT", bound=nn.Module)
LARGE_BYTES = 1 << 20  # units below leave no holes worth closing


def shard(model: ModelT, zero: Zero | None = None, /, **fields: Any) -> ModelT:
    """Shard the training state of `model` over ranks, in place, and return `model`.

    `fields` are those of `Zero`, which may also be given as one object. Parameter names and shapes, forward, hooks and
    train() stay as they were. A model stays on the device where it is; a model on the meta device becomes real on this
    rank's GPU, if there is one. Collective: every rank calls it.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> model.weight.shape
    torch.Size([8, 8])
    """
    return shard_over(axes_of(fields.get("mesh", getattr(zero, "mesh", None))), model, zero, fields)


def shard_over(axes: Axes, model: ModelT, zero: Zero | None, fields: dict[str, Any]) -> ModelT:
    """shard(), over axes that need not be real."""
    error: Exception | None = None
    settings, found = Zero(), Survey([], [], False, {}, [], [], [])
    device = _device(model, fields.get("device", getattr(zero, "device", None)), axes)
    try:
        settings = Zero.of(zero, fields)
        found = survey(model, settings, axes.shard.size, axes.replica.size, axes.tp.world_ranks)
        check_activations(settings, find_blocks(model, settings.units), axes.tp.size)
    except Exception as mistake:  # whatever it is, the other ranks must hear of it
        error = mistake
    meter = Meter()
    comms = Comms.over(axes, device, settings.timeout_s, meter)
    comm, world = comms.shard, comms.world
    parts = _agree(comms, settings, found, error)
    if device.type == "cpu" and torch.cuda.is_available() and not (found.meta or world.simulated or world.rank):
        LOG.warning(
            "the model's parameters are on the CPU, so it trains there, though this process sees a GPU; call "
            "model.cuda() before shard(), or build the model on the meta device; if the CPU is meant, hide the GPU "
            "(CUDA_VISIBLE_DEVICES=)"
        )
    if settings.schedule == "negotiate" and not comm.any_order:
        raise ConfigError('schedule="negotiate" needs gloo on CPU; on GPUs use full_parameters around uneven forwards')
    if Offload.of(settings.offload).optimizer is not None and comms.pp.size > 1:
        raise ConfigError("offload does not go with a mesh axis 'pp' yet; leave one of them out")
    salt = agree_on_salt(world)
    for one in comms:
        one.salt = salt
    comm.posted.model = str(salt)
    adopt_orphans(lambda blob: world.exchange(blob, Label("agree", "what is left over")))

    policy = Precision.of(settings.precision).decided(own_sum=comm.sums_here, cuda=device.type == "cuda")
    why = ""
    if settings.stage == "auto":
        settings, why = automatic_stage(settings, found, policy, device, world, axes)
    decided: dict[str, Tier] = {}
    if Offload.of(settings.offload).optimizer == AUTO:
        decided, told = automatic_tiers(settings, found, policy, device, world, axes)
        why = "; ".join(part for part in (why, told) if part)
    named = [*found.trained, *found.frozen]
    if found.meta and (local := [name for name, param in named if name in parts and not is_dtensor(param)]):
        raise ModelError(
            f"{', '.join(local[:5])} is a part of a tensor, on the meta device: filled here it would be alike on all "
            f"ranks of 'tp'; build it with its values, or split it with torch's parallelize_module"
        )
    together(comms, lambda: _synchronise(comms.everyone, [*named, *model.named_buffers()], settings))
    if comms.tp.size > 1 and not found.meta:
        together(comms, lambda: _compare_over_tp(comms.tp, [(n, p) for n, p in named if n not in parts]))
    pool, tiers = Pool(device, keeps=comm.any_order), Tiers(device, keeps=comm.any_order)
    units: list[Unit] = []
    try:
        units = _build_units(model, found, settings, policy, comms, pool, tiers, decided)
    except Exception as mistake:  # a file that one rank lacks, say
        error = mistake
    agree(world, [], error)
    placed = {slot.name for unit in units for slot in unit.layout.slots}
    engine = Engine(
        model=model,
        zero=settings,
        placement=place_all(settings).over(comm.size),
        comms=comms,
        pool=pool,
        units=[unit for unit in units if unit.trained],
        sharded=[unit for unit in units if unit.placement.parameters is Scope.SHARDED or unit.placement.late],
        tiers=tiers,
        frozen=[(name, param) for name, param in found.frozen if name not in placed],
        digest=digest(found.lines),
        precision=policy,
        why=why,
        layouts=found.layouts,
        tensor_shards=parts,
        pipeline=_pipeline(comms, sum(unit.trained for unit in units)),
    )
    blocks = find_blocks(model, settings.units)
    attach(engine, blocks)
    recomputed = blocks[:: settings.checkpoint_every]
    if settings.activations == AUTO:
        room = room_left(settings, found, policy, device, axes, list(decided.values()).count(Tier.DEVICE))
        AutomaticActivations(engine, recomputed, comms.tp, room, len(blocks) - len(recomputed))
    else:
        attach_policy(engine, settings.activations, recomputed, comms.tp)
    meter.cut()
    return model


def _agree(comms: Comms, settings: Zero, found: Survey, error: Exception | None) -> TensorShards:
    """All ranks have the same settings, those with equal parts the same model, those of "tp" parts of one; or all
    raise. What is split over "tp"."""
    everyone, tp, world = comms.everyone, comms.tp, comms.world
    if everyone is world:
        agree(everyone, found.lines, error)
        return {}
    agree(world, settings.describe() if error is None else [], error)
    parts: TensorShards = {}
    named = sorted([*found.trained, *found.frozen], key=lambda pair: pair[0])
    together(comms, lambda: agree(everyone, found.lines))
    together(comms, lambda: parts.update(agree_on_tensor_shards(lambda row: tp.exchange(row, AGREE), tp.rank, named)))
    return parts


def _pipeline(comms: Comms, units: int) -> Pipeline:
    """Where there is no "pp", all ranks are of one stage."""
    world, mine = comms.world, [comms.pp.rank, units]
    rows = [mine] * world.size
    if comms.pp.size > 1:
        rows = [json.loads(row) for row in world.exchange(json.dumps(mine).encode(), AGREE)]
    near = frozenset(world.world_rank(rank) for rank, row in enumerate(rows) if row[0] == mine[0])
    return Pipeline(max(row[1] for row in rows), near)


def _compare_over_tp(tp: Comm, named: list[tuple[str, nn.Parameter]]) -> None:
    """What is not split is the same on all ranks of "tp"; a part that nobody marked would be silently wrong."""
    mine = [fingerprint(local_tensor(param)) for _, param in named]
    rows = [json.loads(row) for row in tp.exchange(json.dumps(mine).encode(), AGREE)]
    for rank, row in enumerate(rows):
        if other := [name for (name, _), theirs, ours in zip(named, row, rows[0], strict=True) if theirs != ours]:
            raise MismatchError(
                f"{', '.join(other[:5])} has other values on rank {tp.world_rank(rank)} than on {tp.world_rank(0)}; "
                f"they share 'tp'; fill it alike on both, or, if it is a part of a larger tensor, set "
                f"param.tensor_model_parallel = True (and param.partition_dim) before shard()"
            )


def _build_units(
    model: nn.Module,
    found: Survey,
    settings: Zero,
    policy: Precision,
    comms: Comms,
    pool: Pool,
    tiers: Tiers,
    decided: dict[str, Tier],
) -> list[Unit]:
    """Move the parameters into their units, one unit at a time; frozen ones that stay whole are left where they are."""
    builder = Builder(model, pool.device, settings.init, settings.seed) if found.meta else None
    params, units = dict(found.trained + found.frozen), []
    _reserve(found, settings, policy, comms.shard, tiers, decided)
    for layout in found.layouts:
        placement = place(layout, settings, comms.shard.size, decided)
        members = [params.pop(slot.name) for slot in layout.slots]
        if builder:
            builder.build(members)
        trained, dtype = not layout.kind.endswith(FROZEN), found.dtypes[layout.slots[0].name]
        if trained or placement.parameters is Scope.SHARDED:
            dtypes = policy.dtypes(dtype)
            units.append(
                Unit(layout, members, placement, comms.shard, comms.replica, pool, dtypes, tiers, trained=trained)
            )
        else:
            for param in members:
                if param.dtype is not dtype:
                    set_local_tensor(param, narrowed(local_tensor(param).detach(), dtype))
        del members
        if pool.device.type == "cpu" and layout.numel * layout.itemsize >= LARGE_BYTES:
            trim_heap()
    if builder:
        builder.finish()
    return units


def _reserve(
    found: Survey, settings: Zero, policy: Precision, comm: Comm, tiers: Tiers, decided: dict[str, Tier]
) -> None:
    """Is there room for what shard() itself puts on the host or on disk? The optimizer's state comes later."""
    needed = dict.fromkeys(Tier, 0)
    for layout in found.layouts:
        placement = place(layout, settings, comm.size, decided)
        widths = policy.dtypes(found.dtypes[layout.slots[0].name]).widths
        size = of_layout(layout, comm.rank, widths, trained=not layout.kind.endswith(FROZEN))
        needed[placement.optimizer_tier] += updated_numel(size, placement) * widths.master
        needed[placement.parameters_tier] += size.shard * widths.compute
    offload = Offload.of(settings.offload)
    tiers.reserve("offload", host_bytes=needed[Tier.HOST], disk_bytes=needed[Tier.DISK], path=offload.path)


def _device(model: nn.Module, wanted: Any, axes: Axes) -> torch.device:
    """Where the model is, or where a model on the meta device will be: on this rank's GPU if NCCL serves it."""
    if isinstance(model, nn.Module):
        for param in model.parameters():
            if param.device.type != "meta":
                return param.device
    if isinstance(wanted, str):
        asked = torch.device(wanted)
        if asked == torch.device("cuda") and torch.cuda.is_available():  # the one that is current
            return torch.device("cuda", torch.cuda.current_device())
        return asked
    if torch.cuda.is_available() and axes.shard.backend(torch.device("cuda")) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _synchronise(comm: Comm, named: list[tuple[str, Tensor]], settings: Zero) -> None:
    """Bring real values in line with rank 0's, or compare them."""
    real = [(name, local_tensor(tensor)) for name, tensor in named if tensor.device.type != "meta"]
    if settings.sync == "check":
        compare_values(comm, real)
        return
    for batch in _batches([tensor for _, tensor in real], settings.bucket_bytes):
        with torch.no_grad():
            comm.broadcast(batch, AGREE)


def _batches(tensors: list[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if batch and filled + tensor.nbytes > limit_bytes:
            yield batch
            batch, filled = [], 0
        batch.append(tensor)
        filled += tensor.nbytes
    if batch:
        yield batch


@contextmanager
def accumulate(model: nn.Module, reduce: str | None = None) -> Iterator[None]:
    """Accumulate gradients: put all micro-batches of a step but the last inside this context.

    reduce="once" keeps each rank's unreduced sum, which takes memory for gradients of full size, and reduces it with
    the last micro-batch. "each" reduces every micro-batch into the sharded gradient: 1/N of the memory, and one
    reduce-scatter per micro-batch. By default "once" at stages 0 and 1, "each" at stages 2 and 3.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> with onefold.accumulate(model):
    ...     model(torch.ones(1, 8)).sum().backward()
    >>> model(torch.ones(1, 8)).sum().backward()
    """
    with engine_of(model).accumulate(reduce):
        yield


def catch_up(model: nn.Module) -> None:
    """With schedule="negotiate": serve other ranks the parameters they need, until every rank has called `catch_up`.

    Call it after a loop that is longer on some ranks than on others, such as generation, and before collectives of your
    own. Backward, `step` and `full_parameters` wait for other ranks in the same way. Collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3, schedule="negotiate")
    >>> for _ in range(1 + torch.distributed.get_rank()):
    ...     _ = model(torch.ones(1, 8))
    >>> onefold.catch_up(model)
    """
    engine_of(model).unsharding.gathers.catch_up()
