"""`onefold train`: from text to a trained model, on local processes of its own or as torchrun's.

1 Read and check the settings. 2 Start the ranks, unless this process is one. 3 A rank trains, and sends its errors to
the launcher, which prints the first cause. 4 At the end, write a report.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.format.folder import step_name
from onefold.checkpoint.memory.places import copies_folder, remove_copies
from onefold.cli.launch import Launch, Launcher, is_rank, onefold_command, remark, report_and_exit, say
from onefold.cli.lifeline import FINISHED, PREPARING, TRAINING, Lifeline
from onefold.cli.ranks import private_file
from onefold.cli.screen import Screen
from onefold.cli.verdict import Outcome
from onefold.comm.shutdown import shutdown
from onefold.cost.hardware import Hardware
from onefold.cost.machine import here
from onefold.cost.run_summary import run_summary
from onefold.cost.shapes import Shape
from onefold.errors import CheckpointError, ConfigError, OnefoldError
from onefold.offload.files import check_folder as check_disk
from onefold.train.run.clean import clean_up
from onefold.train.run.data import prepare
from onefold.train.run.fits import check_fits, on_host
from onefold.train.run.folder import RunFolder, replace
from onefold.train.run.lock import LAUNCHED, RunLock
from onefold.train.run.logs import Logged, check_logs
from onefold.train.run.metrics import Listener
from onefold.train.run.pretrained import fine_tuned
from onefold.train.run.records import read_facts, read_metrics, read_profile
from onefold.train.run.run_model import Maker
from onefold.train.run.same import check_resumable, check_same
from onefold.train.run.saved import checkpoints_of, saved_steps
from onefold.train.run.settings import Settings
from onefold.train.run.source import find_source
from onefold.train.run.start import check_folder, train
from onefold.train.run.stop import Stop
from onefold.train.run.tokenizer import find_tokenizer
from onefold.train.run.toml import NOT_SAVED, read_toml, to_toml, with_values

NO_ADVICE = ("ConfigError", "CheckpointError", "CheckpointDamaged")  # errors that a resumed run would meet again


@dataclass(frozen=True, kw_only=True)
class TrainCommand(Settings):
    """Train a GPT, or fine-tune a model of Hugging Face. Try: onefold train --steps 200"""

    config: Path | None = None
    """A TOML file of settings, such as the config.toml of a run; flags override it."""

    json: bool = False
    """Print nothing while the run trains, and its last row of metrics as JSON at the end."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> TrainCommand:
        """The settings that flags override: those of --config, of the run that is resumed, or the defaults."""
        path, values = _flag(arguments, "--config"), dict[str, Any]()
        if path is None and {"--resume", "--resume-or-start"} & set(arguments):
            known = RunFolder(Path(_flag(arguments, "--out") or cls().output.out)).config
            path = str(known) if os.path.lexists(known) else None
        if path is not None:
            values = _without_overridden(read_toml(Path(path)), arguments)
        in_file = values.get("model")
        weights = _flag(arguments, "--weights") or (in_file.get("weights") if isinstance(in_file, dict) else None)
        usual = cls() if not isinstance(weights, str) else with_values(cls(), fine_tuned(Path(weights)), "--weights")
        return usual if path is None else with_values(usual, values, path)

    def run(self) -> int:
        ranks = self.count()
        self.check(ranks)
        self._check_packages()
        if self.checkpoints.elastic is not None and self.steps.global_batch is None:
            steps = dataclasses.replace(self.steps, global_batch=self.elastic_batch(), accumulation=None)
            return dataclasses.replace(self, steps=steps).run()  # the same batch at any number of ranks
        if LAUNCHED not in os.environ:  # else the launcher did
            check_resumable(self)
        if is_rank():
            return self._as_rank()
        shape = self._check_data()
        if self.plan and not torch.cuda.device_count():  # else ranks ask: this process is to load no driver
            for count in dict.fromkeys([ranks, *self.elastic_ranks()[:1]]):
                self._check_fits(shape, count, on_host(count), tells=count == ranks)
        with ExitStack() as locks:
            for folder in dict.fromkeys([self.output.out, *(run.output.out for run in self.stages())]):
                locks.enter_context(RunLock(folder))
            self._check_run(shape)
            return self._launch(ranks)

    def count(self) -> int:
        """The number of ranks."""
        if not is_rank():
            bounds = self.checkpoints.bounds
            return self.ranks or (bounds.most if bounds else torch.cuda.device_count() or 2)
        found = int(os.environ.get("WORLD_SIZE", "1"))
        if self.ranks not in (None, found):
            raise ConfigError(f"--ranks {self.ranks}, but torchrun started {found}; leave --ranks out")
        return found

    def _check_data(self) -> Shape:
        """Raises, before ranks are started, for mistakes that every rank would find; returns the model's shape."""
        source = find_source(self.data, self.output.out)
        known = [file.vocab or 1 for file in source.tokens]
        vocab = max(known) if known else find_tokenizer(self.data.tokenizer).vocab
        shape = self.model.shape(vocab)
        shape.check(self.zero.axes(self.count()).get("tp", 1), pp=1)
        if self.zero.offload_path is not None:
            check_disk(self.zero.offload_path, 0)
        return shape

    def _check_packages(self) -> None:
        """Raises, before anything is started, for packages that the run needs and that are not installed."""
        if int(os.environ.get("RANK", "0")) == 0:  # no other rank logs
            check_logs(self.output.logs)
        start = self.model.start()
        if start is not None and not start.built_in and find_spec("transformers") is None:
            raise ConfigError(
                f"--weights {start.folder} is a {start.kind!r}, which is trained by transformers: pip install "
                f"'onefold[hf]'"
            )

    def _check_fits(self, shape: Shape, ranks: int, machine: Hardware, *, tells: bool = True) -> None:
        """Raises for a run that cannot fit; says on a terminal what is planned, if it `tells`."""
        for run in self.stages():
            found = check_fits(run, shape, ranks, machine)
            for sentence in run_summary(found) if found is not None and tells and not self.json else ():
                remark(sentence)

    def _check_fits_on_rank(self) -> None:
        """Asks the plan on a rank, where no launcher could: on GPUs, and under torchrun. Every rank asks with a
        vocabulary of 1, as nobody has read the data; on a terminal rank 0 looks the vocabulary up and says the plan."""
        if torch.cuda.is_available():
            machine = here(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()))
        elif LAUNCHED not in os.environ:
            machine = on_host(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        else:
            return
        ranks = int(os.environ["WORLD_SIZE"])
        for run in self.stages():
            check_fits(run, self.model.shape(1), ranks, machine)
        if int(os.environ["RANK"]) == 0 and sys.stderr.isatty():
            shape = None
            with suppress(OnefoldError):  # a mistake in the data is found by all ranks together, later
                shape = self._check_data()
            if shape is not None:
                self._check_fits(shape, ranks, machine)

    def _check_run(self, shape: Shape) -> None:
        """Checks --out, and that a resumed run has the same settings and data; reads the data once."""
        check_folder(self)
        if not self.json:
            remark("reading the data, then starting the ranks …")
        prepared = prepare(self.data, self.output.out)
        for run in self.stages() if self.checkpoints.may_resume else ():
            check_same(run, prepared.digests, shape, vocab_known=prepared.entry is not None)

    # -- the launcher ------------------------------------------------------------------------------------------------

    def _launch(self, ranks: int) -> int:
        elastic = self.checkpoints.elastic is not None
        with private_file(to_toml(self, leave_out=("config", *["ranks"] * elastic))) as path:
            if self.compare is not None:  # so that --resume knows it for a comparison
                self.output.out.mkdir(parents=True, exist_ok=True)
                replace(RunFolder(self.output.out).config, to_toml(self, leave_out=NOT_SAVED))
            launch = Launch(
                ranks=ranks, command=onefold_command("train", "--config", path), files=[path],
                max_restarts=self.checkpoints.max_restarts, timeout_s=self.checkpoints.timeout_s,
                shutdown_s=self.checkpoints.shutdown_s, elastic=self.elastic_ranks(),
            )  # fmt: skip
            outcome = Outcome(1)
            try:
                outcome = Launcher(launch).run()
            finally:  # also where the launcher itself fails
                if elastic:
                    remove_copies(copies_folder(checkpoints_of(self).absolute()))
                for run in self.stages() if not outcome.good else ():
                    clean_up(RunFolder(run.output.out))
        if outcome.good:
            try:
                self._finish(outcome.signals)
            except KeyboardInterrupt:
                out = shlex.quote(str(self.output.out))
                say(f"the training is done and saved; for its report: onefold report {out}")
                raise
            return 0
        say(outcome.message + self._how_to_resume(outcome))
        return outcome.code

    def _how_to_resume(self, outcome: Outcome) -> str:
        """How to resume, if a checkpoint was saved and the error is not about checkpoints or settings."""
        if outcome.kind in NO_ADVICE:
            return ""
        saved = self._saved()
        return f" (to go on from {step_name(max(saved))}: {self._resume()})" if saved else ""

    def _saved(self) -> list[int]:
        """The steps of which there is a checkpoint."""
        try:
            return [step for run in self.stages() for step in saved_steps(run)]
        except CheckpointError:
            return []  # a store that does not answer; what went wrong is said already

    def _resume(self) -> str:
        """The command that resumes this run."""
        ranks = f" --ranks {self.count()}" if not is_rank() and self.checkpoints.elastic is None else ""
        return f"onefold train --resume --out {shlex.quote(str(self.output.out))}{ranks}"

    def _finish(self, signals: Sequence[str] = ()) -> None:
        """Prints the results and writes the report."""
        out = self.output.out
        finished = [_last(run) for run in self.stages()]
        if not all(finished):
            why = f" ({', '.join(signals)})" if signals else ""
            say(f"stopped and saved{why}; to go on: {self._resume()}")
            return
        if not self.json:
            remark("writing the report …")  # drawing its charts takes seconds
        written = _report(out, comparison=self.compare is not None)
        if self.json:
            finished = [(row or {}) | _profiled(run) for run, row in zip(self.stages(), finished, strict=True)]
            figures = {run.output.out.name: row for run, row in zip(self.stages(), finished, strict=True)}
            text = json.dumps(figures if self.compare else finished[0], indent=1)
            sys.stdout.write(text + "\n")
            return
        for run, row in zip(self.stages(), finished, strict=True):
            sys.stdout.write(_verdict(run.output.out, row or {}) + "\n" + _profile(run))
        sys.stdout.write(f"{written}\n" if written else "")

    # -- a rank ------------------------------------------------------------------------------------------------------

    def _as_rank(self) -> int:
        if self.checkpoints.elastic is not None and LAUNCHED not in os.environ and not self.checkpoints.may_resume:
            raise ConfigError(
                "--elastic under torchrun starts the same command again after ranks were lost; add --resume-or-start"
            )
        stop = Stop(
            lambda name: line.say({"signal": name}), lambda: line.say({"phase": TRAINING}),
            limit_s=self.checkpoints.shutdown_s, on_late=lambda name: report_and_exit(line, self._late(name)),
        )  # fmt: skip
        line = Lifeline(stop.ask)
        try:
            self._train(stop, line)
        except Exception as error:
            report_and_exit(line, error)
        shutdown()
        if not line.launched and int(os.environ["RANK"]) == 0:
            self._finish()
        return 0

    def _late(self, signal_name: str) -> OnefoldError:
        """What a rank says that was told to stop and could not save in time."""
        saved = self._saved()
        last = f"the last checkpoint is {step_name(max(saved))}" if saved else "there is no checkpoint"
        return OnefoldError(
            f"not saved: {self.checkpoints.shutdown_s:g} s after {signal_name} (--shutdown-s) the step in hand was not "
            f"finished and saved; {last}"
        )

    def _train(self, stop: Stop, line: Lifeline) -> None:
        """Trains every stage, until the end or a signal."""
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        again = restarted or self.checkpoints.resume
        settings = dataclasses.replace(self, checkpoints=dataclasses.replace(self.checkpoints, resume=again))
        if self.plan:
            settings._check_fits_on_rank()
        for run in settings.stages():
            check_folder(run)
        for run in settings.stages():
            line.say({"phase": PREPARING})
            if not train(run, stop, self._listener(run), _maker(run)).finished:
                break
            gc.collect()  # a sharded model is a reference cycle
        line.say({"phase": FINISHED})

    def _listener(self, run: Settings) -> Listener:
        if int(os.environ["RANK"]) != 0:
            return Listener()
        screen = Listener() if self.json else Screen(run.steps.steps)
        return Logged(run.output.out, self.output.logs, screen) if self.output.logs else screen


def _maker(run: Settings) -> Maker | None:
    """What makes a model of transformers, if the run trains one."""
    start = run.model.start()
    if start is None or start.built_in:
        return None
    from onefold.train.run.transformers_model import make_model  # transformers takes seconds to load

    return make_model


def _flag(arguments: Sequence[str], name: str) -> str | None:
    """The value of a flag, before anything is parsed."""
    for index, text in enumerate(arguments):
        if text == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if text.startswith(name + "="):
            return text.removeprefix(name + "=")
    return None


def _without_overridden(values: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Drops a file's accumulation if --global-batch is given, and the other way round."""
    steps = values.get("steps")
    if isinstance(steps, dict):
        if _flag(arguments, "--accumulation") is not None:
            steps.pop("global_batch", None)
        if _flag(arguments, "--global-batch") is not None:
            steps.pop("accumulation", None)
    return values


def _last(run: Settings) -> dict[str, Any] | None:
    """The last row of metrics of a finished run; None if it is not finished."""
    rows = read_metrics(run.output.out)
    return rows[-1] if rows and rows[-1]["step"] == run.steps.steps else None


def _verdict(out: Path, row: dict[str, Any]) -> str:
    base = read_facts(out)["baseline"]["bigram_val_loss"]
    text = f"{out}: validation loss {row['val_loss']:.4f}, perplexity {row['val_ppl']:.2f}"
    if base is not None:
        text += f"; a bigram table has {base:.4f}: {'beaten' if row['val_loss'] < base else 'not beaten'}"
    return text


def _profile(run: Settings) -> str:
    """The summary of the profile, with --profile."""
    folder = RunFolder(run.output.out).profile
    if not run.output.profile:
        return ""
    if not (folder / "summary.txt").exists():
        return "no profile: the run ended before a step was recorded\n"
    return (folder / "summary.txt").read_text() + f"{folder}/rank….json.gz, for chrome://tracing or ui.perfetto.dev\n"


def _profiled(run: Settings) -> dict[str, Any]:
    """The profile as a dict for JSON, with --profile."""
    return {"profile": [one.as_dict() for one in read_profile(run.output.out)]} if run.output.profile else {}


def _report(out: Path, *, comparison: bool) -> Path | None:
    try:
        from onefold.train.report.report import write_comparison, write_report

        return write_comparison(out) if comparison else write_report(out)
    except ImportError:
        say("no report: it needs one more package: pip install 'onefold[report]'")
    except OnefoldError as error:
        say(f"no report: {error}")
    return None
