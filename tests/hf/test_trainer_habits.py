"""What users of the Trainer rely on: evaluation, generation, early stopping, batch sizes that fit, compiled models."""

from __future__ import annotations

import logging
import math
import os
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

import onefold
import onefold.hf
from onefold.hf.fits import total_bytes
from tests.harness import run_ranks, run_ranks_raises
from tests.hf.runs import STAGES, VOCABULARY, Run, Sentences, arguments, run, same, tiny, trained, trainer


class Evaluated(NamedTuple):
    before: float
    predictions: torch.Tensor
    after: float
    metric: float


def evaluated(stage: int | None, folder: str, flags: dict[str, Any]) -> Evaluated:
    """An evaluation before training, predictions and an evaluation after it; ten sentences on two ranks, padded."""
    one = trainer(stage, folder, {**flags, "per_device_eval_batch_size": 3}, compute_metrics=accuracy)
    # accelerate's DDP is left out of a training that comes after an evaluation (transformers 5.22): another Trainer
    first = one if stage is not None else trainer(stage, folder, {**flags, "per_device_eval_batch_size": 3})
    before = first.evaluate()["eval_loss"]
    one.train()
    found = one.predict(Sentences(10))
    after = one.evaluate()
    return Evaluated(before, torch.tensor(found.predictions), after["eval_loss"], after["eval_accuracy"])


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}


def of_stages(function: Any, stages: tuple[int | None, ...], *arguments: Any) -> list[Any]:
    return [function(stage, *arguments) for stage in stages]


def test_evaluation_before_and_after_training_and_predictions_are_those_of_ddp(tmp_path):
    ranks = run_ranks(2, of_stages, evaluated, (None, *STAGES), str(tmp_path), {})
    plain, *others = ranks[0]
    assert plain.predictions.shape == (10, 16, VOCABULARY)
    for one in [*others, *ranks[1][1:]]:
        assert (one.before, one.after) == pytest.approx((plain.before, plain.after), abs=1e-6)
        assert one.metric == plain.metric
        assert torch.allclose(one.predictions, plain.predictions, atol=1e-5)
        assert torch.equal(one.predictions, others[0].predictions)


class Pairs(Sentences):
    """Sentences for an encoder and a decoder, of different lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        return {"input_ids": tokens, "labels": tokens[: 4 + index % 4]}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


def seq2seq(stage: int | None, folder: str) -> tuple[Run, torch.Tensor, list[int]]:
    """A run that generates in evaluation and in a callback, there with another length on each rank."""
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    lengths: list[int] = []

    class Generates(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            more = 2 + 3 * args.process_index
            tokens = model.generate(torch.ones(1, 4, dtype=torch.long), min_new_tokens=more, max_new_tokens=more)
            lengths.append(tokens.shape[1])

    cls, zero = transformers.Seq2SeqTrainer, {}
    if stage is not None:
        cls, zero = onefold.hf.sharded(cls), {"zero": onefold.Zero(stage=stage)}
    flags = arguments(folder).to_dict()
    args = transformers.Seq2SeqTrainingArguments(
        **{name: flags[name] for name in ("output_dir", "max_steps", "learning_rate", "logging_steps", "report_to",
           "disable_tqdm", "save_strategy", "use_cpu", "seed")}, predict_with_generate=True, generation_max_length=8,
        per_device_train_batch_size=2,
    )  # fmt: skip
    one = cls(model=model, args=args, train_dataset=Pairs(), data_collator=collate, callbacks=[Generates()], **zero)
    found = trained(one)
    return found, torch.tensor(one.predict(Pairs(6)).predictions), lengths


def test_seq2seq_generates_in_evaluation_and_callbacks_at_every_stage(tmp_path):
    ranks = run_ranks(2, of_stages, seq2seq, (None, *STAGES), str(tmp_path))
    (plain, tokens, _), *others = ranks[0]
    assert same([found for found, _, _ in others])
    assert others[0][0].losses == pytest.approx(plain.losses, abs=1e-6)
    assert all(torch.equal(one[1], tokens) for one in others)
    assert [one[2] for one in others] == [[3] * 4] * 4
    assert [one[2] for one in ranks[1][1:]] == [[6] * 4] * 4


def own_schedule(stage: int | None, folder: str) -> Run:
    """A run with `optimizers=`: an optimizer of two param groups, and its scheduler."""
    model = tiny()
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is large], "lr": lr}
              for large, lr in ((True, 1e-2), (False, 1e-3))]  # fmt: skip
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return trained(trainer(stage, folder, model=model, optimizers=(optimizer, scheduler)))


def test_a_scheduler_of_the_users_own_sets_the_learning_rate(tmp_path):
    plain, *others = run_ranks(2, of_stages, own_schedule, (None, 0, 3), str(tmp_path))[0]
    assert same(others)
    assert others[0].losses == pytest.approx(plain.losses, abs=1e-6)


def adagrad(stage: int | None, folder: str) -> Run:
    return run(stage, folder, {"optim": "adagrad", "max_steps": 2})  # whose state is there before the first step


def test_adagrad_trains_as_under_ddp(tmp_path):
    plain, *others = run_ranks(2, of_stages, adagrad, (None, 0, 3), str(tmp_path))[0]
    assert same(others)
    assert others[0].losses == pytest.approx(plain.losses, abs=1e-6)


def stopped_early(stage: int, folder: str) -> int:
    """Steps until evaluations got worse twice."""
    import transformers

    flags = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 20,
        "load_best_model_at_end": True, "learning_rate": 0.05, "save_total_limit": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip
    worse = {"train_dataset": [Sentences()[0]] * 64, "eval_dataset": Sentences(11)}
    one = trainer(stage, folder, flags, callbacks=[transformers.EarlyStoppingCallback(2)], **worse)
    one.train()
    return one.state.global_step


LOSSES = {1: math.nan, 3: -math.inf}  # by step: what is not finite, though gradients are


class Losing(transformers.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs) * LOSSES.get(self.state.global_step, 1.0)


class LosingOurs(onefold.hf.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs) * LOSSES.get(self.state.global_step, 1.0)


def losing(folder: str) -> tuple[list[Any], bool]:
    """What is logged without and with Onefold, every second step; and the filter that a checkpoint's arguments have."""
    flags = {"logging_steps": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 6}
    settings = {"args": arguments(folder, **flags), "train_dataset": Sentences()}
    classes = [Losing, onefold.hf.sharded(Losing), LosingOurs]
    found = [trained(cls(model=tiny(), **settings)).losses for cls in classes]
    assert settings["args"].logging_nan_inf_filter
    saved = torch.load(f"{folder}/checkpoint-6/training_args.bin", weights_only=False)
    return found, saved.logging_nan_inf_filter


