"""The plain Onefold loop inside Ray Train: a worker that is lost is replaced, and all go on from the last checkpoint.

    python examples/ray_train.py --workers 2 --out /shared/run

Ray starts the workers and their process group, which onefold.init() finds and keeps. Checkpoints are onefold.save's, in
a folder that all nodes see; Ray only hears of metrics. Without RAY_ADDRESS a Ray cluster of this machine is started,
which talks over loopback alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

import onefold

WIDTH, BATCH = 32, 8


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def batch(step: int) -> Tensor:
    """Of this step and this rank, so that a run that was interrupted sees the same data again."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randn(BATCH, WIDTH, generator=generator)


def train(config: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """The loop, which knows nothing of Ray."""
    onefold.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = onefold.shard(build().to(device), stage=config["stage"])
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    folder, done = Path(config["out"], "checkpoints"), 0
    if any(folder.glob("step-*")):
        done = onefold.load(folder, model, optimizer)["step"]
        print(f"rank {dist.get_rank()} goes on from step {done}", flush=True)
    for step in range(done, config["steps"]):
        x = batch(step).to(device)
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["save_every"] == 0 or step + 1 == config["steps"]:
            onefold.save(folder, model, optimizer, extra={"step": step + 1}, keep=2)
            report({"step": step + 1, "loss": loss.item()})


def worker(config: dict[str, Any]) -> None:
    train(config, ray.train.report)


def start_ray() -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts one of this machine."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
        return
    loopback = {"env_vars": {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}}
    ray.init(address="local", include_dashboard=False, runtime_env=loopback, _node_ip_address="127.0.0.1")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model in Ray Train.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("run"))
    flags = parser.parse_args()

    start_ray()
    gpu = torch.cuda.is_available()
    trainer = TorchTrainer(
        worker,
        train_loop_config={
            "stage": flags.stage, "steps": flags.steps, "save_every": flags.save_every,
            "out": str(flags.out.absolute()),
        },
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=flags.workers, use_gpu=gpu),
        run_config=RunConfig(
            name="ray", storage_path=str(flags.out.absolute()), failure_config=FailureConfig(flags.max_failures)
        ),
    )  # fmt: skip
    trainer.fit()


if __name__ == "__main__":
    main()
