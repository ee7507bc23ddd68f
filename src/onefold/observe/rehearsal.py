"""A rehearsal: the runtime itself takes two or three steps of a model on tensors without memory, with simulated peers.

torch's FakeTensorMode gives tensors with shapes, dtypes and storages but no memory, so a rehearsal measures what a rank
of N would measure: when units are unsharded, what autograd keeps, which buffers are reused, what is sent. Only the
optimizer's arithmetic is left out; the bytes of its state follow from what the class keeps per element. Gradients of
units that the host updates are offloaded as in a run; bytes on host and disk are counted, and no file is written.

A model whose control flow depends on values (routing, early exit) cannot be rehearsed so: `values=True` then takes the
steps on real tensors of this machine, with replicated parameters, and adds what stage 3 would all-gather.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from onefold.comm.mesh import simulated_axes
from onefold.comm.meter import Flow, Label
from onefold.cost.states import StateBytes, StateCost, parameter_bytes, state_bytes
from onefold.errors import ConfigError, ModelError
from onefold.model.dtensor_shards import is_dtensor
from onefold.model.storage import storage_bytes
from onefold.model.unit_spec import place
from onefold.observe.inventory import sizes_of
from onefold.observe.passes import WHOLE, Backward, Cut, Loss, Passes
from onefold.observe.rehearsed_update import MakeOptimizer, RehearsedWhole
from onefold.observe.reports import memory, track_memory, traffic
from onefold.observe.tensor_messages import TensorMessages
from onefold.optim.host_update import HostGradients
from onefold.optim.kernels.cpu import available
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.moving import move_states
from onefold.runtime.refusals import Call
from onefold.runtime.scaled import scaled_backward
from onefold.runtime.update_policy import NoUpdates
from onefold.settings.offload import AUTO, Offload
from onefold.settings.placement import Placement, Scope, Tier
from onefold.settings.zero import Zero
from onefold.sharding import shard_over

FASTEST_FIRST = (Tier.DEVICE, Tier.HOST, Tier.DISK)
BY_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class GradientsToHost(NoUpdates):
    """The update policy of a rehearsal: offloads gradients of units that the host updates, and updates nothing."""

    def __init__(self, engine: Engine) -> None:
        self._host = HostGradients(engine)

    def reduced(self, index: int, *, final: bool) -> bool:
        return self._host.on_reduced(index, final=final)


class Rehearsal(NamedTuple):
    """What one rank of N would measure in a step after the first."""

    states: StateBytes
    module_buffers: int
    communication: int  # bytes of working buffers between steps; on a GPU the allocator has most of them meanwhile
    peak: dict[str, int]  # bytes by category at the peak
    sent: dict[tuple[str, str], Flow]
    flops: int  # of one forward and backward
    padding: int  # elements
    block_inputs: tuple[int, ...] = ()  # bytes of each block's input, where blocks are recomputed
    checkpoints: int = 0  # bytes of them that this rank keeps on the device
    checkpoints_host: int = 0
    host: StateBytes = StateBytes()  # states in host memory, with gradients that wait for the update
    disk: StateBytes = StateBytes()
    tensor_messages: Mapping[tuple[str, str], Flow] = MappingProxyType({})  # of tensor parallelism, by torch
    parameter_tier: str = "device"  # the slowest on which any unit keeps its parameters

    @property
    def peak_bytes(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.peak.values())


def rehearse(
    model: nn.Module,
    sample: Any,
    zero: Zero,
    cost: StateCost,
    *,
    ranks: int,
    rank: int = 0,
    plays: str = "gloo",
    node_ranks: int | None = None,
    loss: Loss | None = None,
    cut: Cut = WHOLE,
    values: bool = False,
    count_flops: bool = False,
    micro_batches: int = 1,
    device: torch.device | None = None,
    optimizer: MakeOptimizer | None = None,
    tiers: Mapping[str, str] | None = None,
    parameter_tiers: Mapping[str, str] | None = None,
) -> Rehearsal:
    """Rehearses a step of one rank of `ranks`. `sample` is the model's input: a tensor, a tuple of arguments, or a dict
    of keywords. `plays` is the backend, `node_ranks` the number of ranks on each node. `cut` says how the model is cut
    over other axes; of a pipeline the model is one stage, and the sample all micro-batches. `optimizer` makes an
    Optimizer that updates whole tensors; others are rehearsed by their `cost`. `tiers` are those of a run with
    Offload(optimizer="auto"), as its placement().optimizer_tiers has them, and `parameter_tiers` those of its
    parameters, where not all are on the device; without `tiers` a formula chooses. Tensors without memory are on
    `device`, by default the model's. A kernel that is not an operator of torch (Triton, Liger) launches
    on a CUDA tensor without memory, and breaks the process; on the CPU it raises."""
    mode: AbstractContextManager[Any] = nullcontext() if values else FakeTensorMode(allow_non_fake_inputs=True)
    assert zero.stage != "auto"
    cut.check(micro_batches)
    if cut.split is not None:
        model = copy.deepcopy(model)
        cut.split(model)
    asked, offload = zero, Offload.of(zero.offload)
    given = None if tiers is None else {name: Tier(tier) for name, tier in tiers.items()}
    if given is not None and offload.optimizer != AUTO:
        raise ConfigError(
            f"tiers are given, but Offload(optimizer={offload.optimizer!r}) says where state is; use 'auto' or no tiers"
        )
    if given is not None:  # sharded with all state on the host; _keep_on_device moves back what a run has on the device
        offload = Offload(optimizer="host", parameters=offload.parameters and "host")
    if "disk" in (offload.optimizer, offload.parameters):  # the device's memory is the same with disk as with host
        offload = Offload(optimizer="host", parameters=offload.parameters and "host")
    if values and asked.stage == 3:  # all-gathers would need the values of real peers
        zero = Zero.of(zero, {"stage": 2, "offload": dataclasses.replace(offload, parameters=None)})
    else:
        zero = Zero.of(zero, {"offload": offload})
    with mode, warnings.catch_warnings(), torch.autograd.set_multithreading_enabled(False):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        try:
            twin = _twin(model, values, device) if cut.split is None else _without_memory(model, device)
            axes = simulated_axes(
                ranks, rank, plays=plays, tp=cut.tp, pp=cut.pp, stage=cut.stage, values=values, node_ranks=node_ranks
            )
            kept = {name: Tier(tier) for name, tier in (parameter_tiers or {}).items()} if zero.stage == 3 else {}
            fields = {"init": None, "mesh": None, "sync": "rank0"}
            shard_over(axes, twin, zero, fields, None if given is None else kept)
            cut.tie(twin, plays, values=values)
            if given is not None:
                _keep_on_device(engine_of(twin), given)
            inputs = sample if values else tree_map_only(Tensor, lambda tensor: _blank(tensor, device), sample)
            passes = cut.passes(loss, micro_batches)
            update = RehearsedWhole(engine_of(twin), optimizer) if optimizer is not None else None
            found = _some_steps(twin, inputs, passes, cost, asked, count_flops, update, given)
            if cut.tp == 1:
                return found
            with TensorMessages(cut.tp) as messages:
                _passes_alone(engine_of(twin), inputs, passes)
            return found._replace(tensor_messages=messages.flows)
        except BY_VALUES as error:
            raise ModelError(
                f"{type(model).__name__} decides by values ({str(error).splitlines()[0]}), so a plan needs a real "
                f"model and a real sample: call plan(..., values=True), which takes one step here"
            ) from error


def _some_steps(
    model: nn.Module,
    inputs: Any,
    passes: Passes,
    cost: StateCost,
    asked: Zero,
    count_flops: bool,
    update: RehearsedWhole | None,
    given: Mapping[str, Tier] | None,
) -> Rehearsal:
    engine = engine_of(model)
    engine.optimizers.rehearse(GradientsToHost(engine) if update is None else update)
    supported = cost.one_pass and (not engine.comm.on_host or available())
    one_pass = supported and (cost.small or engine.resolved.precision.narrow)
    step = partial(_step, engine, inputs, passes, one_pass, update)
    with FlopCounterMode(display=False) if count_flops else nullcontext() as counter:
        step()  # the first step learns the order of units and allocates buffers
    flops = counter.get_total_flops() if counter is not None else 0
    for _ in range(2):
        kept = _kept_bytes(engine)
        with track_memory(model) as tracker:
            gradients = step()
        if kept == _kept_bytes(engine):
            break  # else buffers grew in the second step too, where units differ in size: the third is the first whole
    now = memory(model)
    owned = [unit.master.owned.numel for unit in engine.units if not unit.updated_on_host]
    moments = sum(cost.vectors(numel) + (cost.per_tensor if numel else 0) for numel in owned)
    if update is not None:
        moments = update.state_bytes(on_host=False)
    states = StateBytes(now.parameters.measured, gradients, now.optimizer.measured + moments)
    peak = tracker.peak()
    peak["optimizer"] = states.optimizer
    updating = {**dict.fromkeys(peak, 0), **states._asdict(), "communication": now.communication.measured}
    updating |= {"buffers": now.buffers.measured, "activations": _update_temporaries(engine, one_pass, cost, update)}
    updating["checkpoints"] = now.checkpoints.measured
    peak = max(peak, updating, key=lambda rows: sum(rows.values()))
    sent = dict(traffic(model).flows)
    units, placements = sizes_of(engine).units, _asked_placements(engine, asked, given)
    if asked.stage == 3 and engine.resolved.settings.stage != 3:
        shards = sum(map(parameter_bytes, units, placements))
        states, peak, sent = _as_stage_3(engine, states._replace(parameters=shards), peak, sent)
    host, disk = (state_bytes(units, placements, cost, tier) for tier in (Tier.HOST, Tier.DISK))
    if update is not None:
        master = state_bytes(units, placements, StateCost(0), Tier.HOST).optimizer
        host = host._replace(optimizer=master + update.state_bytes(on_host=True))
    padding = sum(unit.layout.numel - unit.layout.used_numel for unit in engine.all_units)
    store = engine.checkpoints
    slowest = max((one.parameters_tier for one in placements), key=FASTEST_FIRST.index, default=Tier.DEVICE)
    return Rehearsal(
        states, now.buffers.measured, now.communication.measured, peak, sent, flops, padding,
        tuple(part * store.ranks for part in store.parts) if store else (), now.checkpoints.measured,
        now.checkpoints_host.measured, host, disk,
        parameter_tier=slowest.value,
    )  # fmt: skip


def _kept_bytes(engine: Engine) -> list[int]:
    """The sizes of the buffers that stay from step to step; none on CUDA, where torch's allocator keeps them."""
    return sorted(buffer.nbytes for buffer in engine.pool.buffers()) if engine.pool.keeps else []