def test_losses_that_are_not_finite_are_logged_as_transformers_does(tmp_path):
    (plain, *ours), saved = run_ranks(2, losing, str(tmp_path))[0]
    assert all(math.isfinite(loss) for loss in plain) and len(plain) == 3
    assert [one == pytest.approx(plain, abs=1e-6) for one in ours] == [True, True]
    assert saved


def test_early_stopping_stops_all_ranks_at_one_step(tmp_path):
    found = [run_ranks(2, stopped_early, stage, str(tmp_path / str(stage))) for stage in (0, 3)]
    assert found[0] == found[1] == [found[0][0]] * 2
    assert found[0][0] < 20


def out_of_memory(stage: int, folder: str) -> tuple[int, list[float]]:
    """A model that takes two sentences at most, under auto_find_batch_size; it fails in the middle of its forward."""
    model = tiny()

    def refuse(module: Any, inputs: Any, output: Any) -> None:
        if output.shape[0] > 2:
            raise RuntimeError("CUDA out of memory.")

    model.model.layers[0].mlp.register_forward_hook(refuse)
    flags = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    one = trainer(stage, folder, flags, model=model)
    one.train()
    return one._train_batch_size, [row["loss"] for row in one.state.log_history if "loss" in row]


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_size_that_fits_is_found(stage, tmp_path):
    size, losses = run_ranks(2, out_of_memory, stage, str(tmp_path))[0]
    assert size == 2
    assert losses == run_ranks(2, run, stage, str(tmp_path))[0].losses


def counting_uncompiled(model: Any) -> list[int]:
    """Lets the model count how often the MLP of each block runs uncompiled: a graph has no such count in it."""
    runs = [0] * len(model.model.layers)

    def counted(index: int, forward: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                runs[index] += 1
            return forward(x)

        return run

    for index, layer in enumerate(model.model.layers):
        layer.mlp.forward = counted(index, layer.mlp.forward)
    return runs


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
COMPILED_RUNS = [  # stage, TrainingArguments, Zero, accelerate's regional compilation
    (2, COMPILED, {}, False),
    (3, COMPILED | {"gradient_checkpointing": True}, {}, False),
    (2, COMPILED, {"activations": "checkpoint"}, True),
]


def compiled(folder: str) -> tuple[list[float], list[tuple[list[float], int]]]:
    """Losses of a plain training, and of compiled ones, with the runs of their blocks that were not compiled."""
    plain, found = run(2, folder, {"max_steps": 2}).losses, []
    for stage, flags, zero, regional in COMPILED_RUNS:
        torch._dynamo.reset()
        model = tiny(use_cache=False)
        uncompiled = counting_uncompiled(model)
        with mock.patch.dict(os.environ, {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(regional)}):
            one = trainer(stage, folder, {**flags, "max_steps": 2}, model=model, zero=onefold.Zero(stage=stage, **zero))
            found.append((trained(one).losses, sum(uncompiled)))
    return plain, found


def test_a_compiled_model_trains_the_same_by_its_graphs(tmp_path):
    for plain, found in run_ranks(2, compiled, str(tmp_path)):
        assert found == [(pytest.approx(plain, abs=1e-5), 0)] * len(COMPILED_RUNS)


def refused(what: str, folder: str) -> None:
    """What users may ask a Trainer for that cannot be."""
    if what == "fsdp":
        args = arguments(folder, fsdp="full_shard")
        onefold.hf.Trainer(model=tiny(), args=args, train_dataset=Sentences())
    elif what == "bf16_full_eval":
        trainer(2, folder, {"bf16_full_eval": True})
    elif what in ("adamw_8bit", "adamw_torch_4bit"):
        run(2, folder, {"optim": what})
    elif what == "an instance":
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters())
        trainer(2, folder, model=model, optimizer_cls_and_kwargs=(optimizer, {}))
    elif what == "too large":
        trainer(1, folder, budget_bytes=400_000).train()
    elif what == "too large for any stage":
        one = trainer(3, folder, {"gradient_checkpointing": True}, budget_bytes=1000)
        one.train()
    elif what == "a stream with a budget":
        trainer(1, folder, budget_bytes=400_000, train_dataset=Stream()).train()
    elif what == "sharded":
        onefold.init()
        run(2, folder, build=lambda: onefold.shard(tiny(), stage=2))


