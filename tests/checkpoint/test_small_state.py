"""Optimizer state in bf16 and 8 bits is saved in that form, and loads into every other at any stage and rank count."""

from __future__ import annotations

import math
from pathlib import Path

import torch

import onefold
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.storage import Storage
from tests.checkpoint.runs import Case, Trainer, differing, digests, trained, truth
from tests.harness import run_ranks

FORMS = ("fp32", "bf16", "8bit")
WIDER = {"fp32": ("fp32",), "bf16": ("fp32", "bf16"), "8bit": FORMS}  # forms that hold every value of a form


def saved(folder: str, forms: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """On every rank: train and save in these forms; what the state is, moments as the values they stand for."""
    onefold.init()
    found = {}
    for form in forms:
        trainer = Trainer(Case(2, "split", f"adamw-{form}")).train(3)
        trainer.save(f"{folder}/{form}")
        found[form] = digests(trained(truth(trainer)))
    return found


def loaded(folder: str, asked: list[tuple[str, Case]]) -> list[tuple[dict[str, str], float]]:
    """On every rank: load each; what the state is, and the loss of a step from there."""
    onefold.init()
    found = []
    for form, case in asked:
        trainer = Trainer(case, seed=3).load(f"{folder}/{form}")
        whole = digests(trained(truth(trainer)))
        found.append((whole, trainer.train(2).losses[-1]))
    return found


def test_every_form_loads_into_every_other_and_exactly_where_it_can(tmp_path: Path) -> None:
    """Saved by three ranks at stage 2, loaded by two at other stages and precisions."""
    [wrote, *_] = run_ranks(3, saved, str(tmp_path), FORMS)
    places = [(3, "split"), (0, "bf16"), (1, "fp32")]
    asked = [(form, Case(*place, f"adamw-{to}")) for form in FORMS for place, to in zip(places, FORMS, strict=True)]
    rows = run_ranks(2, loaded, str(tmp_path), asked)
    for found in rows:
        for (form, case), (state, loss) in zip(asked, found, strict=True):
            to = case.optimizer.partition("-")[2]
            changed = differing(state, wrote[form])
            assert (changed == []) == (to in WIDER[form]), (form, case)
            assert all("|exp_avg" in name for name in changed), (form, case)
            assert math.isfinite(loss), (form, case)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
    for form, dtype in dtypes.items():
        [folder] = (tmp_path / form).glob("step-*")
        checkpoint = Checkpoint(Storage(), folder)
        record = next(one for one in checkpoint.manifest.records if "exp_avg" in one.states)
        assert record.dtype("exp_avg") is dtype
        onefold.export(tmp_path / form, tmp_path / f"{form}.pt", format="torch")
        theirs = torch.load(tmp_path / f"{form}.pt", weights_only=True)["optimizer"]
        names = [name for group in theirs["param_groups"] for name in group["param_names"]]
        for name, state in ((names[index], state) for index, state in theirs["state"].items()):
            if state["exp_avg"].ndim <= 2:  # others may have another order in memory
                flat = {f"{name}|{key}": state[key].reshape(-1) for key in ("exp_avg", "exp_avg_sq")}
                assert digests(flat).items() <= wrote[form].items()


def resumed(folder: str, cases: list[Case]) -> list[list[str]]:
    """On every rank: five steps at once, and three, saved and loaded, then two."""
    onefold.init()
    found = []
    for case in cases:
        whole = truth(Trainer(case).train(5))
        Trainer(case).train(3).save(f"{folder}/{case.optimizer}")
        again = truth(Trainer(case, seed=1).load(f"{folder}/{case.optimizer}").train(2))
        found.append(differing(digests(whole), digests(again)))
    return found


def test_a_resumed_run_goes_on_bitwise(tmp_path: Path) -> None:
    cases = [Case(3, "split", "adamw-8bit"), Case(2, "fp16", "adamw-bf16"), Case(1, "fp32", "sgd-8bit")]
    assert run_ranks(2, resumed, str(tmp_path), cases) == [[[]] * len(cases)] * 2


def of_this_rank() -> list[str]:
    """On every rank: its state dict, loaded into the same and into another form; what differs, and what is said."""
    onefold.init()
    case = Case(2, "split", "adamw-8bit")
    first = Trainer(case).train(2)
    kept = first.optimizer.state_dict()
    again = Trainer(case)
    again.optimizer.load_state_dict(kept)
    mine, theirs = (truth(one) for one in (first, again))
    said = [name for name in mine if "|" in name and not torch.equal(mine[name], theirs[name])]
    try:
        Trainer(Case(2, "split", "adamw")).optimizer.load_state_dict(kept)
    except onefold.StateError as error:
        said.append(str(error))
    return said


def test_the_state_dict_of_a_rank_loads_into_the_same_form_only() -> None:
    [said] = run_ranks(1, of_this_rank)
    assert len(said) == 1 and "'state': '8bit'" in said[0]