def _keep_on_device(engine: Engine, tiers: Mapping[str, Tier]) -> None:
    """Moves the optimizer state of units whose tier is the device to it. That of other units stays on the host, also if
    a run has it on disk: for the device's memory that is the same."""
    names = {unit.name for unit in engine.units}
    if names != tiers.keys():
        missing, odd = sorted(names - tiers.keys()), sorted(tiers.keys() - names)
        raise ConfigError(
            f"tiers are given for {len(tiers)} units, of which {odd[:3]} are none of this model's; {missing[:3]} are "
            f"missing: give placement(model).optimizer_tiers of a run with this model and these settings"
        )
    on_device = {name: tier for name, tier in tiers.items() if tier is Tier.DEVICE}
    move_states(engine, on_device, engine.resolved.why)


def _asked_placements(engine: Engine, asked: Zero, given: Mapping[str, Tier] | None) -> list[Placement]:
    """The placements of all units that the settings ask for; the rehearsal may have used others."""
    auto = Offload.of(asked.offload).optimizer == AUTO
    decided = given or {unit.name: unit.placement.optimizer_tier for unit in engine.units if auto}
    kept = {unit.name: unit.placement.parameters_tier for unit in engine.all_units if auto and asked.stage == 3}
    return [place(unit.layout, asked, decided, kept) for unit in engine.all_units]


