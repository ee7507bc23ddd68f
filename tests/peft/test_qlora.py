"""QLoRA: adapters over a 4-bit base of bitsandbytes, whose packed weights and constants are stored sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.model.device import waiting_parameters
from onefold.model.quantized import is_4bit
from tests.harness import run_ranks
from tests.harness.grids import with_soak

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from peft import PeftModel, prepare_model_for_kbit_training
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.peft.adapters import adapted, base, differing, logits, sharded, train, trained, unlike_stage_0
from tests.peft.four_bit import prepared, q_dora, q_lora, quantized

QUERY = "base_model.model.model.layers.0.self_attn.q_proj.base_layer"
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "NF4, double quantisation": (q_lora, {}),
    "NF4": (lambda: q_lora(double=False), {}),
    "FP4, bf16 precision": (lambda: q_lora(kind="fp4", double=False), {"precision": "bf16"}),
    "NF4 in bf16 storage": (lambda: q_lora(storage=torch.bfloat16), {"precision": "bf16"}),
    "NF4 in fp32 storage": (lambda: q_lora(storage=torch.float32), {"precision": "bf16"}),
    "prepared for k-bit training": (prepared, {}),
    "DoRA": (q_dora, {}),
    "checkpointed": (q_lora, {"activations": "checkpoint"}),
}


def stages_differ(name: str) -> dict[int, list[str]]:
    return unlike_stage_0(*MODELS[name])


@pytest.mark.parametrize("name", with_soak(MODELS, "NF4", "NF4 in fp32 storage"))  # held in FP4's and bf16 storage's
def test_adapters_over_4_bits_train_to_the_same_bits_at_every_stage(name: str) -> None:
    assert run_ranks(2, stages_differ, name) == [{}, {}]


def like_plain() -> None:
    """Outputs of the sharded 4-bit model are those of the library's own, and so is training under DDP."""
    model, optimizer = sharded(q_lora(), 3)
    plain = q_lora()
    assert torch.equal(logits(model), logits(plain))
    ours = train(model, optimizer, range(3))
    parallel = DistributedDataParallel(plain)
    theirs = train(parallel, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2), range(3))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_a_sharded_4_bit_model_computes_and_trains_like_a_plain_one() -> None:
    run_ranks(2, like_plain)


def test_4_bit_weights_do_not_wait_for_their_unit_to_be_moved() -> None:
    """Their own to() moves the codes that dequantise them, which a kernel on a GPU would else read from the CPU."""
    model = quantized()
    waiting = waiting_parameters(model, dict(model.named_parameters()))
    assert {is_4bit(param) for param in model.parameters()} == {True, False}
    assert waiting == {id(param) for param in model.parameters() if not is_4bit(param)}


def measured(double: bool) -> dict[str, int]:
    """Bytes of 4-bit weights and their constants that this rank holds, by Onefold's reports and by live storages; and
    all there are."""
    packed = [param for param in quantized(double=double).parameters() if type(param).__name__ == "Params4bit"]
    model, optimizer = sharded(q_lora(double=double), 3)
    train(model, optimizer, range(2))
    report = onefold.memory(model)
    assert report.parameters.measured == report.parameters.planned
    rows = [row for row in onefold.placement(model).rows if row.optimizer == "frozen" and "proj" in row.unit]
    live = {}
    for param in model.parameters():
        if type(param).__name__ == "Params4bit":
            state = param.quant_state
            for one in (param, state.absmax, *((state.offset, state.state2.absmax) if double else ())):
                live[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return {
        "weights": len(packed),
        "all": sum(param.nbytes + param.quant_state.absmax.nbytes for param in packed),
        "held": sum(row.parameter_bytes for row in rows),
        "placeholders": sum(live.values()),
        "elements": sum(row.elements for row in rows),
    }


@pytest.mark.parametrize("double", [True, False])
def test_packed_weights_and_constants_take_one_nth_on_each_rank(double: bool) -> None:
    for found in run_ranks(2, measured, double):
        aligned = found["weights"] * (2 * 64 * 4 if double else 64 * 4)  # bytes: each constant starts on 64 elements
        placeholders = found["weights"] * (4 if double else 2) * 4 + 64
        assert found["all"] / 2 <= found["held"] <= (found["all"] + aligned) / 2 + placeholders
        assert found["placeholders"] < 0.05 * found["all"]  # between passes weights and constants hold no memory


def kept(folder: str) -> None:
    """Checkpoints of everything and of adapters alone, and PEFT's own save, over a 4-bit base."""
    model, optimizer = sharded(q_lora(), 3)
    train(model, optimizer, range(2))
    onefold.save(f"{folder}/all", model, optimizer)
    onefold.save(f"{folder}/adapters", model, optimizer, only="trainable")
    expected = train(model, optimizer, range(2, 4))
    state = onefold.full_state_dict(model, only="trainable")
    if state:
        model.save_pretrained(f"{folder}/peft", state_dict=state)
    dist.barrier()
    for name in ("all", "adapters"):
        for stage in (2, 3):
            other, its = sharded(q_lora(), stage)
            onefold.load(f"{folder}/{name}", other, its)
            assert all(torch.equal(a, b) for a, b in zip(train(other, its, range(2, 4)), expected, strict=True))
    again = PeftModel.from_pretrained(quantized(), f"{folder}/peft", is_trainable=True)
    assert torch.equal(logits(again), logits(model))


def test_adapters_over_4_bits_are_saved_and_resumed(tmp_path: Path) -> None:
    run_ranks(2, kept, str(tmp_path))


def plain_again() -> None:
    """state_dict() is the library's own, and unshard() leaves a model as it was before shard(); so does an error."""
    model, _ = sharded(q_lora(), 3)
    own = q_lora()
    with onefold.full_parameters(model):
        held = model.state_dict()
    assert not differing(held, own.state_dict())
    with onefold.full_parameters(model, write=True):  # packed bytes may be written as they are
        model.get_submodule(QUERY).weight.data.zero_()
        own.get_submodule(QUERY).weight.data.zero_()
    assert torch.equal(logits(model), logits(own))
    onefold.unshard(model)
    assert not differing(model.state_dict(), own.state_dict())
    names = [name for name, _ in own.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), logits(own.merge_and_unload()))
    wrong = q_lora()
    with pytest.raises(onefold.ConfigError):
        onefold.shard(wrong, stage=7)
    assert [name for name, _ in wrong.named_parameters()] == names