class Noisy(Sentences):
    """Sentences whose rows draw random numbers."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random.random(), numpy.random.rand(), torch.rand(1)
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([Sentences()[index] for index in range(64)])


class Fit(NamedTuple):
    """Runs with and without a rehearsal of the first step, and what was logged meanwhile."""

    plain: Run
    budget: Run
    warned: Run
    stream: Run
    texts: list[str]
    after_budget: int  # how many of the texts were logged before and with a sufficient budget
    none: int | None
    planned: list[str]


def fitting(folder: str) -> Fit:
    """A run without a budget, one with enough, and two on a device of 400 kB, of which the last cannot be rehearsed."""
    texts: list[str] = []
    planned: list[str] = []
    handler = logging.Handler(logging.INFO)
    said = {logging.INFO: planned, logging.WARNING: texts}
    handler.emit = lambda record: said[record.levelno].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    logging.getLogger("onefold").setLevel(logging.INFO)
    try:
        plain = trained(trainer(1, folder, train_dataset=Noisy(), model=tiny(attention_dropout=0.1)))
        noisy = {"train_dataset": Noisy(), "model": tiny(attention_dropout=0.1)}
        budget, quiet = trained(trainer(1, folder, budget_bytes=10**9, **noisy)), len(texts)
        with mock.patch("onefold.hf.trainer.total_bytes", lambda device: 400_000):  # a CPU has no memory of its own
            warned = trained(trainer(1, folder, train_dataset=Noisy(), model=tiny(attention_dropout=0.1)))
            stream = trained(trainer(1, folder, train_dataset=Stream()))
    finally:
        logging.getLogger("onefold").removeHandler(handler)
        logging.getLogger("onefold").setLevel(logging.NOTSET)
    return Fit(plain, budget, warned, stream, texts, quiet, total_bytes(torch.device("cpu")), planned)


def test_a_step_too_large_for_the_device_is_warned_of_once_and_trained_bit_for_bit_as_ever(tmp_path):
    first, second = run_ranks(2, fitting, str(tmp_path))
    assert same([first.plain, first.budget, first.warned])
    assert (first.after_budget, first.none) == (0, None)
    assert len(first.texts) == 1 and second.texts == []  # rank 0 says it; a stream has no first rows
    assert re.fullmatch(
        r"stage 1 will not fit: it needs \d+ kB of 400 kB on each of 2 ranks; "
        r"stage 3 with checkpointing needs \d+ kB",
        first.texts[0],
    )
    assert len(first.stream.losses) == 4
    assert len(first.planned) == 6 and second.planned == []  # with the budget, and on the device of 400 kB
    for lines, memory in ((first.planned[:3], r"1\.0 GB"), (first.planned[3:], "400 kB")):
        assert re.fullmatch(r"Planned: stage 1, batch \d+, activations keep, no offload\.", lines[0])
        assert re.fullmatch(r"On each rank: parameters [\d.]+ kB, gradients [\d.]+ kB, optimizer [\d.]+ kB\.", lines[1])
        assert re.fullmatch(rf"Expect [\d.]+ kB of {memory} at the peak\.", lines[2])


REFUSED = {
    "fsdp": ("ConfigError", "TrainingArguments(fsdp=...) asks for another engine beside Onefold"),
    "bf16_full_eval": ("ConfigError", "bf16_full_eval=True casts the model"),
    "adamw_8bit": ("OptimizerError", "AdamW keeps its state in few bits"),
    "adamw_torch_4bit": ("OptimizerError", "AdamW4bit keeps its state in few bits"),
    "an instance": ("OptimizerError", "wants a class, found an instance of AdamW"),
    "too large": ("ConfigError", "stage 1 will not fit: it needs "),
    "too large for any stage": ("ConfigError", "ranks; use more ranks, a smaller batch, or Zero(offload='host')"),
    "a stream with a budget": ("ConfigError", "Stream is a stream; leave budget_bytes out"),
    "sharded": ("ModelError", "was sharded by onefold.shard already"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_said_before_training(what, tmp_path):
    pytest.importorskip({"adamw_8bit": "bitsandbytes", "adamw_torch_4bit": "torchao"}.get(what, "torch"))
    kind, text = REFUSED[what]
    for error in run_ranks_raises(2, refused, what, str(tmp_path)):
        assert error.type_name == kind, error
        assert text in error.message
        assert "\n" not in error.message
