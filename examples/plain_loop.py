"""The shortest honest loop: sharded, accumulated, clipped, saved, and going on where it stopped. Nothing to download.

    onefold run --ranks 2 examples/plain_loop.py --steps 100
    onefold run --ranks 2 examples/plain_loop.py --steps 200     # goes on from step 100

Started by python it is one process; on several nodes, use torchrun. The data of a step depends on the step and the rank
alone, so a run that was interrupted ends with the same bits as one that was not.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import onefold

CONTEXT, BATCH, ACCUMULATE = 64, 4, 2  # tokens, sequences per rank and micro-batch, micro-batches per step
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # Python's own source; one token per byte


class Model(nn.Module):
    """Any module will do."""

    def __init__(self, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, dim), nn.Embedding(CONTEXT, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.layers(x, mask=mask, is_causal=True))


def micro_batch(step: int, part: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed((step * ACCUMULATE + part) * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH,), generator=generator)
    rows = torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts.tolist()]).to(device)
    return rows[:, :-1], rows[:, 1:]


def main(arguments: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a small model and go on where it stopped.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all (100)")
    parser.add_argument("--stage", type=int, default=3, help="0, 1, 2 or 3 (3)")
    parser.add_argument("--out", type=Path, default=Path("plain-run"), help="checkpoints go here (plain-run)")
    args = parser.parse_args(arguments)

    onefold.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = onefold.shard(Model().to(device), stage=args.stage)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=3e-3)
    first = onefold.load(args.out, model, optimizer)["step"] if any(args.out.glob("step-*")) else 0

    losses = []
    for step in range(first, args.steps):
        for part in range(ACCUMULATE):
            inputs, targets = micro_batch(step, part, device)
            with onefold.accumulate(model) if part + 1 < ACCUMULATE else nullcontext():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                (loss / ACCUMULATE).backward()
        norm = optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 20 == 0 or step + 1 == args.steps:
            onefold.save(args.out, model, optimizer, extra={"step": step + 1}, step=step + 1, keep=2)
            if dist.get_rank() == 0:
                sys.stdout.write(f"step {step + 1}: loss {losses[-1]:.4f}, gradient norm {norm:.3f}\n")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
