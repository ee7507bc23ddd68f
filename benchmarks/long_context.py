"""How long a sequence trains: shapes of Qwen2.5, with a tiled loss, tiled MLPs, and block inputs on the host.

python benchmarks/long_context.py --model 1.5b                  # one GPU: doubles the sequence until it does not fit
onefold run --ranks 2 benchmarks/long_context.py --sequence 2   # cut over ranks, against the same without, in one run
python benchmarks/long_context.py --model tiny --tokens 512     # a small size, to see that it runs

For each length: three steps, seconds and tokens per second of the last, peak of device memory, host memory of block
inputs, bytes sent for attention, and the loss. JSON into $OUT if set, else on the screen.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

import onefold
import onefold.hf

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
STEPS, TILE = 3, 4096


def train(name: str, tokens: int, sequence: int, device: torch.device) -> dict[str, Any]:
    """Three steps of one sequence, on a mesh that cuts it over `sequence` ranks."""
    mesh, cuda = onefold.mesh(shard=-1, sequence=sequence), device.type == "cuda"
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[name], max_position_embeddings=tokens, attention_dropout=0.0)
    with device:
        model = Qwen2ForCausalLM(config)
    onefold.hf.tile_loss(onefold.hf.cut_sequences(model, mesh), tokens=TILE)
    for layer in model.model.layers:
        onefold.tiled(layer.mlp, tokens=TILE)
    precision = "bf16" if cuda else "fp32"
    onefold.shard(model, stage=3, mesh=mesh, precision=precision, activations="checkpoint+host")
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-5)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
    seconds, loss = 0.0, torch.zeros(())
    for _ in range(STEPS):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    streams = dist.get_world_size() // sequence
    found = {
        "model": name, "tokens": tokens, "sequence": sequence, "ranks": dist.get_world_size(), "step_s": seconds,
        "tokens_per_s": tokens * streams / seconds, "loss": loss.item(),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "host_bytes": onefold.memory(model).checkpoints_host.measured,
        "sequence_sent_bytes": onefold.traffic(model).by_purpose.get("sequence", 0),
    }  # fmt: skip
    del model, optimizer, loss
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found


def rows(name: str, tokens: int, sequence: int, device: torch.device) -> list[dict[str, Any]]:
    if sequence > 1:  # the same length without the axis, and with it
        return [train(name, tokens, size, device) for size in (1, sequence)]
    found, most = list[dict[str, Any]](), 1 << 22 if name != "tiny" else tokens
    while tokens <= most:
        try:
            found.append(train(name, tokens, 1, device))
        except torch.cuda.OutOfMemoryError as error:
            found.append({"model": name, "tokens": tokens, "ended": str(error).splitlines()[0]})
            break
        tokens *= 2
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=32768, help="the first length")
    parser.add_argument("--sequence", type=int, default=1, help="ranks over which each sequence is cut")
    options = parser.parse_args()
    onefold.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = rows(options.model, options.tokens, options.sequence, device)
    if dist.get_rank() == 0:
        text = json.dumps(found, indent=1)
        out = os.environ.get("OUT")
        if out:
            (Path(out) / f"long_context-{options.model}-{options.sequence}.json").write_text(text + "\n")
        print(text)
    onefold.shutdown()


if __name__ == "__main__":
    main()
