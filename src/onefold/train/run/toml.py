"""Settings as a TOML file, and back: a group is a table, a field is a key."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from onefold.errors import ConfigError, OnefoldError
from onefold.settings.limited import read_text

T = TypeVar("T")
TOML_BYTES_LIMIT = 1 << 20
NOT_SAVED = (  # where a run is, on how many ranks, and how it was started, is not what it does
    "out", "resume", "resume_or_start", "accept_changed_data", "config", "json", "plan", "ranks",
)  # fmt: skip


def to_toml(settings: Any, leave_out: tuple[str, ...] = ()) -> str:
    """All fields but those without a value, and those to be left out."""
    lines, tables = [], []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            tables.append(f"\n[{field.name}]\n{to_toml(value, leave_out)}")
        elif value is not None and field.name not in leave_out:
            lines.append(f"{field.name} = {_text(value)}\n")
    return "".join(lines + tables)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # TOML knows inf and nan, and so much as 1e-05
    if isinstance(value, int):
        return str(value)
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{str(value)!r} holds bytes that are no UTF-8, and settings are text; rename it") from error
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # the one that JSON leaves bare


def read_toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ConfigError("reading TOML on Python 3.10 needs one more package: pip install tomli") from error
    try:
        return tomllib.loads(read_text(path, TOML_BYTES_LIMIT))
    except FileNotFoundError as error:
        raise ConfigError(
            f"--config {path} is not there; give a TOML file, such as the config.toml of a run"
        ) from error
    except OnefoldError as error:  # it names the file
        raise ConfigError(f"--config: {error}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"--config {path} cannot be read: it is nested too deeply") from error


def with_values(settings: T, values: dict[str, Any], where: str) -> T:
    """The same settings with other values; a key that is none of theirs raises."""
    fields = {field.name: field for field in dataclasses.fields(settings)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(type(settings))
    changes: dict[str, Any] = {}
    for key, value in (_named_now(values) if "log" in fields else values).items():
        if key not in fields:
            raise ConfigError(f"{where}: {key!r} is no setting; known are {', '.join(fields)}")
        now = getattr(settings, key)
        if dataclasses.is_dataclass(now):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {key} = {value!r} should be a table: [{key}]")
            changes[key] = with_values(now, value, f"{where}, [{key}]")
        else:
            changes[key] = _value(value, hints[key], f"{where}: {key} = {value!r}")
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]


def _named_now(values: dict[str, Any]) -> dict[str, Any]:
    """Runs of version 0.1 have `tensorboard = true` or `false`, which is `log` now."""
    old = values.get("tensorboard")
    if type(old) is not bool:
        return values
    rest = {key: value for key, value in values.items() if key != "tensorboard"}
    return {"log": "tensorboard", **rest} if old else rest


def _value(value: Any, hint: Any, where: str) -> Any:
    """As the field wants it."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if union else (hint,)
    for kind in kinds:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        if kind is Path and isinstance(value, str):
            return Path(value)
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise ConfigError(f"{where} should be of type {wanted.replace('Path', 'path')}")
