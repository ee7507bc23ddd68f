"""shard(): assembles units, schedule, engine and hooks around a model, in place.

1 Look at the model and lay it out; any mistake here is kept. 2 All ranks agree, or all raise. 3 Values are brought in
line with rank 0, or compared. 4 Parameters move into their units' flat buffers, one unit at a time. 5 Hooks go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from onefold.agree import AGREE, agree, agree_on_salt, compare_values, digest
from onefold.blocks import block_of, find_blocks
from onefold.build import Builder
from onefold.comm import Comm, Label, Meter
from onefold.config import Zero
from onefold.engine import ATTRIBUTE, Engine, engine_of
from onefold.errors import ConfigError, ModelError
from onefold.hooks import attach
from onefold.layout import ParamInfo, UnitLayout, plan_units
from onefold.leftovers import let_go
from onefold.memory import Pool
from onefold.mesh import Axes, axes_of
from onefold.placement import STAGES, Placement, Scope
from onefold.precision import Precision
from onefold.rounding import narrowed
from onefold.unit import Unit
from onefold.views import dense_stride

FROZEN = "frozen"
TRAINED_DTYPES = (torch.float32, torch.float64)

ModelT = TypeVar("ModelT", bound=nn.Module)


class Survey(NamedTuple):
    """What was found in a model."""

    trained: list[tuple[str, nn.Parameter]]
    frozen: list[tuple[str, nn.Parameter]]
    meta: bool  # built on the meta device, to be filled here
    dtypes: dict[str, torch.dtype]  # what each parameter computes in
    layouts: list[UnitLayout]
    lines: list[str]  # what all ranks must agree on


def shard(model: ModelT, zero: Zero | None = None, /, **fields: Any) -> ModelT:
    """Spread the training state of `model` over ranks; the same object, its parameters, API and forward unchanged.

    Takes the fields of `Zero`, or one such object. Collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> model.weight.shape
    torch.Size([8, 8])
    """
    error: Exception | None = None
    settings, found = Zero(), Survey([], [], False, {}, [], [])
    mesh = fields.get("mesh", getattr(zero, "mesh", None))
    axes = axes_of(mesh)
    device = _device(model, fields.get("device", getattr(zero, "device", None)), axes)
    try:
        settings = Zero.of(zero, fields)
        found = survey(model, settings, axes)
    except Exception as mistake:  # whatever it is, the other ranks must hear of it
        error = mistake
    meter = Meter()
    comm, replicas, everyone = (Comm(axis, device, settings.timeout_s, meter) for axis in axes)
    agree(everyone, found.lines, error)
    if settings.schedule == "negotiate" and not comm.any_order:
        raise ConfigError('schedule="negotiate" needs gloo on CPU; on GPUs use full_parameters around uneven forwards')
    comm.salt = replicas.salt = everyone.salt = agree_on_salt(everyone)
    comm.offers.model = str(comm.salt)
    let_go(lambda blob: everyone.exchange(blob, Label("agree", "what is left over")))

    policy = Precision.of(settings.precision).decided(own_sum=comm.any_order, cuda=device.type == "cuda")
    _synchronise(everyone, [*found.trained, *found.frozen, *model.named_buffers()], settings)
    pool = Pool(device)
    units: list[Unit] = []
    try:
        units = _build_units(model, found, settings, policy, comm, replicas, pool)
    except Exception as mistake:  # a file that one rank lacks, say
        error = mistake
    agree(everyone, [], error)
    placed = {slot.name for unit in units for slot in unit.layout.slots}
    engine = Engine(
        model=model,
        zero=settings,
        placement=STAGES[settings.stage].over(comm.size),
        comm=comm,
        everyone=everyone,
        pool=pool,
        units=[unit for unit in units if unit.trained],
        sharded=[unit for unit in units if unit.placement.parameters is Scope.SHARD],
        frozen=[(name, param) for name, param in found.frozen if name not in placed],
        digest=digest(found.lines),
        precision=policy,
        layouts=found.layouts,
        replica=replicas.rank,
    )
    attach(engine, find_blocks(model, settings.units))
    meter.cut()
    return model


def _build_units(
    model: nn.Module, found: Survey, settings: Zero, policy: Precision, comm: Comm, replicas: Comm, pool: Pool
) -> list[Unit]:
    """Move the parameters into their units, one unit at a time; frozen ones that stay whole are left where they are."""
    builder = Builder(model, pool.device, settings.init, settings.seed) if found.meta else None
    params, units = dict(found.trained + found.frozen), []
    for layout in found.layouts:
        placement = place(layout, settings, comm.size)
        members = [params.pop(slot.name) for slot in layout.slots]
        if builder:
            builder.build(members)
        trained, dtype = not layout.kind.endswith(FROZEN), found.dtypes[layout.slots[0].name]
        if trained or placement.parameters is Scope.SHARD:
            dtypes = policy.dtypes(dtype)
            units.append(Unit(layout, members, placement, comm, replicas, pool, dtypes, trained=trained))
        else:
            for param in members:
                param.data = param.data if param.dtype is dtype else narrowed(param.data, dtype)
        del members
    if builder:
        builder.finish()
    return units


def place(layout: UnitLayout, settings: Zero, ranks: int) -> Placement:
    """The row of the placement table for one unit: small ones may keep their parameters whole."""
    placement = STAGES[settings.stage].over(ranks)
    keep = settings.keep_whole
    small = keep(layout.name, layout.used_numel) if callable(keep) else layout.used_numel <= keep
    return placement._replace(parameters=Scope.WHOLE) if small else placement


def survey(model: nn.Module, settings: Zero, axes: Axes) -> Survey:
    """Look at a model without touching it; raises what makes it unfit."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"shard() wants a torch.nn.Module, found {type(model).__name__}")
    for name, module in model.named_modules():
        if ATTRIBUTE in module.__dict__:
            where = f"its part {name!r}" if name else "it"
            raise ModelError(f"this model was sharded before ({where}); call shard() once, on the outermost model")
    named = list(model.named_parameters())
    trained = [(name, param) for name, param in named if param.requires_grad]
    frozen = [(name, param) for name, param in named if not param.requires_grad]
    if not trained:
        raise ModelError(
            f"{type(model).__name__} has no parameter that requires grad ({len(frozen)} frozen): nothing to shard"
        )
    device = trained[0][1].device
    meta = device.type == "meta"
    for name, tensor in [*named, *model.named_buffers()]:
        _check_values(name, tensor, meta)
    policy = Precision.of(settings.precision)
    kept = {id(param) for module in policy.kept(model) for param in module.parameters()}
    dtypes = {name: _target(param, policy, id(param) in kept) for name, param in named}
    for name, param in named:
        _check_parameter(name, param, device, policy)
    if not meta:
        _check_overlap([*named, *model.named_buffers()])
    if settings.init is not None and not meta:
        raise ConfigError("init= fills a model built on the meta device, and this one has values: build it on meta")
    blocks = find_blocks(model, settings.units)
    infos = [
        ParamInfo(name, param.numel(), dtypes[name].itemsize, _kind(param, dtypes[name]), block_of(name, blocks))
        for name, param in named
    ]
    ranks = axes.shard.size
    layouts = plan_units(infos, ranks, settings.bucket_bytes, axes.replica.size)
    lines = settings.describe() + [
        f"parameter {name}: shape {tuple(param.shape)}, strides {dense_stride(param)}, {dtypes[name]}, "
        f"requires_grad={param.requires_grad}"
        for name, param in named
    ]
    lines += [f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()]
    lines += [f"unit {unit.name}: {unit.numel} elements, {place(unit, settings, ranks)}" for unit in layouts]
    return Survey(trained, frozen, meta, dtypes, layouts, lines)