def test_state_dicts_and_unshard_leave_what_the_library_made() -> None:
    run_ranks(2, plain_again)


def as_transformers_loads(folder: str) -> None:
    """The usual way to such a model: from_pretrained(quantization_config=…), prepared by PEFT."""
    if dist.get_rank() == 0:
        base().save_pretrained(folder)
    dist.barrier()
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip

    def build() -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, device_map={"": "cpu"})
        return adapted(model=prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False))

    first = trained(build, 2, {"precision": "bf16"})
    assert differing(trained(build, 3, {"precision": "bf16"}), first) == []


def test_what_from_pretrained_quantised_is_sharded(tmp_path: Path) -> None:
    run_ranks(2, as_transformers_loads, str(tmp_path))


def offloaded() -> None:
    kept_on = onefold.Offload(parameters="host", optimizer="host")
    model, optimizer = sharded(q_lora(), 3, offload=kept_on)
    losses = train(model, optimizer, range(3))
    first = trained(q_lora, 3, {})
    assert all(torch.equal(loss, first[f"loss {step}"]) for step, loss in enumerate(losses))
    assert any("host" in row.parameters for row in onefold.placement(model).rows if row.optimizer == "frozen")


def test_4_bit_units_may_rest_on_the_host() -> None:
    run_ranks(2, offloaded)


def refused() -> dict[str, str]:
    found = {}

    def says(name: str, error: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(error) as raised:
            call()
        found[name] = str(raised.value)

    def trains() -> None:
        model = q_lora(storage=torch.bfloat16)
        model.get_submodule(QUERY).weight.requires_grad = True
        onefold.shard(model, stage=2, precision="bf16")

    def trains_later() -> None:
        model, optimizer = sharded(q_lora(storage=torch.bfloat16), 3, precision="bf16")
        model.get_submodule(QUERY).weight.requires_grad = True
        train(model, optimizer, range(1))

    def not_quantized() -> None:
        import bitsandbytes as bnb

        onefold.shard(torch.nn.Sequential(bnb.nn.Linear4bit(64, 64), torch.nn.Linear(64, 64)), stage=3)

    def eight_bits(stage: int) -> None:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False).to("cpu")
        onefold.shard(torch.nn.Sequential(layer, torch.nn.Linear(64, 64)), stage=stage)

    def torchao() -> None:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
        quantize_(layer, Int8WeightOnlyConfig())
        onefold.shard(torch.nn.Sequential(layer, torch.nn.Linear(64, 64)), stage=2)

    eight_bits(2)
    says("8 bits", onefold.ModelError, lambda: eight_bits(3))
    pytest.importorskip("torchao")
    says("torchao", onefold.ModelError, torchao)
    says("trained", onefold.ModelError, trains)
    says("trained later", onefold.ModelError, trains_later)
    says("not quantized", onefold.ModelError, not_quantized)
    model, _ = sharded(q_lora(), 3)
    says("half", onefold.StateError, model.half)
    assert model.get_submodule(QUERY).weight.to("cpu") is model.get_submodule(QUERY).weight
    says("to", onefold.StateError, lambda: model.get_submodule(QUERY).weight.to(torch.float32))
    says("merge", onefold.StateError, model.merge_adapter)
    weight = model.get_submodule(QUERY).weight
    says("read", onefold.StateError, lambda: weight.clone())
    says("constants", onefold.StateError, lambda: weight.quant_state.absmax.float())
    return found


def test_what_cannot_be_done_with_4_bit_weights_is_refused_with_a_remedy() -> None:
    for found in run_ranks(2, refused):
        assert "cannot be trained; freeze it, and train adapters over it" in found["trained"]
        assert "cannot be trained; freeze it, and train adapters over it" in found["trained later"]
        assert "call model.to(device) before shard()" in found["not quantized"]
        assert "before onefold.shard()" in found["half"]
        assert "before onefold.shard(), or after onefold.unshard(model)" in found["to"]
        assert "use 4 bits (Linear4bit), or stage 2" in found["8 bits"]
        assert "quantise with bitsandbytes (Linear4bit)" in found["torchao"]
        for name in ("merge", "read", "constants"):
            assert "onefold.full_parameters(model)" in found[name]
