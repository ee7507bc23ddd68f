"""onefold.hf.Accelerator in a hand-written loop on two ranks: as accelerate's own, to the bit between stages."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import onefold
import onefold.hf
from onefold.cost.machine import here
from onefold.cost.text import format_bytes
from tests.harness import run_ranks, run_ranks_raises
from tests.harness.told import told
from tests.hf.runs import STAGES, Run, Sentences, same, tiny


def accelerator(stage: int | None, precision: str = "fp32", **settings: Any) -> Any:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    if stage is None:
        return accelerate.Accelerator(cpu=True, **settings)
    return onefold.hf.Accelerator(zero=onefold.Zero(stage=stage, precision=precision), cpu=True, **settings)


class Loop:
    """A loop as accelerate's documentation has it: the scheduler is made before prepare()."""

    def __init__(self, stage: int | None, **settings: Any) -> None:
        one = self.accelerator = accelerator(stage, **settings)
        model = tiny()
        optimizer = torch.optim.AdamW(
            [{"params": [p for p in model.parameters() if p.ndim > 1]},
             {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}], lr=1e-2,
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(Sentences(), batch_size=2, shuffle=False)
        self.optimizer, self.loader, self.model, self.scheduler = one.prepare(optimizer, loader, model, scheduler)
        self.norms: list[float] = []
        self.losses: list[float] = []

    def train(self, start: int, stop: int, clip: float | None = 0.5) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*optimizer.step.*")  # schedulers follow the new optimizer
            self._train(start, stop, clip)

    def _train(self, start: int, stop: int, clip: float | None) -> None:
        for number, batch in enumerate(self.loader):
            if not start <= number < stop:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and clip is not None:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), clip)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(float(self.accelerator.gather(loss.detach()[None]).mean()))

    def run(self) -> Run:
        state = self.accelerator.get_state_dict(self.model)
        return Run(self.losses, self.norms, {name: value.clone() for name, value in state.items()})


def loops(stages: tuple[int | None, ...], settings: dict[str, Any], clip: float | None = 0.5) -> list[Run]:
    found = []
    for stage in stages:
        loop = Loop(stage, **settings)
        loop.train(0, 6, clip)
        found.append(loop.run())
    return found


def test_a_loop_of_accelerate_equals_ddp_and_stages_are_bitwise_equal():
    plain, *others = run_ranks(2, loops, (None, *STAGES), {})[0]
    assert same(others)
    assert others[0].losses == pytest.approx(plain.losses, abs=1e-6)
    assert others[0].norms == pytest.approx(plain.norms, abs=1e-5)


def test_accumulate_leaves_the_optimizer_and_the_scheduler_alone_until_the_last_micro_batch():
    plain, *others = run_ranks(2, loops, (None, *STAGES), {"gradient_accumulation_steps": 3})[0]
    assert len(plain.norms) == 2
    for one in others:
        assert one.losses == pytest.approx(plain.losses, abs=1e-6)
        assert one.norms == pytest.approx(plain.norms, abs=1e-5)


HABITS = ("scheduler later", "scheduler alone", "frozen", "unfrozen")


def habit(what: str, stage: int | None) -> Run:
    """A scheduler that prepare() gets in another call or not at all, and an optimizer that has frozen parameters."""
    one, model = accelerator(stage), tiny()
    last = [p for name, p in model.named_parameters() if "layers.1" in name]
    if "frozen" in what:
        model.requires_grad_(False)
        for param in last:
            param.requires_grad_(True)
    rest = [p for p in model.parameters() if all(p is not other for other in last)]
    groups = [{"params": rest, "lr": 1e-3}, {"params": last}] if what == "frozen" else model.parameters()
    torch_optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader = one.prepare(model, torch_optimizer, DataLoader(Sentences(), batch_size=2))
    scheduler = one.prepare(scheduler) if what == "scheduler later" else scheduler
    losses: list[float] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer.step.*")
        for number, batch in zip(range(4), loader, strict=False):
            if what == "unfrozen" and number == 2:
                model.requires_grad_(True)
            loss = model(**batch).loss
            one.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(one.gather(loss.detach()[None]).mean()))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    state = one.get_state_dict(model)
    return Run(losses, rates[-1:], {name: value.clone() for name, value in state.items()})


def habits(stages: tuple[int | None, ...]) -> dict[str, list[Run]]:
    return {what: [habit(what, stage) for stage in stages] for what in HABITS}


def test_schedulers_of_the_torch_optimizer_go_on_and_frozen_parameters_are_left_out_of_the_optimizer():
    found = run_ranks(2, habits, (None, 0, 3))[0]
    for what, (plain, *others) in found.items():
        assert same(others), what
        if what != "unfrozen":  # DDP does not reduce what it has seen frozen
            assert others[0].losses == pytest.approx(plain.losses, abs=1e-6), what
            assert others[0].norms == plain.norms, what  # the learning rate
    first, second = found["frozen"][1].state, found["unfrozen"][1].state
    assert not torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])


def saved(stage: int, folder: str, mixed_precision: str) -> Run:
    """Six steps, saved after the third."""
    loop = Loop(stage, mixed_precision=mixed_precision)
    loop.train(0, 3)
    loop.accelerator.save_state(folder)
    loop.train(3, 6)
    return loop.run()


def loaded(stage: int, folder: str, mixed_precision: str) -> Run:
    """The last three steps."""
    loop = Loop(stage, mixed_precision=mixed_precision)
    loop.accelerator.load_state(folder)
    loop.train(3, 6)
    return loop.run()


