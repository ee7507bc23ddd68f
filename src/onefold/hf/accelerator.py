"""onefold.hf.Accelerator: accelerate's Accelerator, which shards models in prepare() instead of wrapping them by DDP.

prepare(): 1 models are sharded, in place  2 torch optimizers of their parameters become onefold.Optimizers, which share
their param groups, so that LR schedulers of the torch optimizers go on  3 data loaders, schedulers and all else go
accelerate's own way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import Tensor, nn

from onefold import (
    ConfigError,
    LossScale,
    ModelError,
    Optimizer,
    OptimizerError,
    StateError,
    Zero,
    accumulate,
    full_state_dict,
    init,
    shard,
)
from onefold.hf.checkpoints import load_state, save_state
from onefold.hf.optimizers import ShardedOptimizer, groups_by_name, sharded_optimizer
from onefold.hf.refusals import refuse_engines, refuse_wrapped, with_precision
from onefold.hf.same_data import SameDataAccelerator
from onefold.hf.whole_model import whole_model_methods
from onefold.integrations.transformers_loading import deferred_values
from onefold.runtime.announce import say_states
from onefold.runtime.engine import is_sharded

PREPARED = "_is_accelerate_prepared"  # accelerate's mark of what prepare() has returned


class Accelerator(SameDataAccelerator):
    """accelerate.Accelerator whose prepare() shards models by Onefold instead of wrapping them by DDP.

    `zero` are the settings of `onefold.shard`, by default Zero(). All other keywords are accelerate's, and the loop
    stays as it is: prepare, accumulate, backward, clip_grad_norm_, save_state, load_state, unwrap_model and
    get_state_dict. mixed_precision= becomes the precision of the model: there is no autocast, and the loss scale of
    fp16 is Onefold's. On a mesh with the axis "sequence" models of transformers attend over cut sequences (see
    `onefold.hf.cut_sequences`), and ranks that share sequences read the same data.

    >>> import torch, onefold.hf
    >>> accelerator = onefold.hf.Accelerator(zero=onefold.Zero(stage=3))
    >>> model = torch.nn.Linear(4, 4)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    >>> accelerator.backward(model(torch.ones(1, 4, device=accelerator.device)).sum())
    >>> norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    >>> optimizer.step(); optimizer.zero_grad()
    """

    def __init__(self, *args: Any, zero: Zero | None = None, **kwargs: Any) -> None:
        refuse_engines(kwargs)
        super().__init__(*args, zero=zero, **kwargs)
        init()
        self.zero = with_precision(zero or Zero(), self.mixed_precision)
        self.native_amp, self.scaler = False, None  # the sharded model computes in 16 bits itself
        self._saving, self._hidden = False, list[AcceleratedOptimizer]()
        self.says_states = True  # in prepare(); Trainer says more, since it has a batch
        self._optimizers: list[AcceleratedOptimizer]

    @property
    def non_blocking(self) -> bool:
        """Batches are sent to the device while the host goes on, whatever the data loaders' configuration says."""
        return True

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Shard the models, make onefold.Optimizers of the torch optimizers, and prepare data loaders and schedulers as
        accelerate does. Returns the objects in the same order; a model is the same object. Collective."""
        places = list(device_placement or [None] * len(args))
        models = [one for one in args if isinstance(one, nn.Module)]
        wanted = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        fresh = [one for one in wanted if not isinstance(one, AcceleratedOptimizer)]
        known = models + [one for one in self._models if all(one is not other for other in models)]
        # a model on the meta device gets other parameters, under the same names
        by_id = {id(p): (model, name) for model in map(self._plain, known) for name, p in model.named_parameters()}
        owners = [self._owner(one, by_id) for one in fresh]
        groups = [groups_by_name(one, {key: name for key, (_, name) in by_id.items()}) for one in fresh]
        result = [
            self.prepare_model(one, device_placement=place) if isinstance(one, nn.Module) else one
            for one, place in zip(args, places, strict=True)
        ]
        made = {
            id(one): self._prepare_optimizer(one, owner, names)
            for one, owner, names in zip(fresh, owners, groups, strict=True)
        }
        result = [made.get(id(one), one) for one in result]
        for owner in {id(one): one for one in owners if self.says_states}.values():
            say_states(owner)
        return super().prepare(*result, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model in place, and compile it if that was asked for. Collective."""
        prepared = getattr(model, PREPARED, False)
        if not prepared:
            refuse_wrapped(model)
            if is_sharded(model):
                raise ModelError(
                    f"{type(model).__name__} was sharded by onefold.shard already; give prepare() the plain model, and "
                    f"the settings to Accelerator(zero=...)"
                )
            moves = self.device_placement if device_placement is None else device_placement
            zero = replace(self.zero, device=self.zero.device or str(self.device)) if moves else self.zero
            self._cut_sequences(model)
            compiled = zero.compile or self._compiled_blocks()
            shard(model, zero, init=deferred_values(model) or zero.init, compile=compiled)
            self._compile_checkpointed(model)
            whole_model_methods(model)
        plugin = self.state.dynamo_plugin
        if plugin.use_regional_compilation:  # done; accelerate's way would call the blocks of before
            self.state.dynamo_plugin = TorchDynamoPlugin(backend=DynamoBackend.NO)
        try:  # for evaluation: no DistributedDataParallel around it
            result = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        finally:
            self.state.dynamo_plugin = plugin
        setattr(model, PREPARED, True)
        return result

    def _cut_sequences(self, model: nn.Module) -> None:
        """Lets a model of transformers attend over cut sequences, if the mesh cuts them; others do so by themselves."""
        if self.readers is not None and "transformers" in sys.modules and self.zero.mesh is not None:
            from onefold.hf.sequences import cut_prepared

            cut_prepared(model, self.zero.mesh)

    def _compiles(self) -> bool:
        return bool(self.state.dynamo_plugin.backend != DynamoBackend.NO)

    def _compiled_blocks(self) -> bool | dict[str, Any]:
        """What Zero.compile is for accelerate's regional compilation."""
        plugin = self.state.dynamo_plugin
        options = {name: value for name, value in plugin.to_kwargs().items() if name != "disable"}
        return options if self._compiles() and plugin.use_regional_compilation and not plugin.disable else False

    def _compile_checkpointed(self, model: nn.Module) -> None:
        """Compiles the layers that transformers may recompute one by one: torch.compile(model) does not see through its
        checkpoint function where parameters are sharded."""
        layers = sys.modules.get("transformers.modeling_layers")
        if layers is not None and self._compiles() and not self.state.dynamo_plugin.use_regional_compilation:
            for layer in model.modules():
                if isinstance(layer, layers.GradientCheckpointingLayer):
                    layer.compile(**self.state.dynamo_plugin.to_kwargs())

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """An onefold.Optimizer of the class and settings of a torch optimizer, whose model was prepared before."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        return self.prepare(optimizer)

    def _prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, groups: list[list[str]]
    ) -> ShardedOptimizer:
        fp16 = self.mixed_precision == "fp16"
        made = ShardedOptimizer(sharded_optimizer(optimizer, model, groups, self._loss_scale() if fp16 else None))
        setattr(made, PREPARED, True)
        return made

    def _owner(self, optimizer: torch.optim.Optimizer, by_id: dict[int, tuple[nn.Module, str]]) -> nn.Module:
        """The model whose parameters the optimizer has."""
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        owners = {id(by_id[one][0]): by_id[one][0] for one in ids if one in by_id}
        if len(owners) != 1:
            raise OptimizerError(
                f"{type(optimizer).__name__} has parameters of {len(owners)} prepared models, and needs those of one; "
                f"give prepare() the model and an optimizer of its parameters"
            )
        return next(iter(owners.values()))

    def _loss_scale(self) -> LossScale | None:
        """The settings of a GradScalerKwargs handler."""
        given = self.scaler_handler
        if given is None:
            return None
        if given.growth_factor * given.backoff_factor != 1.0:
            raise ConfigError(
                f"GradScalerKwargs(growth_factor={given.growth_factor}, backoff_factor={given.backoff_factor}): a loss "
                f"scale grows and falls by one factor; use backoff_factor={1 / given.growth_factor}"
            )
        return LossScale(initial=given.init_scale, growth_interval=given.growth_interval, factor=given.growth_factor)

    def _plain(self, model: nn.Module) -> nn.Module:
        """The sharded module of a prepared model, which may be compiled."""
        return self.unwrap_model(model, keep_torch_compile=False)

    # -- the loop ----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients: see `onefold.accumulate`, whose defaults it takes."""
        with accumulate(self._plain(model)):
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward, with the loss divided by gradient_accumulation_steps, and multiplied by fp16's loss scale."""
        loss = loss / self.gradient_accumulation_steps
        if self.mixed_precision != "fp16":
            loss.backward(**kwargs)
            return
        optimizers = self._onefold_optimizers()
        if len(optimizers) != 1:
            raise StateError(
                f"fp16 needs one optimizer, whose loss scale backward() uses, and {len(optimizers)} were prepared; "
                f"prepare one, or train in bf16"
            )
        optimizers[0].backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of a prepared optimizer, and return their norm before that, over all ranks. Collective."""
        return self._optimizer_of(parameters, "clip_grad_norm_").clip_grad_norm(float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp each element of the gradients of one prepared optimizer. Collective."""
        optimizer = self._optimizer_of(parameters, "clip_grad_value_")
        bound = clip_value * optimizer.loss_scale
        for _, piece in optimizer.gradients():
            piece.clamp_(-bound, bound)

    def unscale_gradients(self, optimizer: object = None) -> None:
        """Nothing to do: clip_grad_norm_ and clip_grad_value_ know the loss scale."""

    def join_uneven_inputs(self, joinables: object, even_batches: bool | None = None) -> NoReturn:
        raise StateError(
            "join_uneven_inputs() is DistributedDataParallel's: here all ranks run equally many backwards; leave it "
            "out, and keep even_batches=True, accelerate's default"
        )

    def _onefold_optimizers(self) -> list[Optimizer]:
        return [one.optimizer for one in [*self._optimizers, *self._hidden] if isinstance(one, ShardedOptimizer)]

    def _optimizer_of(self, parameters: Tensor | Iterable[Tensor], where: str) -> Optimizer:
        """The optimizer whose parameters are given, all of them; others beside them have no gradients here."""
        ids = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        found = [
            one
            for one in self._onefold_optimizers()
            if ids.issuperset(id(p) for group in one.param_groups for p in group["params"])
        ]
        if len(found) != 1:
            raise StateError(
                f"{where}() got {len(ids)} parameters, which are all of {len(found)} prepared optimizers; give it all "
                f"parameters of one: model.parameters()"
            )
        return found[0]

    # -- state -------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's unsharded state dict in rank 0's host memory, other ranks get {}: see `onefold.full_state_dict`.
        Collective."""
        plain = self._plain(model)
        if self._saving:  # save_state() saves shards
            return {}
        return full_state_dict(plain) if is_sharded(plain) else super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save models, optimizers, schedulers and all else that was prepared or registered. Models and optimizers are
        in the folder `onefold`, as `onefold.save` writes them: any number of ranks, stage and precision loads them.
        Collective."""

        def save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
            weights.clear()
            save_state(folder, self._trained())

        handle = self.register_save_state_pre_hook(save)  # after the user's hooks, which may count the weights
        with self._without_optimizers():
            try:
                self._saving = True
                return super().save_state(output_dir, safe_serialization, **kwargs)
            finally:
                self._saving = False
                handle.remove()

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what save_state() saved, at any number of ranks and any stage. Collective."""

        def load(models: list[nn.Module], folder: str) -> None:
            models.clear()
            load_state(folder, self._trained())

        handle = self.register_load_state_pre_hook(load)
        with self._without_optimizers():
            try:
                super().load_state(input_dir, load_kwargs, **kwargs)
            finally:
                handle.remove()

    def _trained(self) -> list[tuple[nn.Module, list[Optimizer]]]:
        """The prepared models, each with its optimizers."""
        found = []
        for model in map(self._plain, self._models):
            ids = {id(p) for p in model.parameters()}
            mine = [one for one in self._onefold_optimizers() if id(one.param_groups[0]["params"][0]) in ids]
            found.append((model, mine))
        return found

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        """Inside, accelerate sees no optimizers: it would pickle the state of rank 0's shards."""
        self._hidden, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers, self._hidden = self._hidden, []