def _passes_alone(engine: Engine, inputs: Any, passes: Passes) -> None:
    """Forwards and backwards, whose gradients are dropped."""
    run: Backward = Tensor.backward
    with scaled_backward(1.0):
        passes(engine.model, inputs, run)
    engine.drop_gradients()


def _step(engine: Engine, inputs: Any, passes: Passes, one_pass: bool, update: RehearsedWhole | None) -> int:
    """A step without the arithmetic of the update; the bytes of gradients at its end."""
    half = engine.resolved.precision.compute is torch.float16
    run: Backward = Tensor.backward
    with scaled_backward(1.0):
        passes(engine.model, inputs, run)
    with torch.no_grad():
        engine.complete_gradients(Call.STEP)
        if half:
            engine.pipeline.any_rank(engine.comms.world, bytes(len(engine.units)), Label("overflow", "step"))
        engine.unsharding.reshard_all()
        if update is not None:
            update.update()
        else:
            _update_shards(engine, one_pass)
    engine.after_step()
    gradients = storage_bytes(
        [t for unit in engine.units if not unit.updated_on_host for t in unit.gradients.tensors()]
    )
    engine.drop_gradients()
    return gradients


def _update_shards(engine: Engine, one_pass: bool) -> None:
    for index, unit in enumerate(engine.units):
        engine.wait_reduced(index)
        if engine.updates.reduced(index, final=True):
            continue
        # Scratch of an update by torch's class: see unit_optimizer.py.
        if unit.dtypes.narrow and not one_pass and engine.comm.on_host:
            vectors = 2 if unit.dtypes.master == "split" else 1  # the gradient's, and the master's if that is split
            scratch = [engine.pool.take(unit.master.owned.numel, torch.float32) for _ in range(vectors)]
            for wide in scratch:
                engine.pool.give(wide)
    for unit in engine.units:
        if unit.placement.optimizer is Scope.SHARDED and unit.placement.parameters is Scope.REPLICATED:
            unit.flat_params.gather_updated().wait()


