"""The Trainer, an Accelerate loop and TRL's SFTTrainer over sequences cut over ranks: what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import onefold
import onefold.hf
from tests.harness import run_ranks
from tests.hf.runs import STAGES, VOCABULARY, Run, arguments, same, tiny, trained

CUT, DEALT, BOTH = (("sequence", 2),), (("shard", 2),), (("shard", 2), ("sequence", 2))


class Plan(NamedTuple):
    """One run of a Trainer: by one process if it has no stage."""

    stage: int | None = None
    axes: tuple[tuple[str, int], ...] = CUT
    rows: int = 4  # of a batch on each process
    heads: int = 2  # one head is attended to by the ring, over balanced stretches
    packs: bool = False
    tile_loss: bool = False
    resume: str | None = None
    flags: tuple[tuple[str, Any], ...] = ()


class Found(NamedTuple):
    run: Run
    evaluated: list[dict[str, float]]
    about: dict[str, float]


def sentences(size: int) -> list[dict[str, list[int]]]:
    """Of different lengths, odd ones too; most labels of the long ones are ignored."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(size):
        tokens = torch.randint(3, VOCABULARY, (5 + 3 * number % 11,), generator=generator)
        labels = torch.where(tokens % 3 < len(tokens) % 4, -100, tokens)
        found.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return found


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids = filled("input_ids", 0)
    return {"input_ids": ids, "labels": filled("labels", -100), "attention_mask": (ids != 0).long()}


def near(prediction: Any) -> dict[str, float]:
    """A metric of logits and labels, each at its place."""
    logits, labels = (torch.from_numpy(one) for one in prediction)
    shifted = labels[:, 1:]
    counts = shifted != -100
    right = logits[:, :-1].softmax(-1).gather(2, shifted.clamp(min=0)[..., None])[..., 0]
    return {"right": float(right[counts].sum()), "rows": float(len(labels)), "width": float(logits.shape[1])}


def fit(plan: Plan, folder: str) -> Found:
    import transformers

    flags = {
        "per_device_train_batch_size": plan.rows, "per_device_eval_batch_size": plan.rows, "eval_steps": 2,
        "eval_strategy": "steps", "include_num_input_tokens_seen": True, "max_steps": 3,
        "lr_scheduler_type": "cosine", "optim": "sgd", "learning_rate": 0.3, **dict(plan.flags),
    }  # fmt: skip
    settings: dict[str, Any] = {"train_dataset": sentences(32), "eval_dataset": sentences(8)}
    settings["data_collator"] = transformers.DataCollatorWithFlattening() if plan.packs else padded
    settings |= {} if plan.packs else {"compute_metrics": near}
    heads = {"num_attention_heads": plan.heads, "num_key_value_heads": plan.heads}
    model, cls = tiny(use_cache=False, **heads), transformers.Trainer
    if plan.stage is not None:
        mesh = onefold.mesh(**{"shard": 1, **dict(plan.axes)})
        settings |= {"zero": onefold.Zero(stage=plan.stage, mesh=mesh), "tile_loss": plan.tile_loss}
        cls = onefold.hf.Trainer
    one = cls(model=model, args=arguments(folder, **flags), **settings)
    run = trained(one, plan.resume)
    evaluated = [row for row in one.state.log_history if "eval_loss" in row]
    names = ("eval_loss", "eval_right", "eval_rows", "eval_width")
    about = {"flos": one.state.total_flos, "tokens": one.state.num_input_tokens_seen, "epoch": one.state.epoch}
    return Found(run, [{name: row[name] for name in names if name in row} for row in evaluated], about)


def fits(plans: list[Plan], folder: str) -> list[Found]:
    torch.set_num_threads(1)
    return [fit(plan, folder) for plan in plans]


def assert_close(found: Found, wanted: Found, *, dealt: bool = False) -> None:
    """Losses, norms, evaluations and parameters to the rounding of fp32. Batches that are `dealt` to several processes
    are padded one by one, so the numbers of tokens differ."""
    assert found.run.losses == pytest.approx(wanted.run.losses, rel=3e-6)
    assert found.run.norms == pytest.approx(wanted.run.norms, rel=1e-4)
    assert len(found.evaluated) == len(wanted.evaluated)
    for ours, theirs in zip(found.evaluated, wanted.evaluated, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert dealt or found.about == wanted.about
    for name, value in wanted.run.state.items():
        torch.testing.assert_close(
            found.run.state[name], value, rtol=1e-4, atol=1e-5, msg=lambda s, n=name: f"{n}: {s}"
        )


EACH = ("accelerator_config", {"gradient_accumulation_kwargs": {"sync_each_batch": True}})
ACCUMULATED = (("gradient_accumulation_steps", 2), EACH)


def test_two_ranks_log_and_train_what_one_process_does_at_all_stages_bitwise(tmp_path: Path) -> None:
    plans = [Plan(stage, flags=ACCUMULATED) for stage in STAGES]
    packed = Plan(3, packs=True, tile_loss=True)
    smoothed = Plan(2, heads=1, flags=(("label_smoothing_factor", 0.1), ("average_tokens_across_devices", False)))
    alone = [one._replace(stage=None) for one in (plans[0], packed, smoothed)]
    wanted = run_ranks(1, fits, alone, str(tmp_path / "alone"))[0]
    by_rank = run_ranks(2, fits, [*plans, packed, smoothed], str(tmp_path / "cut"))
    *stages, found_packed, found_smoothed = by_rank[0]
    assert len(wanted[0].run.losses) == 3
    assert same([one.run for one in stages])
    assert_close(stages[0], wanted[0])
    assert_close(found_packed, wanted[1])
    assert_close(found_smoothed, wanted[2])
    assert [one.run.losses for one in by_rank[1]] == [one.run.losses for one in by_rank[0]]
    assert [one.evaluated for one in by_rank[1]] == [one.evaluated for one in by_rank[0]]


def test_four_ranks_on_a_mesh_with_both_axes_train_what_one_process_does(tmp_path: Path) -> None:
    plans = [Plan(stage, BOTH, rows=2) for stage in (0, 3)]
    wanted = run_ranks(1, fits, [Plan()], str(tmp_path / "alone"))[0][0]
    by_rank = run_ranks(4, fits_and_loop, plans, str(tmp_path / "cut"))
    found = by_rank[0][0]
    assert same([one.run for one in found])
    assert_close(found[0], wanted, dealt=True)
    losses, rates = plain_loop()
    for rank, (_, loop) in enumerate(by_rank):
        index = rank // 2
        assert loop.rows == [[2 * index, 2 * index + 1], [4, 5] if index == 0 else [6, 0]]
        assert loop.gathered == [0, 1, 2, 3, 4, 5, 6]  # the row that fills the last batch up is left out
        assert loop.objects == ["process 0", "process 1"] * 2 and loop.summed == 2
        assert loop.losses == pytest.approx(losses, rel=3e-6) and loop.rates == pytest.approx(rates)


class Loop(NamedTuple):
    """What a rank saw in an Accelerate loop: in each step, or of all steps."""

    rows: list[list[int]]
    gathered: list[int]
    objects: list[str]
    summed: int
    losses: list[float]
    rates: list[float]


def fits_and_loop(plans: list[Plan], folder: str) -> tuple[list[Found], Loop]:
    return fits(plans, folder), loop_of_four()


def seven() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (7, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row, "number": torch.tensor(at)} for at, row in enumerate(tokens)]


