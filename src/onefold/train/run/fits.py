"""Asks the plan, before a run starts, whether the run can fit: a model that is far too large ends with one line."""

from __future__ import annotations

import dataclasses

from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate, refuse_unfit
from onefold.cost.hardware import TABLE, Hardware
from onefold.cost.search import Question
from onefold.cost.shapes import Shape
from onefold.cost.states import named_cost
from onefold.cost.work import Work
from onefold.offload.host_memory import available_bytes
from onefold.settings.widths import widths_of
from onefold.train.run.settings import Settings


def on_host(ranks: int) -> Hardware:
    """A machine without GPUs, whose available memory these ranks share."""
    return dataclasses.replace(TABLE["laptop"], name="this machine", memory_bytes=available_bytes() // ranks)


def planned(settings: Settings, shape: Shape, ranks: int, machine: Hardware) -> Estimate | None:
    """The plan's estimate of a rank; None where the plan has no formula: sequence parallelism over tp, or tiers that
    fill what memory there is."""
    zero, axes = settings.zero, settings.zero.axes(ranks)
    if zero.sequence or zero.offload == "auto":
        return None
    micro_batches = settings.steps.split(zero.data_parallel_ranks(ranks))[1]
    cuda = machine.device == "cuda"
    widths = widths_of(zero.precision, "split" if cuda and zero.precision == "bf16" else "fp32")
    if micro_batches > 1 and widths.narrow:
        widths = widths._replace(grad=4)
    question = Question(
        work=Work(widths=widths, shape=shape, bucket_bytes=int(zero.bucket_mb * (1 << 20)), auto_wire=True),
        ranks=ranks, hardware=machine, cost=named_cost(settings.adam.optimizer, settings.adam.optimizer_state),
        tp=axes.get("tp", 1), replica=axes.get("replica", 1), sequence=axes.get("sequence", 1),
        batch=settings.steps.micro_batch, micro_batches=micro_batches,
        prefetch=zero.prefetch if isinstance(zero.prefetch, int) else 1,
        reshard_after_forward=zero.reshard_after_forward,
    )  # fmt: skip
    choice = Choice(
        int(zero.stage) if zero.stage != "auto" else 3, optimizer=zero.offload or "device",
        parameters=zero.offload_parameters or "device",
        activations="checkpoint" if zero.activations == "auto" else zero.activations,
    )  # fmt: skip
    return question.price(choice, question.grid(), settings.steps.micro_batch)


def check_fits(settings: Settings, shape: Shape, ranks: int, machine: Hardware) -> Estimate | None:
    """The plan's estimate of a rank, if the plan has one; raises where the run cannot fit."""
    found = planned(settings, shape, ranks, machine)
    if found is None:
        return None
    refuse_unfit(found, ", or --no-plan to try it all the same")
    return found