@pytest.mark.parametrize(("stage", "later", "precision"), [(3, 1, "no"), (2, 2, "bf16"), (0, 3, "fp16")])
def test_a_loop_goes_on_bit_for_bit_from_save_state_at_any_stage(stage, later, precision, tmp_path):
    whole = run_ranks(2, saved, stage, str(tmp_path), precision)[0]
    again = run_ranks(2, loaded, later, str(tmp_path), precision)[0]
    assert same([again, Run(whole.losses[3:], whole.norms[3:], whole.state)])
    assert not list(tmp_path.glob("optimizer*"))
    assert not list(tmp_path.glob("model*"))


def test_a_loop_goes_on_with_another_number_of_ranks(tmp_path):
    run_ranks(2, saved, 2, str(tmp_path), "no")
    assert len(run_ranks(1, loaded, 3, str(tmp_path), "no")[0].losses) == 3


def clamped(stage: int | None, precision: str) -> dict[str, torch.Tensor]:
    """A step with SGD and lr=1 from gradients that were clamped."""
    one = accelerator(stage, mixed_precision=precision)
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = one.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batch = {name: value[None] for name, value in Sentences()[0].items()}
    one.backward(model(**batch).loss)
    one.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    return {name: value - before[name] for name, value in one.get_state_dict(model).items()}


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clip_grad_value_bounds_every_element(precision):
    for stage in (0, 3):
        moved = run_ranks(2, clamped, stage, precision)[0]
        assert max(float(value.abs().max()) for value in moved.values()) == pytest.approx(1e-3, rel=1e-3)


def exported(stage: int, folder: str) -> None:
    loop = Loop(stage, mixed_precision="bf16")
    loop.train(0, 2)
    one, model = loop.accelerator, loop.accelerator.unwrap_model(loop.model)
    model.save_pretrained(
        folder, is_main_process=one.is_main_process, save_function=one.save, state_dict=one.get_state_dict(loop.model)
    )


def test_save_pretrained_of_a_loop_is_read_in_fp32(tmp_path):
    import transformers

    run_ranks(2, exported, 3, str(tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype is torch.float32
    assert any((value.bfloat16().float() != value).any() for value in model.state_dict().values())


# -- refusals ----------------------------------------------------------------------------------------------------------


def wrong(what: str, folder: str) -> None:
    """What users may do wrong in a loop."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    if what == "fsdp":
        import accelerate

        accelerator(2, fsdp_plugin=accelerate.FullyShardedDataParallelPlugin())
    one = accelerator(2)
    if what == "sharded":
        onefold.init()
        one.prepare(onefold.shard(model, stage=1))
    elif what == "ddp":
        one.prepare(torch.nn.parallel.DistributedDataParallel(model))
    elif what == "state":
        model(**{name: value[None] for name, value in Sentences()[0].items()}).loss.backward()
        optimizer.step()
        one.prepare(model, optimizer)
    elif what == "foreign":
        one.prepare(model, torch.optim.AdamW(tiny(1).parameters()))
    elif what == "not element-wise":
        one.prepare(model, torch.optim.LBFGS(model.parameters()))
    elif what == "few parameters":
        model, optimizer = one.prepare(model, optimizer)
        one.clip_grad_norm_(list(model.parameters())[:2], 1.0)
    elif what == "join":
        one.join_uneven_inputs([model])
    elif what == "two precisions":
        accelerator(2, mixed_precision="fp16", precision="bf16")
    elif what == "no checkpoint":
        model, optimizer = one.prepare(model, optimizer)
        one.load_state(folder)


WRONG = {
    "fsdp": ("ConfigError", "fsdp_plugin asks for FSDP beside Onefold"),
    "sharded": ("ModelError", "was sharded by onefold.shard already; give prepare() the plain model"),
    "ddp": ("ModelError", "wrapped by DistributedDataParallel already"),
    "state": ("OptimizerError", "holds state of 20 parameters already"),
    "foreign": ("OptimizerError", "has parameters of 0 prepared models"),
    "not element-wise": ("OptimizerError", "LBFGS can update neither shards nor whole tensors"),
    "few parameters": ("StateError", "got 2 parameters, which are all of 0 prepared optimizers"),
    "join": ("StateError", "keep even_batches=True"),
    "two precisions": ("ConfigError", "ask for two precisions; leave one of them out"),
    "no checkpoint": ("CheckpointError", "holds no folder onefold/"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_said_with_its_remedy(what: str, tmp_path: Path) -> None:
    kind, text = WRONG[what]
    for error in run_ranks_raises(2, wrong, what, str(tmp_path)):
        assert error.type_name == kind, error
        assert text in error.message
        assert "\n" not in error.message


def said_by_prepare() -> tuple[list[str], dict[str, str], int]:
    """On a rank: what prepare() said, what the states take after a step, and the memory of the machine."""
    onefold.init()
    with told() as texts:
        loop = Loop(3)
    loop.train(0, 2)
    held = onefold.memory(loop.model)
    states = {name: format_bytes(getattr(held, name).measured) for name in ("parameters", "optimizer")}
    return texts, states, here(torch.device("cpu")).memory_bytes


def test_prepare_says_settings_and_states_in_three_sentences_on_rank_0() -> None:
    (texts, states, memory_bytes), (others, *_) = run_ranks(2, said_by_prepare)
    assert others == [] and len(texts) == 3
    assert texts[0] == "Planned: stage 3, activations keep, no offload."
    assert texts[1].startswith(f"On each rank: parameters {states['parameters']}, gradients ")
    assert texts[1].endswith(f"optimizer {states['optimizer']}.")
    assert re.fullmatch(
        rf"Expect [\d.]+ kB of {re.escape(format_bytes(memory_bytes))}, and what activations of the first batch take\.",
        texts[2],
    )
