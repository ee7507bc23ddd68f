"""A run of 80 steps that tests disturb, and the same run undisturbed, to compare with."""

from pathlib import Path

from onefold.checkpoint.format.folder import committed
from onefold.checkpoint.format.storage import Storage
from onefold.train.run.metrics import Listener, Row
from onefold.train.run.settings import Settings
from onefold.train.run.start import Ended, train
from onefold.train.run.stop import Stop
from tests.harness import tell
from tests.train.launched import curve
from tests.train.pooled import trained

STEPS = 80
SETTINGS = {
    "steps": {"steps": STEPS, "eval_every": 25},
    "checkpoints": {"save_every": 5, "max_restarts": 0},
}
GOING_ON = {**SETTINGS, "checkpoints": {"save_every": 5, "resume": True}}


def undisturbed_curve(out: Path) -> dict:
    """The losses of a run that nobody interrupts, by step."""
    trained(2, out, **SETTINGS)
    assert len(curve(out)) == STEPS
    return curve(out)


def same_so_far(out: Path, whole: dict) -> int:
    """Every step that is written down is as in the undisturbed run; the last one."""
    found = curve(out)
    assert list(found) == list(range(1, len(found) + 1)), "a step is missing"
    assert all(found[step] == whole[step] for step in found)
    return len(found)


def last_commit(out: Path) -> int:
    folder = out / "checkpoints"
    return max(committed(Storage(), folder), default=0) if folder.exists() else 0


class Teller(Listener):
    def row(self, row: Row) -> None:
        tell(row.step)


def listening_rank(settings: Settings) -> Ended:
    return train(settings, Stop(), Teller())