def _update_temporaries(engine: Engine, one_pass: bool, cost: StateCost, update: RehearsedWhole | None) -> int:
    """Bytes of temporaries in an update: torch's Adam on a CPU makes two vectors per vector it updates; Onefold's
    kernels, and those on CUDA, none. The overflow check of fp16 makes the absolute values and three masks. A class that
    updates whole tensors makes two copies of the largest in fp32, as Muon does."""
    if update is not None:
        return 2 * 4 * update.largest_numel
    if not engine.comm.on_host:
        return 0
    here = [unit for unit in engine.units if not unit.updated_on_host]
    looked = here if engine.resolved.precision.compute is torch.float16 else []
    made = [2 * 4 * unit.master.owned.numel for unit in here if not (one_pass and (cost.small or unit.dtypes.narrow))]
    made += [unit.mine.numel * (unit.gradients.dtype.itemsize + 3) for unit in looked]
    return max(made, default=0)


def _as_stage_3(
    engine: Engine, states: StateBytes, peak: dict[str, int], sent: dict[tuple[str, str], Flow]
) -> tuple[StateBytes, dict[str, int], dict[tuple[str, str], Flow]]:
    """Turns the figures of a rehearsal with replicated parameters into those of stage 3: shards, and the two largest
    units unsharded."""
    largest = sorted((u.layout.numel * u.layout.itemsize for u in engine.units), reverse=True)[:2]
    gathered = sent.pop(("gather-updated", "all-gather"), Flow())
    sent[("gather-forward", "all-gather")] = sent[("gather-backward", "all-gather")] = gathered
    return states, {**peak, "parameters": states.parameters + sum(largest)}, sent


def _twin(model: nn.Module, values: bool, device: torch.device | None) -> nn.Module:
    """A copy of the model with parameters and buffers of its own."""
    memo: dict[int, Any] = {}
    if device is None:
        real = (t.device for t in [*model.parameters(), *model.buffers()] if t.device.type != "meta")
        device = next(real, torch.device("cpu"))
    for tensor in () if values else [*model.parameters(), *model.buffers()]:
        blank = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(blank, requires_grad=tensor.requires_grad) if param else blank
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied to rehearse it ({error}); a plan needs a model that was not "
            f"sharded yet and that copy.deepcopy accepts"
        ) from error


def _without_memory(model: nn.Module, device: torch.device | None) -> nn.Module:
    """A model on the meta device, of which some parameters are DTensors: all become tensors without memory, in
    place."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is None:
                    continue
                if not (tensor.is_meta or is_dtensor(tensor)):
                    raise ModelError(f"{name} has values; a split model is rehearsed from the meta device")
                if id(tensor) not in made:
                    blank = torch.empty_like(tensor, device=device or torch.device("cpu"))
                    param = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(blank, requires_grad=tensor.requires_grad) if param else blank
                kept[name] = made[id(tensor)]
    return model


def _blank(tensor: Tensor, device: torch.device | None) -> Tensor:
    device = device or (torch.device("cpu") if tensor.device.type == "meta" else tensor.device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