def _check_values(name: str, tensor: Tensor, meta: bool) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ModelError(f"{name} has no shape yet (a lazy module); run one forward before shard()")
    if tensor.device.type == "meta" and not meta:
        raise ModelError(
            f"{name} is on the meta device and others are not; build all of it there, or all on a real device"
        )


def _check_overlap(named: list[tuple[str, Tensor]]) -> None:
    """Memory shared by two names that are not one Parameter would be parted silently."""
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in named:
        if tensor.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            start = int(tensor.storage_offset())
            stop = start + int(extent)
            for other_start, other_stop, other in seen.setdefault(tensor.untyped_storage()._cdata, []):
                if start < other_stop and other_start < stop:
                    raise ModelError(
                        f"{other} and {name} share memory but are not one parameter, and shard() would part them; tie "
                        f"weights by assigning the same nn.Parameter, or clone one of them"
                    )
            seen[tensor.untyped_storage()._cdata].append((start, stop, name))


def _target(param: nn.Parameter, policy: Precision, kept: bool) -> torch.dtype:
    """What a parameter computes in: fp32 ones in the policy's dtype unless they are kept, all others in their own."""
    assert isinstance(policy.compute, torch.dtype)
    return policy.compute if param.dtype is torch.float32 and not kept else param.dtype


def _check_parameter(name: str, param: nn.Parameter, device: torch.device, policy: Precision) -> None:
    if param.device != device:
        raise ModelError(f"{name} is on {param.device}, others on {device}; move the model to one device first")
    if param.requires_grad and param.dtype not in TRAINED_DTYPES and param.dtype is not policy.compute:
        remedy = "keep it as two real ones (torch.view_as_real)" if param.is_complex() else "call model.float() first"
        raise ModelError(
            f"{name} is {param.dtype}; trained parameters are float32 or float64 (precision= casts them): {remedy}, "
            f"or freeze it with requires_grad_(False)"
        )


def _kind(param: nn.Parameter, dtype: torch.dtype) -> str:
    return str(dtype) if param.requires_grad else f"{dtype} {FROZEN}"


def _device(model: nn.Module, wanted: Any, axes: Axes) -> torch.device:
    """Where the model is, or where a model on the meta device will be: on this rank's GPU if NCCL serves it."""
    if isinstance(model, nn.Module):
        for param in model.parameters():
            if param.device.type != "meta":
                return param.device
    if isinstance(wanted, str):
        return torch.device(wanted)
    if torch.cuda.is_available() and axes.shard.backend(torch.device("cuda")) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _synchronise(comm: Comm, named: list[tuple[str, Tensor]], settings: Zero) -> None:
    """Bring real values in line with rank 0's, or compare them."""
    real = [(name, tensor) for name, tensor in named if tensor.device.type != "meta"]
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
    """Around all micro-batches of a step but the last: their gradients add up.

    reduce="once" keeps each rank's sum and reduces it with the last micro-batch (whole gradients in memory, no more
    traffic); "each" reduces every micro-batch into the shard (1/N of the memory, one more reduction each). By default
    "once" where gradients are whole, "each" where they are sharded.

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
    """With schedule="negotiate": give other ranks the parameters they need until all ranks have come here.

    For the end of a loop that is longer on some ranks than on others (generation), before collectives of your own.
    Backward, step and `full_parameters` wait in the same way. Collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3, schedule="negotiate")
    >>> for _ in range(1 + torch.distributed.get_rank()):
    ...     _ = model(torch.ones(1, 8))
    >>> onefold.catch_up(model)
    """
    engine_of(model).passes.gathers.catch_up()
