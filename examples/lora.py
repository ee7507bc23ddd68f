"""LoRA over a sharded, frozen base in bf16 or 4 bits; leaves a folder that `PeftModel.from_pretrained` reads.

    onefold run --ranks 2 examples/lora.py --out adapters
    onefold run --ranks 2 examples/lora.py --four-bit --out adapters-4bit     # needs bitsandbytes

`--weights` is a Hugging Face folder to adapt. Without it the base is a small Llama with its first values, so that
nothing is downloaded. At the end rank 0 prints what it holds of the model, in bytes.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import onefold

TEXT = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own source; one token per byte


def read_base(weights: Path | None, hidden: int, layers: int) -> PreTrainedModel:
    if weights is not None:
        return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def quantize(base: PreTrainedModel) -> PreTrainedModel:
    """The base's linear layers, but for its head, in 4 bits: what from_pretrained(quantization_config=…) does too."""
    from bitsandbytes.nn import LinearNF4

    for name, layer in list(base.named_modules()):
        if type(layer) is torch.nn.Linear and layer is not base.get_output_embeddings():
            packed = LinearNF4(
                layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=torch.bfloat16
            )
            packed.load_state_dict(layer.state_dict())
            base.set_submodule(name, packed.to(layer.weight.device))  # packs
    base.is_loaded_in_4bit = True  # PEFT asks for it
    return base


def main(arguments: list[str]) -> list[float]:
    parser = argparse.ArgumentParser(description="Train LoRA adapters over a sharded base.")
    parser.add_argument("--weights", type=Path, help="a Hugging Face folder to adapt; else a small new model")
    parser.add_argument("--four-bit", action="store_true", help="keep the base in 4 bits (bitsandbytes)")
    parser.add_argument("--stage", type=int, default=3, help="0, 1, 2 or 3 (3)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (8)")
    parser.add_argument("--hidden", type=int, default=64, help="width of the small model (64)")
    parser.add_argument("--layers", type=int, default=2, help="of the small model (2)")
    parser.add_argument("--out", type=Path, default=Path("adapters"), help="the folder to write (adapters)")
    args = parser.parse_args(arguments)

    onefold.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = read_base(args.weights, args.hidden, args.layers).to(device)
    base = quantize(base) if args.four_bit else base
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=args.rank, target_modules="all-linear"))
    model = onefold.shard(model, stage=args.stage, precision="bf16")  # the adapters have fp32 masters, the base none
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=args.lr)
    losses, generator = [], torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(TEXT) - 64, (4,), generator=generator).tolist()
        batch = torch.stack([TEXT[start : start + 64] for start in starts]).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps):
            sys.stdout.write(f"step {step}: loss {losses[-1]:.4f}\n")

    adapters = onefold.full_state_dict(model, only="trainable")  # on rank 0; nothing of the base is gathered
    if dist.get_rank() == 0:
        model.save_pretrained(args.out, state_dict=adapters)
        held = onefold.memory(model)
        sys.stdout.write(
            f"parameters {held.parameters.measured:,}, gradients {held.gradients.measured:,}, "
            f"optimizer {held.optimizer.measured:,} bytes\n"
        )
    dist.barrier()
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
