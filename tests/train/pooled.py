"""A run on warm ranks: the loop itself, without a launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onefold.train.run.metrics import Listener
from onefold.train.run.settings import Settings
from onefold.train.run.start import Ended, train
from onefold.train.run.stop import Stop
from onefold.train.run.toml import to_toml, with_values
from tests.harness import run_ranks

SMALL: dict[str, Any] = {
    "plan": False,  # a rehearsal takes a second, as long as the run itself
    "model": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16},
    "steps": {"steps": 12, "log_every": 1, "eval_every": 5, "eval_windows": 4, "micro_batch": 2},
    "adam": {"warmup": 3},
    "checkpoints": {"save_every": 5},
}


def settings_of(out: Path, **groups: Any) -> Settings:
    """The small run, with some settings of some groups changed."""
    small = with_values(Settings(), SMALL, "small")
    cache = str(out.parent.parent / "cache")
    return with_values(
        with_values(small, groups, "test"), {"output": {"out": str(out)}, "data": {"cache": cache}}, "test"
    )


def one_rank(settings: Settings) -> Ended:
    return train(settings, Stop(), Listener())


def trained(ranks: int, out: Path, timeout_s: float = 120, **groups: Any) -> Ended:
    settings = settings_of(out, **groups)
    settings.check(ranks)
    ended = run_ranks(ranks, one_rank, settings, timeout_s=timeout_s)
    assert len(set(ended)) == 1
    return ended[0]


def config_file(out: Path, **groups: Any) -> Path:
    """The same settings for a launch."""
    path = out.with_suffix(".toml")
    path.write_text(to_toml(settings_of(out, **groups), leave_out=("out",)))
    return path
