"""FabricZeroStrategy: a lightning.fabric.Fabric that trains by ZeRO."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import ClusterEnvironment, Precision
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

from onefold import CheckpointError, ConfigError, LossScale, Optimizer, Zero, accumulate, full_state_dict
from onefold.lightning.checkpoints import load_folder, save_folder
from onefold.lightning.optimizers import as_sharded, clip_by_value, follow
from onefold.lightning.plugins import FabricZeroPrecision
from onefold.lightning.precisions import checked, settings_of
from onefold.lightning.processes import join
from onefold.lightning.sharding import sharded
from onefold.runtime.announce import say_states


class Accumulation:
    """What Fabric.no_backward_sync asks."""

    def __init__(self, reduce: Literal["once", "each"]) -> None:
        self._reduce = reduce

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return accumulate(module, reduce=self._reduce) if enabled else nullcontext()


class FabricZeroStrategy(DDPStrategy):
    """A strategy for lightning.fabric.Fabric; its arguments are those of ZeroStrategy.

    >>> import lightning, onefold.lightning
    >>> strategy = onefold.lightning.FabricZeroStrategy(stage=3)
    >>> lightning.Fabric(strategy=strategy, accelerator="cpu", devices=1).strategy is strategy
    True
    """

    def __init__(
        self,
        zero: Zero | None = None,
        *,
        accumulate: Literal["once", "each"] = "once",
        loss_scale: LossScale | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        **fields: Any,
    ) -> None:
        self._settings = settings_of(zero, loss_scale, fields)
        self._models: WeakSet[nn.Module] = WeakSet()  # a Fabric may outlive its models, and must not hold their memory
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment
        )
        self._backward_sync_control: Any = Accumulation(checked(accumulate))

    # -- what Fabric connects ------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        return self._precision or Precision()

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, FabricZeroPrecision):
            return
        self._settings = self._settings.with_plugin(plugin)
        narrow = self._settings.compute is not torch.float32
        self._precision = FabricZeroPrecision(self._settings.name, lambda: self._optimizers, narrow=narrow)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        assert self.cluster_environment is not None
        join(self.cluster_environment, self.num_processes, self._settings.zero.timeout_s)

    # -- the model and its optimizers ----------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Models are built on the host, or with empty_init on the meta device, and are real once they are sharded."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """A module is moved when it is sharded."""

    def setup_module(self, module: nn.Module) -> Any:
        module = sharded(module, self._settings, self.root_device)
        self._models.add(module)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """The parameters stay the same objects, so that optimizers made before are found their parameters again."""
        module = self.setup_module(module)
        ours = [self._of(module, optimizer) for optimizer in optimizers]
        if scheduler is not None:
            for given, one in zip(optimizers, ours, strict=True):
                follow([scheduler], given, one)
        say_states(module)
        return module, ours, scheduler

    def setup_optimizer(self, optimizer: Any) -> Any:
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for module in self._models:
            if mine <= {id(param) for param in module.parameters()}:
                return self._of(module, optimizer)
        raise ConfigError(
            f"{type(optimizer).__name__} has parameters of no module that was set up; call setup_module(model) first, "
            f"and make the optimizer of model.parameters()"
        )

    def _of(self, module: nn.Module, given: Any) -> Optimizer:
        ours = as_sharded(module, given, self._settings.loss_scale)
        self._optimizers.add(ours)
        return ours

    # -- gradients -----------------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """A norm that is not finite raises in step(), on every rank; in fp16 step() is skipped."""
        return optimizer.clip_grad_norm(float(max_norm), float(norm_type))

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float | int) -> None:
        clip_by_value(optimizer, float(clip_val))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Writes a folder of onefold.save: the sharded module of `state`, its Optimizers, and the rest. Collective."""
        if storage_options is not None or filter:
            raise ConfigError("storage_options and filter found, which onefold.save has not; leave them out")
        models, optimizers, rest = _sorted(state)
        if len(models) != 1:
            raise CheckpointError(
                f"save() found {len(models)} modules in its state ({', '.join(state)}); save one model for each path"
            )
        extra = {name: value.state_dict() if _stateful(value) else value for name, value in rest.items()}
        steps = max((one.steps + one.skipped for one in optimizers), default=0)
        save_folder(path, models[0], optimizers, extra, steps)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fills what is in `state` from what save_checkpoint wrote, and returns what is left over. Collective."""
        if isinstance(state, nn.Module) and Path(path).is_dir():
            load_folder(path, state, (), strict=strict)
            return {}
        if isinstance(state, nn.Module):
            return super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
        models, optimizers, rest = _sorted(state or {})
        if len(models) != 1:
            raise CheckpointError("load() fills one model: give state={'model': model, 'optimizer': optimizer}")
        extra = load_folder(path, models[0], optimizers, strict=strict)
        if strict and (missing := sorted(set(rest) - set(extra))):
            raise CheckpointError(f"{path} does not hold {', '.join(missing)}; leave it out, or load with strict=False")
        for name, value in rest.items():
            if name in extra and _stateful(value):
                value.load_state_dict(extra.pop(name))
            elif name in extra:
                state[name] = extra.pop(name)
        return extra

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """All weights, in rank 0's memory. Collective."""
        return full_state_dict(module)


def _sorted(state: dict[str, Any]) -> tuple[list[nn.Module], list[Optimizer], dict[str, Any]]:
    """The modules, the Optimizers, and the rest."""
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    for name, value in state.items():
        if isinstance(value, torch.optim.Optimizer) and not isinstance(value, Optimizer):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} that was not set up, and has no state; give the optimizer that "
                f"setup() or setup_optimizers() returned"
            )
    return models, optimizers, {k: v for k, v in state.items() if not isinstance(v, nn.Module | Optimizer)}


def _stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
