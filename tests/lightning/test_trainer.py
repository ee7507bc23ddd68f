"""ZeroStrategy under lightning.pytorch.Trainer: what it computes, on two ranks over gloo."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import onefold
from onefold.lightning import ZeroStrategy
from tests.harness import run_ranks
from tests.harness.told import told
from tests.lightning.lit import Gan, Lit, blocks, data, fitted, trainer, weights

STAGES = (0, 1, 2, 3)
Run = tuple[list[float], dict[str, Tensor]]


def runs(stages: tuple[int | str, ...], **settings: Any) -> dict[int | str, Run]:
    """On a rank: losses and weights of each stage."""
    found = {}
    for stage in stages:
        _, module = fitted(stage, **settings)
        found[stage] = (module.losses, weights(module))
    return found


def equal(one: Run, other: Run) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in other[1])


def near(one: Run, other: Run) -> bool:
    losses = torch.tensor(one[0]).allclose(torch.tensor(other[0]), rtol=0, atol=1e-6)
    return losses and all(one[1][name].allclose(other[1][name], rtol=0, atol=1e-6) for name in other[1])


CASES = {
    "plain": {},
    "clip": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3},
    "value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("case", CASES)
def test_stages_are_bitwise_equal_and_ddp_agrees_to_1e_6(case):
    for found in run_ranks(2, runs, ("ddp", *STAGES), max_epochs=1, **CASES[case]):
        assert [stage for stage in STAGES if not equal(found[stage], found[0])] == []
        assert near(found[0], found["ddp"]) and len(found[0][0]) == 8


# -- precision ---------------------------------------------------------------------------------------------------------

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SEEN = {  # dtype of the output and of the labels in training_step, and whether autocast is on
    "32-true": (F32, F32, False),
    "bf16-mixed": (BF16, F32, False),
    "bf16-true": (BF16, BF16, False),
    "16-mixed": (F16, F32, False),
}


def narrow_runs(precision: str) -> Any:
    """On a rank: of stages 0 and 3, losses, weights, what training_step saw, and what the Trainer says."""
    found = []
    for stage in (0, 3):
        plugin = {"plugins": MixedPrecision(precision, "cpu")} if precision == "16-mixed" else {"precision": precision}
        run, module = fitted(stage, **plugin)
        (optimizer,) = run.optimizers
        found.append(((module.losses, weights(module)), set(module.seen), run.precision, optimizer.loss_scale))
    return found


@pytest.mark.parametrize("precision", SEEN)
def test_a_precision_of_lightnings_is_onefolds_and_no_autocast(precision):
    for (first, seen, name, scale), (last, *_) in run_ranks(2, narrow_runs, precision):
        assert equal(first, last) and seen == {SEEN[precision]} and name == precision
        assert scale == (2.0**16 if precision == "16-mixed" else 1.0)
        assert first[0][-1] < first[0][0] and all(value.dtype is F32 for value in first[1].values())


# -- models and loops --------------------------------------------------------------------------------------------------


class Late(Lit):
    """Built in configure_model, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = blocks()


class ByHand(Lit):
    """Optimizes by hand what Lit does by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()


def late() -> Any:
    return {stage: run for stage, run in runs((0, 3), make=Late).items()}, next(Late().parameters(), None)


def test_a_model_built_on_meta_trains_alike_at_all_stages():
    for found, built in run_ranks(2, late):
        assert equal(found[0], found[3]) and built is None
        assert found[0][0][-1] < found[0][0][0]


def by_hand(precision: str) -> Any:
    """On a rank: a loop by hand, and the automatic one."""
    return [
        (module.losses, weights(module))
        for make, clip in ((ByHand, None), (Lit, 0.05))
        for _, module in [fitted(3, make, precision=precision, gradient_clip_val=clip)]
    ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_manual_optimization_is_the_automatic_one(precision):
    for manual, automatic in run_ranks(2, by_hand, precision):
        assert equal(manual, automatic)


def adversaries(folder: str) -> Any:
    """On a rank: a GAN of DDP and of each stage, and one that is cut in two, at other stages."""
    whole = runs(("ddp", *STAGES), make=Gan)
    run, first = fitted(3, Gan, max_epochs=1)
    run.save_checkpoint(folder)
    second = Gan()
    trainer(ZeroStrategy(stage=1)).fit(second, data(), ckpt_path=folder)
    return whole, (first.losses + second.losses, weights(second))


def test_several_optimizers_step_in_turns_and_are_resumed(tmp_path):
    for whole, cut in run_ranks(2, adversaries, str(tmp_path / "gan.ckpt")):
        assert [stage for stage in STAGES if not equal(whole[stage], whole[0])] == []
        assert near(whole[0], whole["ddp"]) and len(whole[0][0]) == 32 and equal(cut, whole[0])


def used_again() -> Any:
    """On a rank: fit, validate, predict, and fit again, of one model."""
    run, module = fitted(3)
    seen = float(run.callback_metrics["val"])
    (validated,) = run.validate(module, data(8, shuffle=False), verbose=False)
    predicted = torch.cat(run.predict(module, data(8, shuffle=False)))
    with onefold.full_parameters(module), torch.no_grad():
        wanted = torch.cat([module.net(x) for x, _ in run.predict_dataloaders])
    again = trainer("onefold", max_epochs=1)
    again.fit(module, data())
    onefold.unshard(module)
    again.fit_loop.max_epochs = 2
    again.fit(module, data())
    return validated, seen, predicted.equal(wanted), len(module.losses), type(again.strategy).__name__


def test_a_model_is_validated_predicts_and_is_fitted_again_by_another_trainer():
    for validated, seen, same, steps, name in run_ranks(2, used_again):
        assert validated["val"] == seen and same and steps == 32 and name == "ZeroStrategy"


class Frozen(Lit):
    """The first block is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def traffic_of(accumulate: str) -> Any:
    module = Frozen()
    run = trainer(ZeroStrategy(stage=2, accumulate=accumulate), accumulate_grad_batches=4, max_epochs=1)
    run.fit(module, data())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return onefold.traffic(module).by_purpose["reduce"], trained


def test_four_micro_batches_are_one_exchange_unless_each_was_asked_for():
    once, each = (run_ranks(2, traffic_of, how)[0] for how in ("once", "each"))
    assert each[0] == 4 * once[0] and once[0] >= once[1] * 4 // 2  # bytes of fp32; each of two ranks sends a half


def said_before_training() -> list[str]:
    with told() as texts:
        fitted(2)
    return texts


def test_settings_and_states_are_said_in_three_sentences_before_training() -> None:
    texts, others = run_ranks(2, said_before_training)
    assert others == [] and [text.split()[0] for text in texts] == ["Planned:", "On", "Expect"]
    assert texts[0] == "Planned: stage 2, activations keep, no offload."
