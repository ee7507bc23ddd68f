"""ZeroStrategy: a lightning.pytorch.Trainer that trains by ZeRO.

The LightningModule itself is sharded, in place. 1 setup() shards it, and turns the optimizer that configure_optimizers
made into an onefold.Optimizer  2 steps run as the forward of the sharded module, so that parameters are unsharded where
they are used  3 micro-batches before the last run inside onefold.accumulate()  4 checkpoints are those of onefold.save.
Written against Lightning 2.6. Of its private names are used: `_layer_sync`, which sync_batchnorm sets;
`_forward_redirection`, which runs a step as a forward; `_MockOptimizer`, which stands for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType

from onefold import CheckpointError, ConfigError, LossScale, Optimizer, Zero, accumulate, full_state_dict
from onefold.lightning.callbacks import check_callbacks, check_saving
from onefold.lightning.checkpoints import load_folder, save_folder
from onefold.lightning.optimizers import as_sharded, check_apart, follow
from onefold.lightning.plugins import ZeroPrecision
from onefold.lightning.precisions import checked, settings_of
from onefold.lightning.processes import join
from onefold.lightning.sharding import sharded, stage_of
from onefold.runtime.announce import say_states
from onefold.runtime.engine import is_sharded


class ZeroStrategy(DDPStrategy):
    """A strategy for lightning.pytorch.Trainer: ZeRO with the settings of `zero`, or of `fields`, which are those of
    onefold.Zero.

    `accumulate` says how micro-batches are summed (accumulate_grad_batches): "once" keeps unsharded local sums and
    reduces them with the last micro-batch, "each" reduces every micro-batch into the shard, in 1/N of the memory.
    `loss_scale` is for fp16. `Trainer(precision=…)` sets the precision, unless the settings do.

    >>> import lightning, onefold.lightning
    >>> strategy = onefold.lightning.ZeroStrategy(stage=3)
    >>> trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    >>> trainer.strategy is strategy
    True
    """

    optimizers: list[Any]  # of Lightning's strategies

    strategy_name = "onefold"

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
        self._accumulate = checked(accumulate)
        self._sharded: LightningModule | None = None  # the module that setup() has sharded
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment
        )

    # -- what Lightning connects ---------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, ZeroPrecision):  # not known yet; or ours, in a second Trainer
            return
        self._settings = self._settings.with_plugin(plugin)
        self._precision_plugin = ZeroPrecision(self._settings.name, lambda: self.optimizers)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise ConfigError(
            f"the plugin {type(io).__name__} writes Lightning's checkpoint files, and under Onefold checkpoints are "
            f"written by onefold.save; leave the plugin out"
        )

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        join(self.cluster_environment, self.num_processes, self._settings.zero.timeout_s)

    # -- the model and its optimizer -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._check(trainer)
        if self._sharded is not self.lightning_module or not is_sharded(self._sharded):
            self._sharded = sharded(self.lightning_module, self._settings, self.root_device)
            self._reset_optimizers_and_schedulers()
        self.model = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING:
            check_callbacks(trainer, stage_of(self._sharded))
            check_saving(trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _check(self, trainer: Trainer) -> None:
        """Raises for what Lightning was asked for and Onefold does not do."""
        if self._layer_sync is not None:
            raise ConfigError(
                "sync_batchnorm=True found, which Onefold does not do; leave it out (buffers='rank0' keeps running "
                "statistics alike), or use norms that do not depend on the batch"
            )
        if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE and self._settings.compute is torch.float16:
            raise ConfigError(
                "gradient_clip_algorithm='value' would hide the overflow that fp16's loss scale looks for; use 'norm'"
            )

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self._sharded is not None
        given = self.optimizers
        if isinstance(given[0], _MockOptimizer):
            raise ConfigError("configure_optimizers returned no optimizer; under Onefold return one for all parameters")
        check_apart(given)
        ours = [as_sharded(self._sharded, one, self._settings.loss_scale) for one in given]
        for before, after in zip(given, ours, strict=True):
            follow([config.scheduler for config in self.lr_scheduler_configs], before, after)
        self.optimizers = ours
        say_states(self._sharded)

    def model_to_device(self) -> None:
        """The model is moved when it is sharded."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models are built on the host, or with empty_init on the meta device, and are real once they are sharded."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # -- steps ---------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict_step", *args, **kwargs)

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a step as the forward of the sharded module."""
        module = self.lightning_module
        assert module is not None
        return self._forward_redirection(module, module, step, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self._sharded is not None
        with accumulate(self._sharded, reduce=self._accumulate):
            yield

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_checkpoint does

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # save_checkpoint writes parameters from where they are

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # likewise

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes a folder of onefold.save; with weights_only=True one plain file with all weights, which
        `load_from_checkpoint` reads, from rank 0's memory. Collective."""
        if storage_options is not None:
            raise ConfigError(f"storage_options={storage_options!r} found, which onefold.save has not; leave it out")
        if self._sharded is None:
            raise CheckpointError("save_checkpoint() found no sharded model; call fit or validate of the Trainer first")
        if checkpoint["state_dict"]:
            raise CheckpointError(
                f"on_save_checkpoint put {min(checkpoint['state_dict'])} into checkpoint['state_dict']; under Onefold "
                f"the weights are saved from where they are: use a key of your own"
            )
        if "optimizer_states" not in checkpoint:
            weights = full_state_dict(self._sharded)
            super().save_checkpoint({**checkpoint, "state_dict": weights}, filepath)
            return
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        save_folder(filepath, self._sharded, self._own_optimizers(), rest, int(checkpoint["global_step"]))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        optimizers = self._own_optimizers() if module.trainer.state.fn == TrainerFn.FITTING else []
        if Path(checkpoint_path).is_dir():
            extra = load_folder(checkpoint_path, module, optimizers, strict=module.strict_loading)
            return {**extra, "state_dict": {}}  # as hooks of on_save_checkpoint found it
        if optimizers:
            found = "this is a file" if Path(checkpoint_path).exists() else "there is nothing"
            raise CheckpointError(
                f"fit(ckpt_path={str(checkpoint_path)!r}): a folder that Onefold saved is wanted, and {found}; make "
                f"one of a file of Lightning's by `onefold import-checkpoint FILE FOLDER`, or take its weights by "
                f"load_from_checkpoint and fit without ckpt_path"
            )
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if checkpoint["state_dict"]:  # of a plain file; weights of a folder are loaded
            super().load_model_state_dict(checkpoint, strict=strict)

    def _own_optimizers(self) -> list[Optimizer]:
        return [one for one in self.optimizers if isinstance(one, Optimizer)]

    def teardown(self) -> None:
        """The model stays sharded, for another fit, test or save."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
