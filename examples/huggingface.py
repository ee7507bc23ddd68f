"""Fine-tune a Hugging Face language model at stage 3, and leave a folder that `from_pretrained` reads.

    onefold run --ranks 2 examples/huggingface.py --out tuned
    onefold run --ranks 2 examples/huggingface.py --weights tuned --out tuned-more

`--weights` is a folder with config.json and safetensors, as `save_pretrained` or a download leaves it. Without it the
model is a small Llama with its first values, so that nothing is downloaded. No rank ever holds the whole model: it is
built without memory, each rank reads its own part, and the export streams from a checkpoint.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import onefold

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True,
)  # fmt: skip


def read_tokens(text: Path, weights: Path | None) -> Tensor:
    """By the tokenizer that came with the weights; else one token per byte."""
    if weights is not None and (weights / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(weights)(text.read_text(), return_tensors="pt").input_ids[0]
    return torch.tensor(list(text.read_bytes()))


def build(config: Any, weights: Path | None, settings: dict[str, Any]) -> torch.nn.Module:
    """Sharded, on this rank's GPU if there is one, with the weights or its first values in place."""
    with torch.device("meta"):
        blank = AutoModelForCausalLM.from_config(config)
    model = onefold.shard(blank, init=blank._init_weights, **settings)
    if weights is not None:
        onefold.load(weights, model)
    return model


def main(arguments: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face language model.")
    parser.add_argument("--weights", type=Path, help="a Hugging Face folder to start from; else a small new model")
    parser.add_argument(
        "--text", type=Path, default=Path(os.__file__), help="what to learn (a source file of Python's)"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank (4)")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence (64)")
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16")
    parser.add_argument(
        "--out", type=Path, default=Path("tuned"), help="the folder to write; it must not exist (tuned)"
    )
    args = parser.parse_args(arguments)

    onefold.init()
    rank, device = dist.get_rank(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SMALL if args.weights is None else AutoConfig.from_pretrained(args.weights)
    model = build(config, args.weights, {"stage": 3, "precision": args.precision}).train()
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    tokens, losses = read_tokens(args.text, args.weights), []
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(tokens) - args.length, (args.batch,), generator=generator).tolist()
        batch = torch.stack([tokens[start : start + args.length] for start in starts]).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if rank == 0 and (step % 10 == 0 or step == args.steps):
            sys.stdout.write(f"step {step}: loss {losses[-1]:.4f}\n")

    checkpoints = args.out.with_name(args.out.name + "-checkpoints")
    onefold.save(checkpoints, model, optimizer, step=args.steps)
    if rank == 0:  # one process writes what Hugging Face reads
        onefold.export(checkpoints, args.out)
        config.save_pretrained(args.out)
        if args.weights is not None and (args.weights / "tokenizer.json").exists():
            AutoTokenizer.from_pretrained(args.weights).save_pretrained(args.out)
    dist.barrier()
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
