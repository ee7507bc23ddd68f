"""The folder of a run: what is in it, and who may read it.

    config.toml     the settings as they were given, but for out and ranks: `onefold train --config run/config.toml
                    --out other --ranks N` repeats the run
    facts.json      what was decided and planned, and where it ran; written once, before the first step
        model       {name, layers, hidden, heads, seq, vocab, positions, parameters, class}; weights, with --weights
        ranks, stage, stage_why, precision, device ("cpu" or the GPU's name)
        global_batch, micro_batch, accumulation, tokens_per_step, eval_windows, seed
        environment {onefold, torch, python, platform, cores, gpu, date}
        placement   [{unit, elements, optimizer, gradients, parameters, parameter_bytes}, …]
        plan        {memory: {category: bytes}, peak_bytes, traffic: {purpose: bytes}}
        baseline    {bigram_val_loss}
        data        {source, left_out, train_tokens, val_tokens, val_fraction, tokenizer, digest, tokenizer_sha256,
                    tokens_sha256, replaced: [{digest, at_step}, …], what it was before --accept-changed-data}
    data.json       {digest, tokenizer_sha256, tokens_sha256, files: [{path, bytes, sha256}, …]}, paths after --data
    metrics.jsonl   one object per logged step
        step, loss, val_loss and val_ppl (null unless it was evaluated), grad_norm, lr, tokens_per_s, step_s,
        mfu (null where the peak is unknown), memory {category: bytes, "peak": bytes or null},
        traffic_bytes, traffic {purpose: bytes}, loss_scale (null but for fp16), skipped (steps so far),
        time (seconds since 1970)
    samples.jsonl   {step, prompt, text}: what `onefold report --sample` let the model write
    warnings.jsonl  {step, rank, kind, message}
    checkpoints/    step-…, as onefold.save makes them
    pretrained/     with --weights: config.json and tokenizer of that folder, for `onefold export`
    profile/        with --profile: rank….json.gz, Chrome traces, and where a step went: summary.txt, summary.json
        [{rank, ranks, device, steps: [{wall_ns, parts_ns {part: ns}, exposed_ns {unit: {what: ns}}, beside_ns,
          gathered_bytes, reduced_bytes}, …]}, …], one for each rank
    report.html     and pictures beside it
    stage-0/ …      with --compare: each a run folder of its own
    .lock           who runs in it; not there otherwise, unless that process was killed

Lines are appended by rank 0 and are whole once they end in a newline: a torn last line is not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from onefold.checkpoint.format.address import local
from onefold.errors import ConfigError, OnefoldError

STAGE_FOLDER = "stage-{}"
STAGES = "0123"
SUMMARY = "summary.json"  # of a profile
COMPARES = b"compare = "  # how the settings of a comparison begin
LOCK = ".lock"


class RunFolder(NamedTuple):
    """Where the parts of a run are.

    >>> RunFolder(Path("run")).metrics.name
    'metrics.jsonl'
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def facts(self) -> Path:
        return self.path / "facts.json"

    @property
    def data(self) -> Path:
        return self.path / "data.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def warnings(self) -> Path:
        return self.path / "warnings.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def pretrained(self) -> Path:
        return self.path / "pretrained"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def stages(self) -> list[RunFolder]:
        """The runs of a comparison, in order; none if it is a single run."""
        found = sorted(self.path.glob(STAGE_FOLDER.format("*")))
        return [RunFolder(path) for path in found if RunFolder(path).facts.exists()]


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, or of a comparison of several."""
    folder = RunFolder(path)
    single = folder.facts.exists() and folder.config.exists()
    return single or is_comparison(path) or bool(folder.stages)


def is_comparison(path: Path) -> bool:
    """Whether the runs of a comparison are in the folder; their facts are in folders of their own."""
    try:
        with RunFolder(path).config.open("rb") as file:
            return file.read(len(COMPARES)) == COMPARES
    except OSError:
        return False


def is_stage(path: Path) -> bool:
    """Whether a folder has the name of a stage of a comparison."""
    return path.name in map(STAGE_FOLDER.format, STAGES)


def make_folder(out: Path) -> None:
    """The folder of a run, if it is not there; raises if it cannot be one."""
    local(out, "--out (for checkpoints there is --store)")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}; give another folder") from error


def write_facts(run: Path, facts: dict[str, Any]) -> None:
    replace(RunFolder(run).facts, json.dumps(facts, indent=1) + "\n")


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with writing(path), path.open("a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows))


def replace(path: Path, text: str) -> None:
    """The whole file, or what was there before."""
    draft = path.with_name(f".{path.name}.writing")
    with writing(path):
        with draft.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk refuses, in our words."""
    try:
        yield
    except OSError as error:
        raise OnefoldError(f"{path} cannot be written: {error.strerror}; free space, or give another --out") from error
