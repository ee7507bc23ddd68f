"""The training loop.

A step: 1 forward and backward of each micro-batch  2 clip, set the learning rate, update  3 all ranks tell each other
their loss, whether to stop, and whether they have a warning: one small message. Then, where it is due, evaluate, write
a row, save. Losses add up in rank order in double precision: the same bits on every rank and at every stage.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from onefold.checkpoint.memory.resilient import Resilient
from onefold.checkpoint.protocol.background import finish_saves
from onefold.checkpoint.protocol.save import save
from onefold.comm.communicator import Comm, Comms
from onefold.comm.meter import Label
from onefold.errors import PrecisionError
from onefold.observe.reports import memory, track_memory
from onefold.optim.optimizer import Optimizer
from onefold.optim.replicas import check_replicas
from onefold.optim.update_probe import UpdateProbe
from onefold.runtime.engine import engine_of
from onefold.runtime.loop import accumulate
from onefold.train.run.data import Data
from onefold.train.run.diagnose import (
    FALLS_IN,
    falling_scale,
    is_out_of_memory,
    lost_updates,
    out_of_memory,
    small_messages,
)
from onefold.train.run.folder import RunFolder, append_lines
from onefold.train.run.metrics import (
    Listener,
    Row,
    flops_per_token,
    in_use,
    latency,
    memory_now,
    peak_flops,
    perplexity,
    traffic_now,
)
from onefold.train.run.optimizers import lr_ratios
from onefold.train.run.pace import Pace, Stragglers, compute
from onefold.train.run.profiled import RunProfile
from onefold.train.run.rank_warnings import RankWarnings
from onefold.train.run.run_model import RunModel
from onefold.train.run.sampling import share
from onefold.train.run.saved import checkpoints_of, saved_steps
from onefold.train.run.schedule import learning_rate
from onefold.train.run.settings import Settings
from onefold.train.run.stop import Stop

Batch: TypeAlias = "tuple[Tensor, Tensor]"
LABEL = Label("train", "a step")
TRACKED_STEP = 2  # the step of this process whose memory is tracked: the first one learns the schedules


class Place(NamedTuple):
    """How far a run is: steps done, samples consumed."""

    step: int
    samples: int


class Readers(NamedTuple):
    """The streams of data: ranks of one "tp" or "sequence" group read the same."""

    rank: int
    size: int

    @classmethod
    def of(cls, comms: Comms) -> Readers:
        return cls(comms.everyone.rank // comms.sequence.size, comms.everyone.size // comms.sequence.size)


class Figures(NamedTuple):
    """What a rank tells the others of a logged step."""

    loss: float  # the sum of its micro-batches'
    compute_s: float


class Loop:
    """One rank of a run, from where it is to its end or to a signal."""

    def __init__(
        self,
        settings: Settings,
        made: RunModel,
        optimizer: Optimizer,
        data: Data,
        comm: Comm,
        copies: Resilient | None = None,
    ) -> None:
        self.settings, self.optimizer, self.data, self.comm = settings, optimizer, data, comm
        self.made, self.model, self.shape = made, made.module, made.shape
        self.engine = engine_of(self.model)
        self._readers = Readers.of(self.engine.comms)
        self.batch, self.accumulation = settings.steps.split(self._readers.size)
        self.run_folder = RunFolder(settings.output.out)
        self.warnings = RankWarnings(comm, self.run_folder.warnings)
        self._loss_scales: deque[float] = deque(maxlen=FALLS_IN + 1)
        self._peak: dict[str, int] | None = None
        self._latency_s = latency(comm)
        self._probe = UpdateProbe(self.engine)
        self._flops = flops_per_token(self.shape)
        self._peak_flops = peak_flops(self.engine.device, self.engine.resolved.precision.narrow)
        self._evaluated = data.windows.evaluated(settings.steps.eval_windows)
        self._doing, self._done = "the first step", 0
        self._spent_s, self._timed = 0.0, 0
        self._profile = RunProfile(settings, self.model, comm)
        self._copies = copies  # of the state, in memory
        self._lr_ratios = lr_ratios(settings, optimizer)
        self._pace, self._stragglers = Pace(self.engine, comm), Stragglers()
        self._spikes = optimizer.spikes  # skipped steps that were told

    def run(self, place: Place, stop: Stop, listener: Listener) -> Place:
        """Trains until the last step, or until the step in which a rank was told to stop; returns the place reached."""
        steps = self.settings.steps.steps
        try:
            with self._copies or nullcontext():
                with self._profile:
                    while place.step < steps:
                        place, stopped = self._step(place, stop, listener)
                        if stopped:
                            break
                self._tell_spikes(place.step)
                self.warnings.tell(place.step, listener)
                self._doing = "the last checkpoint"
                finish_saves()
                self._save(place, wait=True)
        except Exception as error:
            if is_out_of_memory(error):
                raise self._out_of_memory() from error
            raise
        return place

    def _step(self, place: Place, stop: Stop, listener: Listener) -> tuple[Place, bool]:
        settings, step = self.settings, place.step + 1
        last = step == settings.steps.steps
        evaluate = last or _due(step, settings.steps.eval_every)
        log = evaluate or _due(step, settings.steps.log_every)
        with self._profile.step():
            flags, figures, norm, lr = self._train(place, stop, log=log)
        self._profile.tell()
        place, stopped = Place(step, place.samples + self.batch), bool(flags[0])
        if log:
            row = self._row(step, figures, self.evaluate() if evaluate else None, float(norm), lr)
            if self.comm.rank == 0:
                append_lines(self.run_folder.metrics, [_finite(row._asdict())])
            listener.row(row)
        listener.stepped(step)
        if flags[1]:
            self.warnings.tell(step, listener)
        if not stopped and not last and _due(step, settings.checkpoints.save_every):
            self._doing = "a checkpoint"
            self._save(place, wait=False)
        if self._copies is not None and not stopped and not last:
            self._doing = "a copy in memory"
            self._copies.step(_extra(place), step=place.step)
        return place, stopped

    # -- a step ------------------------------------------------------------------------------------------------------

    def _train(self, place: Place, stop: Stop, *, log: bool) -> tuple[bytes, list[Figures], Tensor, float]:
        """The timed part of a step; returns two flags (a rank was told to stop, a rank has warnings), all ranks' losses
        and times if they are to be logged, the gradient norm and the learning rate."""
        began = time.perf_counter()
        self._pace.begin(log=log)
        batches = [self._batch(place.samples, micro) for micro in range(self.accumulation)]
        with self._tracked_memory() as tracker:
            if not self.engine.updates.keeps_gradients:
                self._set_learning_rate()  # updates run in backward
            losses = self._forward_backward(batches)
            norm, lr = self._update(place.step + 1, losses, probe=log)
        if tracker is not None:
            self._peak = tracker.peak()
        flags = self.comm.all_reduce_max(bytes([stop.asked, len(self.warnings) > 0]), LABEL)
        self._pace.end()
        figures: list[Figures] = []
        if log:  # reading a loss waits for the device
            figures = self._of_all(float(torch.stack(losses).double().sum()))
        self._spent_s, self._timed = self._spent_s + time.perf_counter() - began, self._timed + 1
        return flags, figures, norm, lr

    def _of_all(self, loss: float) -> list[Figures]:
        """The losses and times of all ranks, in rank order. Collective."""
        mine = struct.pack("<dd", loss, self._pace.mine_s())
        return [Figures(*struct.unpack("<dd", row)) for row in self.comm.all_gather_bytes(mine, LABEL)]

    def _summed(self, mine: float) -> float:
        """The sum over all ranks, in rank order."""
        return sum(struct.unpack("<d", row)[0] for row in self.comm.all_gather_bytes(struct.pack("<d", mine), LABEL))

    def _batch(self, samples: int, micro: int) -> Batch:
        """This rank's inputs and targets of a micro-batch."""
        steps, readers = self.settings.steps, self._readers
        mine = share(samples, ranks=readers.size, rank=readers.rank, micro_batch=steps.micro_batch, micro=micro)
        return self._to_device([self.data.windows.sample(steps.seed, number) for number in mine])

    def _to_device(self, windows: list[int]) -> Batch:
        """The stretch of the windows that this rank computes: all of it unless the mesh cuts sequences."""
        inputs, targets = (self.made.stretch(one) for one in self.data.batch(windows))
        return inputs.to(self.engine.device), targets.to(self.engine.device)

    def _forward_backward(self, batches: list[Batch]) -> list[Tensor]:
        """Forward and backward of each micro-batch; the losses."""
        self._doing, losses = "forward and backward", []
        for micro, (inputs, targets) in enumerate(batches, start=1):
            with nullcontext() if micro == len(batches) else accumulate(self.model, self.settings.zero.reduce):
                loss = self.made.loss(self.model, inputs, targets)
                self.optimizer.backward(loss / len(batches))
            losses.append(loss.detach())
        return losses

    def _update(self, step: int, losses: list[Tensor], *, probe: bool) -> tuple[Tensor, float]:
        self._doing, lr = "the update", self._set_learning_rate()
        self._tell_spikes(step - 1)
        every = self.settings.faults.check_replicas
        if every and (_due(step, every) or _due(step, self.settings.checkpoints.save_every)):
            check_replicas(self.model, self.optimizer)  # before the update, which sends some parameters anew
        norm = torch.tensor(math.nan)
        try:
            if self.engine.updates.keeps_gradients:
                norm = self.optimizer.clip_grad_norm(self.settings.adam.clip or math.inf)
            if probe:
                self._probe.before()
            self.optimizer.step()
        except PrecisionError as error:
            loss = ", ".join(f"{float(one):g}" for one in losses)
            raise PrecisionError(
                f"step {step}: the loss here was {loss}, and {_lower(error)}. Lower --lr or lengthen --warmup"
            ) from error
        if probe and self.optimizer.stepped and lr > 0:
            self.warnings.add_finding(lost_updates(*self._probe.after(), lr))
        self.optimizer.zero_grad()
        self._loss_scales.append(self.optimizer.loss_scale)
        self._done += 1
        return norm, lr

    def _set_learning_rate(self) -> float:
        """Sets the learning rate of this step in all param groups, and returns AdamW's."""
        adam, steps = self.settings.adam, self.settings.steps.steps
        warmup = adam.warmup_steps(steps)
        lr = learning_rate(self.optimizer.steps, steps=steps, warmup=warmup, lr=adam.lr, min_lr=adam.min_lr)
        for group, ratio in zip(self.optimizer.param_groups, self._lr_ratios, strict=True):
            group["lr"] = lr * ratio
        return lr

    def _tell_spikes(self, step: int) -> None:
        """Adds a warning, on rank 0 alone, if the last step was skipped and nobody has been told."""
        if self.optimizer.spikes > self._spikes:
            self._spikes = self.optimizer.spikes
            if self.comm.rank == 0:
                self.warnings.add("spike", f"step {step} was skipped: {self.optimizer.why_skipped}")

    def _tracked_memory(self) -> AbstractContextManager[Any]:
        """Tracks every tensor of one step on a CPU, where no allocator reports the peak."""
        wanted = self._done == TRACKED_STEP - 1 and self.engine.device.type == "cpu"
        return track_memory(self.model) if wanted else nullcontext()

    # -- metrics and checkpoints ---------------------------------------------------------------------------------------

    def _row(self, step: int, figures: list[Figures], val_loss: float | None, norm: float, lr: float) -> Row:
        loss = sum(one.loss for one in figures) / (self.accumulation * self.comm.size)
        times_s = [one.compute_s for one in figures]
        self._tell_spikes(step)
        for what, found in (("loss", loss), ("validation loss", val_loss)):
            may_be_skipped = what == "loss" and self.settings.faults.skip_spikes
            if found is not None and not math.isfinite(found) and not may_be_skipped:
                raise PrecisionError(f"step {step}: the {what} is {found:g}; lower --lr, or lengthen --warmup")
        step_s, self._spent_s, self._timed = self._spent_s / self._timed, 0.0, 0
        sent, calls = traffic_now(self.model)
        speed = self.batch * self.shape.seq / step_s
        half = self.optimizer.precision.compute is torch.float16
        self._diagnose(calls, step_s, times_s)
        peak = None if self._peak_flops is None else self._peak_flops * self.comm.size
        return Row(
            step=step,
            loss=loss,
            val_loss=val_loss,
            val_ppl=None if val_loss is None else perplexity(val_loss),
            grad_norm=norm,
            lr=lr,
            tokens_per_s=speed,
            step_s=step_s,
            mfu=None if peak is None else speed * self._flops / peak,
            memory=memory_now(self.model, self._peak),
            traffic_bytes=sum(sent.values()),
            traffic=sent,
            loss_scale=self.optimizer.loss_scale if half else None,
            skipped=self.optimizer.skipped,
            time=round(time.time(), 3),
            **compute(times_s)._asdict(),
        )

    def _diagnose(self, calls: int, step_s: float, times_s: list[float]) -> None:
        """Adds findings on rank 0 alone, since all ranks have the same figures."""
        if self.comm.rank == 0:
            self.warnings.add_finding(falling_scale(list(self._loss_scales)))
            if self._done > TRACKED_STEP:
                self.warnings.add_finding(self._stragglers.found(times_s))
                blocks = [unit for unit in self.engine.units if unit.layout.slots[0].name.startswith("blocks.")]
                cut = len(blocks) > self.shape.layers
                self.warnings.add_finding(small_messages(calls, self._latency_s, step_s, cut=cut))

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the validation windows; the same number on all ranks. Collective."""
        self._doing = "evaluation"
        size, readers = self.settings.steps.micro_batch, self._readers
        total, count = 0.0, len(self._evaluated)
        for first in range(0, count, size * readers.size):  # as many forwards on every rank; some repeat a window
            mine = self._evaluated[first + readers.rank * size :][:size]
            mine = mine if first + readers.rank * size < count else []
            inputs, targets = self._to_device(mine or self._evaluated[:1])
            total += float(self.made.loss(self.model, inputs, targets)) * len(mine)
        return self._summed(total) / (self.comm.size // readers.size) / count

    def _save(self, place: Place, *, wait: bool) -> None:
        done = saved_steps(self.settings) if self.comm.rank == 0 else []
        saved = self.comm.all_gather_bytes(bytes([place.step in done]), LABEL)
        if not saved[0][0]:  # else a run was resumed at its last step, which is saved
            keep = self.settings.checkpoints.keep or None
            path = checkpoints_of(self.settings)
            save(path, self.model, self.optimizer, extra=_extra(place), step=place.step, keep=keep, wait=wait)

    def _out_of_memory(self) -> Exception:
        sizes: dict[str, int] = {}
        try:
            now = memory(self.model)
            sizes = {name: getattr(now, name).measured for name in ("parameters", "gradients", "optimizer")}
            sizes |= {"buffers": now.buffers.measured, "communication": now.communication.measured}
            sizes["activations"] = max(0, in_use(self.engine.device) - now.total)
        except MemoryError:
            pass  # not even the report could be made
        stage = self.engine.resolved.settings.stage
        return out_of_memory(
            sizes, where=self._doing, stage=stage if isinstance(stage, int) else 0,
            micro_batch=self.settings.steps.micro_batch,
        )  # fmt: skip


def _extra(place: Place) -> dict[str, Any]:
    """What is saved with the state."""
    return {"step": place.step, "samples": place.samples}


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Replaces infinity, the norm of a skipped fp16 step, by null: JSON has none."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _lower(error: Exception) -> str:
    text = str(error).split("; nothing was updated")[0]
    return text[:1].lower() + text[1:]
