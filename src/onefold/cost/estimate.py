"""The cost of one choice: bytes by category on device, host and disk, messages, and seconds."""

from __future__ import annotations

from functools import cached_property

from onefold.cost.case import Case
from onefold.cost.memory import Memory
from onefold.cost.messages import Messages
from onefold.cost.step_time import StepTime
from onefold.cost.text import format_bytes
from onefold.errors import ConfigError

SURE = 0.9  # of the planned peak: the formula may be above what a run takes, by less than this


class Estimate(Case):
    """A case with what it costs on one rank: its memory, its messages and its time, each found when first asked for."""

    @cached_property
    def memory(self) -> Memory:
        return Memory(self)

    @cached_property
    def messages(self) -> Messages:
        return Messages(self)

    @cached_property
    def time(self) -> StepTime:
        return StepTime(self, self.messages)

    # -- what choices are ranked by ----------------------------------------------------------------------------------

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @property
    def step_s(self) -> float:
        return self.time.step.total

    @property
    def tokens_per_s(self) -> float:
        return self.samples_per_step * self.work.tokens_per_sample / self.step_s if self.step_s else 0.0

    @property
    def mfu(self) -> float:
        """The share of the device's peak flop rate for this dtype that the model's own flops reach: 6 for each weight
        and token, and 12 × layers × width of the queries × length for each token, as PaLM (appendix B) and nanoGPT
        count. So attention counts in full, also where it is causal, and nothing that is computed again counts."""
        flops = self.work.flops(self.batch, "keep", self.grid) * self.micro_batches
        return flops / self.step_s / self.hardware.peak_flops(self.work.widths.compute) if self.step_s else 0.0


def refuse_unfit(found: Estimate, otherwise: str = "") -> None:
    """Raises where a run that is about to start cannot fit, with what is left to try; `otherwise` is said last."""
    peak, there = found.peak_bytes, found.hardware.memory_bytes
    if SURE * peak > there:
        states = format_bytes(found.memory.persistent_states.total)
        raise ConfigError(
            f"{found.choice} does not fit: the plan for {found.work.parameters:,} parameters on {found.grid.ranks} "
            f"ranks is {format_bytes(peak)} on each at the peak ({states} of states), and {format_bytes(there)} are "
            f"there; use {', '.join(_remedies(found))}{otherwise}"
        )


def _remedies(found: Estimate) -> list[str]:
    """What may make a run fit, as flags or in words; without what it has already."""
    choice = found.choice
    remedies = ["more ranks", "a smaller model" + " or batch" * (found.batch > 1)]
    remedies += ["--stage 3"] * (choice.stage < 3)
    remedies += ["--activations checkpoint"] * (choice.activations == "keep")
    return remedies + ["--offload host"] * (choice.optimizer == "device")