def falling(step: int) -> float:
    return 0.5**step


def loop_of_four() -> Loop:
    """Batches of two rows for two processes of two ranks each."""
    accelerator = onefold.hf.Accelerator(zero=onefold.Zero(stage=3, mesh=onefold.mesh(**dict(BOTH))))
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    loader = DataLoader(seven(), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = Loop([], [], [], 0, [], [])
    for batch in loader:
        numbers = batch.pop("number")
        loss = model(**batch).loss
        accelerator.backward(loss)
        found.rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.rows.append(numbers.tolist())
        found.losses.append(loss.item())
        found.gathered.extend(accelerator.gather_for_metrics(numbers).tolist())
        found.objects.extend(accelerator.gather_for_metrics([f"process {accelerator.process_index}"]))
    return found._replace(summed=int(accelerator.reduce(torch.tensor(1))))


def plain_loop() -> tuple[list[float], list[float]]:
    """The same by one process, with batches of four rows."""
    model, data = tiny(), seven()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses, rates = [], []
    for step, rows in enumerate(([0, 1, 2, 3], [4, 5, 6, 0])):
        rates.append(falling(2 * step))
        optimizer.param_groups[0]["lr"] = rates[-1]
        tokens = torch.stack([data[row]["input_ids"] for row in rows])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, rates


def resumed(folder: str) -> list[str]:
    """On a rank: what differs between a run, and runs that go on from its second step on another mesh."""
    torch.set_num_threads(1)
    wrong = list[str]()
    for first, then in ((Plan(3), Plan(1, DEALT, rows=2)), (Plan(2, DEALT, rows=2), Plan(3))):
        place = f"{folder}/{first.axes[0][0]}"
        whole = fit(first._replace(flags=(("save_strategy", "steps"), ("save_steps", 2))), place)
        again = fit(then._replace(resume=f"{place}/checkpoint-2"), place)
        if again.run.losses[-1] != pytest.approx(whole.run.losses[-1], rel=3e-6):
            wrong.append(f"{then.axes}: loss {again.run.losses[-1]}, not {whole.run.losses[-1]}")
        for name, value in whole.run.state.items():
            if not torch.allclose(again.run.state[name], value, rtol=1e-4, atol=1e-5):
                wrong.append(f"{then.axes}: {name}")
        if "onefold" in Path(f"{place}/checkpoint-2/config.json").read_text():
            wrong.append(f"{first.axes}: from_pretrained would look for our attention")
    return wrong + shuffled_and_refused()


def shuffled_and_refused() -> list[str]:
    """What differs between ranks of one sequence whose random numbers differ, and what is not refused."""
    mesh, rank, wrong = onefold.mesh(sequence=2), torch.distributed.get_rank(), list[str]()
    torch.manual_seed(100 + rank)
    accelerator = onefold.hf.Accelerator(zero=onefold.Zero(mesh=mesh))
    drawn = [batch.tolist() for batch in accelerator.prepare(DataLoader(range(64), batch_size=8, shuffle=True))]
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, drawn)
    if everyone[0] != everyone[1] or {row for batch in drawn for row in batch} != set(range(64)):
        wrong.append("shuffled differently")
    tries = {
        "dispatch_batches=True lets rank 0 read": lambda: onefold.hf.Accelerator(
            zero=onefold.Zero(mesh=mesh), dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
        ),
        '"batch_rebalance" gives every rank a batch of its own': lambda: onefold.hf.Trainer(
            tiny(), arguments("/nowhere", train_sampling_strategy="batch_rebalance"), zero=onefold.Zero(mesh=mesh)
        ),
    }
    for message, call in tries.items():
        try:
            call()
            wrong.append(f"not refused: {message}")
        except onefold.ConfigError as error:
            wrong += [] if message in str(error) else [str(error)]
    return wrong


def test_checkpoints_go_on_with_and_without_the_axis_and_ranks_of_a_sequence_read_the_same(tmp_path: Path) -> None:
    assert [row for rank in run_ranks(2, resumed, str(tmp_path)) for row in rank] == []
