"""Matches saved tensors with the model's: by name, by another name of the same tensor, or as the user maps them.

Tensors without a match, on either side, raise an error that lists them, unless they are allowed by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol

from onefold.errors import CheckpointError, ConfigError
from onefold.runtime.full_parameters import EXTRA

LISTED = 20  # names in one message


class Named(Protocol):
    """A tensor of the model, or a saved one."""

    @property
    def name(self) -> str: ...
    @property
    def also(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The arguments of load() that say which tensors to load. Patterns are names that may contain * and ?."""

    rename: Mapping[str, str] = field(default_factory=dict)
    """Saved name -> the model's name; or prefixes of names, both ending in a dot."""

    subset: tuple[str, ...] | None = None
    """Which of the model's tensors to load; the others stay as they are."""

    allow_missing: tuple[str, ...] = ()
    """The model's tensors that need not be in the checkpoint."""

    allow_extra: tuple[str, ...] = ()
    """Saved tensors that need not be in the model."""

    elsewhere: frozenset[str] = frozenset()
    """Tensors of the model that other stages of a pipeline load."""


def patterns(what: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given or ())
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{what}={given!r} is not names or patterns of names")
    return names


def match(wanted: Iterable[Named], saved: Iterable[Named], choice: Choice) -> dict[str, str]:
    """The model's name -> the saved name, of all tensors to load."""
    wanted, saved = list(wanted), list(saved)
    unused = set(choice.rename)
    candidates: dict[str, Named] = {}
    renamed: dict[str, Named] = {}
    for record in saved:
        for name in (record.name, *record.also):
            new = _renamed(name, choice.rename, unused)
            if new != name:
                if renamed.setdefault(new, record) is not record:
                    raise CheckpointError(f"rename= maps {renamed[new].name} and {record.name} both to {new}")
            else:
                candidates[new] = record
    candidates |= renamed  # the user's mapping has precedence over equal names
    if unused:
        raise CheckpointError(f"rename= names {_some(unused)}, which the checkpoint does not have")
    every = [name for param in wanted for name in (param.name, *param.also)]
    if unknown := [p for p in choice.subset or () if not _any(every, [p])]:
        raise CheckpointError(f"subset= names {_some(unknown)}, which the model does not have")
    found: dict[str, str] = {}
    taken: set[str] = set()
    missing: list[str] = []
    misfits: list[str] = []
    for param in wanted:
        names = (param.name, *param.also)
        if choice.subset is not None and not _any(names, choice.subset):
            continue
        source = next((candidates[name] for name in names if name in candidates), None)
        if source is None:
            missing += [] if _any(names, choice.allow_missing) else [param.name]
        elif source.shape != param.shape:
            misfits.append(f"{param.name}: saved {source.shape}, wanted {param.shape}")
            taken.add(source.name)
        else:
            found[param.name] = source.name
            taken.add(source.name)
    theirs = {candidates[name].name for name in choice.elsewhere & candidates.keys()}
    left = [r for r in saved if r.name not in taken | theirs and not _any((r.name, *r.also), choice.allow_extra)]
    tied = {name for param in wanted for name in param.also}
    apart = [record.name for record in left if record.name in tied]
    extra = [] if choice.subset is not None else [record.name for record in left if record.name not in tied]
    problems = [
        *([f"one tensor in the model, but several in the checkpoint: {_some(apart)}"] if apart else []),
        *([f"missing in the checkpoint: {_some(missing)}"] if missing else []),
        *([f"not in the model: {_some(extra)}"] if extra else []),
        *([f"of another shape: {_some(misfits)}"] if misfits else []),
    ]
    if problems:
        raise CheckpointError(
            f"{'; '.join(problems)}. Load into the same model, map names with rename={{saved: wanted}}, or allow them "
            f"by name or pattern with allow_missing=, allow_extra= or subset="
        )
    if choice.subset is not None and not found:
        raise CheckpointError(f"subset={list(choice.subset)} matches no tensor of the model")
    return found


def match_modules(wanted: set[str], saved: set[str], choice: Choice) -> dict[str, str]:
    """The model's module -> the saved module, of all whose extra state is to be loaded."""
    became = {name: _renamed(f"{name}.", choice.rename, set()).removesuffix(".") for name in saved if name}
    candidates = {name: name for name in saved if became.get(name, name) == name}
    candidates |= {new: name for name, new in became.items() if new != name}
    found = {name: candidates[name] for name in wanted & candidates.keys()}
    for what, names, allowed in (
        ("missing", wanted - found.keys(), choice.allow_missing),
        ("left over", saved - set(found.values()), choice.allow_extra),
    ):
        if left := [name for name in sorted(names) if not _any((name, extra_name(name)), allowed)]:
            raise CheckpointError(
                f"extra state of modules is {what}: {', '.join(map(repr, left))}; allow it by the module's name, or a "
                f"pattern of names, in allow_missing= or allow_extra="
            )
    return found


def extra_name(module: str) -> str:
    """The key of a module's extra state in a state dict."""
    return f"{module}.{EXTRA}" if module else EXTRA


def _renamed(name: str, rename: Mapping[str, str], unused: set[str]) -> str:
    if name in rename:
        unused.discard(name)
        return rename[name]
    for old, new in rename.items():
        if old.endswith(".") and name.startswith(old):
            unused.discard(old)
            return new + name.removeprefix(old)
    return name


def _any(names: Iterable[str], chosen: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in names for pattern in chosen)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return ", ".join(listed[:LISTED]) + more
