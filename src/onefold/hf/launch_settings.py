"""The command line of `python -m onefold.hf`: Onefold's options, then the script, whose arguments are its own.

Settings come from --zero (a TOML file of fields of `onefold.Zero`, or a DeepSpeed configuration) and from the options,
which go before the file. What neither says is the Trainer's: precision follows its bf16 and fp16 flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from onefold import ConfigError, DeepSpeedConfig, Offload, OnefoldError, Precision, Zero, from_deepspeed
from onefold.train.run.axes import parse_axes
from onefold.train.run.toml import read_toml

DESCRIPTION = """\
Run a script that uses transformers' Trainer, or a subclass, under Onefold: with torchrun or accelerate launch,
  torchrun --nproc-per-node 2 -m onefold.hf --stage 3 script.py [the script's own arguments]
"""
IN_PYTHON = {"init", "mesh", "units"}  # fields of Zero that no file can hold
AXES = ("replica", "shard", "sequence")
TABLES: dict[str, Callable[..., Any]] = {"offload": Offload, "precision": Precision}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What `python -m onefold.hf` was asked to do."""

    zero: Zero
    deepspeed: DeepSpeedConfig | None
    """The file of --zero, if it is a DeepSpeed configuration."""

    tile_loss: int | None
    """How many tokens a tile of the loss has, if the loss is to be tiled."""

    axes: dict[str, int] | None
    """Those of the mesh, which is made when ranks have met; None: state is sharded over all ranks."""

    script: str
    """The path of a script, or the name of a module."""

    module: bool
    arguments: tuple[str, ...]
    """The script's own."""


class Parser(argparse.ArgumentParser):
    """Errors are ConfigErrors, of one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m onefold.hf --help")


def parse(words: Sequence[str]) -> Launch:
    """Reads the command line and the file of --zero; raises a ConfigError for every mistake in them."""
    parser = Parser(
        prog="python -m onefold.hf", description=DESCRIPTION, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--stage", help="ZeRO stage 0, 1, 2 or 3, or auto; 2 unless the file of --zero says another")
    parser.add_argument("--offload", help="host or auto: keep the optimizer state, and update, in host memory")
    parser.add_argument("--mesh", help="axes and sizes, such as shard=2,sequence=2 or replica=2,shard=*")
    parser.add_argument(
        "--tile-loss", type=int, metavar="TOKENS", help="compute the loss over tiles of so many tokens, without logits"
    )
    parser.add_argument(
        "--zero", type=Path, help="a TOML file of settings of onefold.Zero, or a DeepSpeed ds_config.json"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script, and its own arguments")
    found = parser.parse_args(words)
    run = found.module if found.module is not None else found.script
    if not run:
        raise ConfigError("no script was given; use for example: torchrun -m onefold.hf --stage 3 script.py")
    if found.module is None and not Path(run[0]).is_file():
        raise ConfigError(f"{run[0]} is no file; give a Python script, or -m and the name of a module")
    zero, deepspeed = _settings(found.zero, _options(found))
    if found.tile_loss is not None and found.tile_loss < 1:
        raise ConfigError(f"--tile-loss {found.tile_loss}: a tile has at least one token; give a number from 1 on")
    return Launch(
        zero=zero, deepspeed=deepspeed, tile_loss=found.tile_loss, script=run[0], module=found.module is not None,
        axes=None if found.mesh is None else parse_axes(found.mesh, AXES), arguments=tuple(run[1:]),
    )  # fmt: skip


def _options(found: argparse.Namespace) -> dict[str, Any]:
    """The fields of Zero that were given as options."""
    options: dict[str, Any] = {}
    if found.stage is not None:
        options["stage"] = int(found.stage) if found.stage.isdecimal() else found.stage
    if found.offload is not None:
        options["offload"] = found.offload
    return options


def _settings(path: Path | None, options: dict[str, Any]) -> tuple[Zero, DeepSpeedConfig | None]:
    if path is None:
        return Zero(**options), None
    if not path.exists():
        raise ConfigError(f"--zero {path} is not there; give a TOML file of settings, or a DeepSpeed configuration")
    try:
        if path.suffix == ".json":
            deepspeed = from_deepspeed(path, **options)
            return deepspeed.zero, deepspeed
        return Zero(**{**_fields(read_toml(path)), **options}), None
    except OnefoldError as error:
        raise ConfigError(f"--zero {path}: {str(error).removeprefix('--config: ')}") from error
    except TypeError as error:  # an unknown setting of a table
        raise ConfigError(f"--zero {path}: {error}") from error


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of Zero in a TOML file, at its top or in a table [zero]; [offload] and [precision] may be tables."""
    if set(values) == {"zero"} and isinstance(values["zero"], dict):
        values = values["zero"]
    known = {field.name for field in fields(Zero)} - IN_PYTHON
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    made = {name: TABLES[name](**value) if _is_table(name, value) else value for name, value in values.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in made.items()}


def _is_table(name: str, value: object) -> bool:
    return name in TABLES and isinstance(value, dict)
