"""onefold.hf.sharded(): any transformers Trainer class, trained by Onefold in place of DDP.

The new class puts one class before the Trainer's, which makes the Trainer build on onefold.hf.Accelerator. Private
methods that it overrides were read in transformers 5.22.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from onefold import ConfigError, Zero, full_parameters, init, load, mesh
from onefold.comm.mesh import Mesh
from onefold.hf.accelerator import Accelerator
from onefold.hf.adapters import adapters_state_dict, has_adapters, has_prompts, load_adapters
from onefold.hf.checkpoints import FOLDER, PLAIN_OPTIMIZER, load_plain, load_state, save_state
from onefold.hf.fits import Step, random_states_kept, refuse_too_large, stretch_of, total_bytes, warn_of_too_large
from onefold.hf.optimizers import settings_of
from onefold.hf.refusals import refuse_dealt_batches, refuse_flags, refuse_instance, refuse_untiled
from onefold.hf.sequences import logits_wanted
from onefold.hf.tiled_loss import TOKENS, loss_only, tile_loss
from onefold.optim.elementwise import cost_of
from onefold.runtime.engine import is_sharded

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object  # the Trainer class comes behind it


class ShardedTrainer(Base):
    """What comes before a Trainer class. `zero=` and `tile_loss=` of a Trainer go before the class's defaults."""

    default_zero: ClassVar[Zero | None] = None
    default_tile_loss: ClassVar[int | bool] = False
    _axes: ClassVar[tuple[tuple[str, int], ...] | None] = None  # of a mesh that is made when ranks have met
    model: Any  # of the Trainer: a model of transformers or of PEFT, or any module
    optimizer: Any  # of the Trainer: a torch optimizer, and after prepare() a ShardedOptimizer

    def __init__(
        self,
        *args: Any,
        zero: Zero | None = None,
        budget_bytes: int | None = None,
        tile_loss: int | bool | None = None,
        **kwargs: Any,
    ) -> None:
        """`budget_bytes` is what a step may take on each rank's device; train() raises at once if it takes more.
        Without it train() warns if a step takes more than a CUDA device has. `tile_loss` computes the loss of a causal
        model over tiles of so many tokens (True: 1024), without logits: see `onefold.hf.tile_loss`."""
        refuse_instance(kwargs.get("optimizer_cls_and_kwargs"))
        self.zero = zero or self.default_zero or Zero()
        tokens = self.default_tile_loss if tile_loss is None else tile_loss
        self._tile_tokens: int | None = None if tokens is False else TOKENS if tokens is True else tokens
        self._budget_bytes = budget_bytes
        self._collected: dict[str, Any] | None = None  # the full state dict, while it is saved
        self._filters_losses = False  # whether training_step() does what args.logging_nan_inf_filter asks for
        super().__init__(*args, **kwargs)
        if self._tile_tokens is not None:
            refuse_untiled(self)
            self._tile_loss(self.model)

    def _tile_loss(self, model: Any) -> Any:
        return model if self._tile_tokens is None else tile_loss(model, tokens=self._tile_tokens)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        return self._tile_loss(super().call_model_init(*args, **kwargs))

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Evaluation makes logits only if they are used, where the loss is tiled, and collects them from all ranks only
        then, where sequences are cut."""
        with ExitStack() as stack:
            if self._tile_tokens is not None:
                stack.enter_context(loss_only(self.model, prediction_loss_only))
            if self.accelerator.readers is not None:
                stack.enter_context(logits_wanted(self.model, not prediction_loss_only))
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def get_total_train_batch_size(self, *args: Any, **kwargs: Any) -> int:
        """How many rows a step has: those of ranks that share sequences are the same."""
        return super().get_total_train_batch_size(*args, **kwargs) // self._sharing_ranks()

    def floating_point_ops(self, inputs: Any) -> int:
        """Of this rank: its part of those of the sequences that it shares."""
        return super().floating_point_ops(inputs) // self._sharing_ranks()

    def _sharing_ranks(self) -> int:
        """How many ranks read the same data."""
        return int(self.args.world_size) // self.accelerator.num_processes

    def create_accelerator_and_postprocess(self) -> None:
        refuse_flags(self.args)
        if self._axes is not None:
            self.zero = replace(self.zero, mesh=_mesh(self._axes, self.args.device.type))
        refuse_dealt_batches(self.args, self.zero.mesh)
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(zero=self.zero, **self._accelerator_settings)
        self.accelerator.says_states = False
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_settings = super()._build_accelerator_args(**kwargs)
        return self._accelerator_settings

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does. Losses that are not finite are kept out of the logs on the device: the host does
        not wait for each loss to see whether it is finite."""
        asked = self.args.logging_nan_inf_filter
        # a training_step() that calls ours may make a loss that ours does not see
        self._filters_losses = asked and type(self).training_step is ShardedTrainer.training_step
        try:
            with self._host_filter(asked and not self._filters_losses):
                return super().train(*args, **kwargs)
        finally:
            self._filters_losses = False

    @contextmanager
    def _host_filter(self, on: bool) -> Iterator[None]:
        """Inside, args.logging_nan_inf_filter is as the Trainer or a reader of the arguments must find it."""
        given, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, on
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = given

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward. A loss that is not finite is returned as the mean of those since the last log."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if not self._filters_losses or loss.device != self._tr_loss.device:
            return loss
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        zero = self.accelerator.zero
        if not is_sharded(self.model) and "auto" not in (zero.stage, zero.activations):
            self._check_fit(train_dataloader)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _check_fit(self, loader: Any) -> None:
        """Says the plan of a step. Raises if it does not fit into `budget_bytes`; without a budget warns if a CUDA
        device has not enough."""
        zero, memory_bytes = self.accelerator.zero, total_bytes(self.accelerator.device)
        with random_states_kept():
            if self._budget_bytes is not None:
                refuse_too_large(self._step(loader), zero, self._budget_bytes, tells=self.is_world_process_zero())
            elif memory_bytes is not None and self.is_world_process_zero() and not self.args.auto_find_batch_size:
                warn_of_too_large(lambda: self._step(loader), zero, memory_bytes)

    def _step(self, loader: Any) -> Step:
        """A step of training on the first rows."""
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"budget_bytes= needs rows of the dataset before training, and {type(loader.dataset).__name__} is a "
                f"stream; leave budget_bytes out, or plan with onefold.plan(model, batch, ranks=...)"
            )
        rows = [loader.dataset[number] for number in range(min(self._train_batch_size, len(loader.dataset)))]
        self.create_optimizer()
        cost = cost_of(type(self.optimizer), settings_of(self.optimizer))
        return Step(
            model=self.model, sample=stretch_of(loader.collate_fn(rows), self._sharing_ranks()), cost=cost,
            batch=self._train_batch_size, ranks=self.args.world_size,
            micro_batches=self.args.gradient_accumulation_steps,
            plays="nccl" if self.accelerator.device.type == "cuda" else "gloo",
        )  # fmt: skip

    def add_callback(self, callback: Any) -> None:
        """Add a callback. TRL's SyncRefModelCallback, which writes the reference model, does so unsharded."""
        sync = getattr(callback, "sync_target_model", None)
        if sync is not None:
            callback.sync_target_model = partial(_synced, sync)
        super().add_callback(callback)

    # -- save --------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model so that from_pretrained() reads it. Collective: it collects the parameters on rank 0."""
        adapted = is_sharded(self.model) and has_adapters(self.model)
        self._collected = (adapters_state_dict if adapted else self.accelerator.get_state_dict)(self.model)
        try:
            with full_parameters(self.model) if adapted and has_prompts(self.model) else nullcontext():
                super().save_model(output_dir, _internal_call=_internal_call)
        finally:
            self._collected = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with self._host_filter(self.args.logging_nan_inf_filter or self._filters_losses):  # the arguments are saved
            super()._save(output_dir, state_dict=self._collected if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_state(output_dir, [(self.model, [self.optimizer.optimizer])])
        with self._optimizer_elsewhere():
            super()._save_optimizer_and_scheduler(output_dir)

    # -- resume ------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if (Path(resume_from_checkpoint) / FOLDER).is_dir():
            return  # parameters come with the optimizer state, when the model is sharded
        if is_sharded(self.model):
            (load_adapters if has_adapters(self.model) else load)(Path(resume_from_checkpoint), self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / FOLDER).is_dir():
            load_state(checkpoint, [(self.model, [self.optimizer.optimizer])])
        elif checkpoint is not None and any((Path(checkpoint) / name).exists() for name in PLAIN_OPTIMIZER):
            scheduler = load_plain(checkpoint, self.args.output_dir, self.model, self.optimizer.optimizer)
            if scheduler is not None:
                self.lr_scheduler.load_state_dict(scheduler)
            return
        with self._optimizer_elsewhere():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if (best / FOLDER).is_dir():
            load(best / FOLDER, self.model)
        elif has_adapters(self.model):
            load_adapters(best, self.model)
        else:
            super()._load_best_model()

    @contextmanager
    def _optimizer_elsewhere(self) -> Iterator[None]:
        """Inside, the Trainer writes and reads an optimizer file that says where the state is."""
        optimizer, self.optimizer = self.optimizer, Elsewhere()
        try:
            yield
        finally:
            self.optimizer = optimizer


def _synced(sync: Any, model: nn.Module, target: nn.Module, alpha: float) -> None:
    """Runs `sync` on unsharded parameters, of which it writes the target's. Collective."""
    with ExitStack() as unsharded:
        for one, write in ((model, False), (target, True)):
            if is_sharded(one):
                unsharded.enter_context(full_parameters(one, write=write))
        sync(model, target, alpha)


class Elsewhere:
    """Stands for an optimizer whose state is in the folder of a onefold checkpoint."""

    def state_dict(self) -> dict[str, str]:
        return {"onefold": f"the optimizer state is in the folder {FOLDER}/, which onefold.hf.Trainer reads"}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        pass


@cache
def _mesh(axes: tuple[tuple[str, int], ...], device: str) -> Mesh:
    """One mesh for all Trainers of a process. Collective."""
    init()
    return mesh(**dict(axes), device=device)


def on_mesh(cls: type, axes: dict[str, int]) -> Any:
    """A subclass of a sharded Trainer class whose Trainers make a mesh of these axes: ranks need not have met yet."""
    return type(cls.__name__, (cls,), {"_axes": tuple(axes.items()), "__module__": __name__})


def sharded(cls: type, zero: Zero | None = None, *, tile_loss: int | bool | None = None) -> Any:
    """A subclass of a transformers Trainer class that shards its model by Onefold.

    `zero` are the settings of `onefold.shard`, by default Zero(); a Trainer of the class may get others as `zero=`.
    `tile_loss` computes losses over tiles of so many tokens, without logits: see `onefold.hf.tile_loss`.

    >>> import transformers, onefold.hf
    >>> trainer_class = onefold.hf.sharded(transformers.Seq2SeqTrainer, onefold.Zero(stage=3))
    >>> issubclass(trainer_class, transformers.Seq2SeqTrainer)
    True
    """
    given = {"default_zero": zero, "default_tile_loss": tile_loss}
    defaults = {name: value for name, value in given.items() if value is not None}
    if issubclass(cls, ShardedTrainer) and not defaults:
        return cls
    bases = (cls,) if issubclass(cls, ShardedTrainer) else (ShardedTrainer, cls)
    return type(f"Sharded{cls.__name__}", bases, {**defaults, "__module__": __name__})


class Trainer(ShardedTrainer, transformers.Trainer):
    """transformers' Trainer that shards its model by Onefold in place of DDP.

    `zero` are the settings of `onefold.shard`, by default Zero(); `tile_loss` computes the loss over tiles of so many
    tokens. All other arguments are the Trainer's.

    >>> import tempfile, torch, transformers, onefold.hf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     args = transformers.TrainingArguments(folder, report_to=[], use_cpu=not torch.cuda.is_available())
    ...     trainer = onefold.hf.Trainer(torch.nn.Linear(8, 8), args, zero=onefold.Zero(stage=3))
    >>> trainer.zero.stage
    3
    """
