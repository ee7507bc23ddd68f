"""Three libraries that save a small model after a step and load it again, each as its documentation says."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, WIDTH, LAYERS = 2, 384, 4


class System(Protocol):
    def step(self, batch: Tensor) -> None: ...

    def save(self, folder: Path, step: int, same: bool) -> None: ...

    def load(self, folder: Path) -> bool:
        """False if it finds nothing to load, by the library's own rule or the one that its users follow."""

    def tensors(self) -> Iterator[Tensor]:
        """Of this rank: parameters and optimizer state, always in one order."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


class Onefold:
    def __init__(self) -> None:
        import onefold

        self.model = onefold.shard(layers(), stage=2)
        self.optimizer = onefold.Optimizer(self.model, torch.optim.AdamW, lr=1e-3)

    def step(self, batch: Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int, same: bool) -> None:
        import onefold

        onefold.save(folder, self.model, self.optimizer, step=1 if same else step, overwrite=same)

    def load(self, folder: Path) -> bool:
        import onefold

        if not any(name.startswith(("step-", ".replaced-")) for name in os.listdir(folder)):
            return False
        onefold.load(folder, self.model, self.optimizer)
        return True

    def tensors(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        for row in self.optimizer.state_dict()["slices"]:
            yield from (value for _, value in sorted(row["state"].items()) if isinstance(value, Tensor))


class DCP:
    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = layers()
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, batch: Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int, same: bool) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        name = "last" if same else f"step-{step:08d}"
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder / name)

    def load(self, folder: Path) -> bool:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        whole = sorted(path.parent for path in folder.glob("*/.metadata"))
        if not whole:
            return False
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optim": optimizer}
        dcp.load(state, checkpoint_id=whole[-1])
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return True

    def tensors(self) -> Iterator[Tensor]:
        for parameter in self.model.parameters():
            for value in (parameter, *(value for _, value in sorted(self.optimizer.state[parameter].items()))):
                yield value.to_local() if isinstance(value, dist.tensor.DTensor) else value


class DeepSpeed:
    def __init__(self) -> None:
        import deepspeed

        deepspeed.logger.setLevel(logging.ERROR)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # all talk over gloo; building it takes long
        model = layers()
        settings = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=settings
        )

    def step(self, batch: Tensor) -> None:
        self.engine.backward(self.engine(batch).square().mean())
        self.engine.step()

    def save(self, folder: Path, step: int, same: bool) -> None:
        self.engine.save_checkpoint(folder, tag="last" if same else None)

    def load(self, folder: Path) -> bool:
        path, _ = self.engine.load_checkpoint(folder)
        return path is not None

    def tensors(self) -> Iterator[Tensor]:
        yield from self.engine.module.parameters()
        for master in self.engine.optimizer.single_partition_of_fp32_groups:
            yield master
            state = self.engine.optimizer.optimizer.state[master]
            yield from (value for _, value in sorted(state.items()) if isinstance(value, Tensor))


SYSTEMS = {"onefold": Onefold, "dcp": DCP, "deepspeed": DeepSpeed}
