"""Which parameters Muon updates and which AdamW, and as what matrices: decided by module and shape, or said by users.

Muon is for the matrices of hidden layers. Embeddings, the head and whatever is no matrix go to AdamW.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from torch import nn
from torch.nn.modules.conv import _ConvNd

from onefold.errors import OptimizerError
from onefold.model.blocks import block_of
from onefold.optim.newton_schulz import Matrices, places_of

MUON, ADAMW = "muon", "adamw"
T = TypeVar("T")
Place = Mapping[str, Literal["muon", "adamw"]]  # by name, or by a pattern of names
Split = Mapping[str, int | Sequence[int]]  # equal parts, or the rows of each


class Decision(NamedTuple):
    """What updates a parameter."""

    by: str  # MUON or ADAMW
    matrices: Matrices  # of Muon
    why: str


class Stage(NamedTuple):
    """Of a pipeline: what other stages have is not known here."""

    last: bool
    tied: Collection[str]  # parameters that another stage has, too


class Found(NamedTuple):
    """A parameter, and the modules that hold it."""

    name: str
    names: tuple[str, ...]  # with those of modules that share it
    param: nn.Parameter
    size: tuple[int, ...]  # without a split over "tp"
    modules: list[tuple[str, nn.Module]]


def decide(
    model: nn.Module,
    blocks: Sequence[str],
    place: Place,
    split: Split,
    stage: Stage | None = None,
    sizes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> dict[int, Decision]:
    """What updates each parameter of a model, or of a pipeline stage of it, by id, frozen ones too; raises for patterns
    that name no parameter of it, and for parameters that Muon cannot take. `sizes` has the full sizes of parameters
    that are split over the mesh axis "tp"."""
    for argument, said in (("place", place), ("split", split)):
        if not isinstance(said, Mapping):
            raise OptimizerError(f"{argument}={said!r} is no dict of names; give {argument}={{'name or pattern': ...}}")
    found = list(_parameters(model, sizes))
    if stage is None:
        _check_patterns(place, found, "place")
        _check_patterns(split, found, "split")
    made: dict[int, Decision] = {}
    heads = _heads(found, blocks) if stage is None or stage.last else set()
    heads |= {id(one.param) for one in found if stage is not None and one.name in stage.tied}
    for one in found:
        by_name = _match(place, one)
        if by_name is not None and by_name not in (MUON, ADAMW):
            raise OptimizerError(f"place={dict(place)!r} says {by_name!r} of {one.name}; say 'muon' or 'adamw'")
        by, why = _by_shape(one, heads) if by_name is None else (by_name, "said by place=")
        matrices: Matrices = _form(one)
        if by == MUON and (parts := _match(split, one)) is not None:
            matrices, why = _rows(one.name, one.size, parts), f"{why}, split"
        if by == MUON:
            _check(one.name, one.size, matrices)
        made[id(one.param)] = Decision(by, matrices, why)
    if stage is None:
        _check_split(split, found, made)
    if stage is None and not any(decision.by == MUON for decision in made.values()):
        raise OptimizerError(
            "Muon finds no matrix of a hidden layer in this model; name matrices with place={'name': 'muon'}, or use "
            "onefold.Optimizer(model, torch.optim.AdamW)"
        )
    return made


def _parameters(model: nn.Module, sizes: Mapping[str, tuple[int, ...]]) -> Iterator[Found]:
    """Each parameter once, with all its names and every module that holds it."""
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for param in module.parameters(recurse=False):
            holders.setdefault(id(param), []).append((name, module))
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for name, param in model.named_parameters():
        yield Found(name, tuple(names[id(param)]), param, sizes.get(name, tuple(param.shape)), holders[id(param)])


def _by_shape(one: Found, heads: set[int]) -> tuple[str, str]:
    size = one.size
    if any(_is_embedding(module) for _, module in one.modules):
        return ADAMW, "embedding"
    if id(one.param) in heads:
        return ADAMW, "head"
    if len(size) < 2:
        return ADAMW, "vector"
    if any(isinstance(module, _ConvNd) for _, module in one.modules) and min(size[0], math.prod(size[1:])) > 1:
        return MUON, "filters"
    if len(size) > 3 or min(size) < 2:
        return ADAMW, "no matrix"
    return MUON, "matrix" if len(size) == 2 else "stack of matrices"


def _form(one: Found) -> Literal["whole", "stack", "flat"]:
    if any(isinstance(module, _ConvNd) for _, module in one.modules) or one.param.ndim > 3:
        return "flat"
    return "stack" if one.param.ndim == 3 else "whole"


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__


def _heads(found: Sequence[Found], blocks: Sequence[str]) -> set[int]:
    """The weights of the layers that make the model's outputs: outside the repeated blocks, a Linear that has as many
    rows as the largest embedding, or shares its weight; if there is none, the last Linear. None if nothing else would
    be left for Muon."""
    linear = [one for one in found if one.param.ndim == 2 and any(isinstance(m, nn.Linear) for _, m in one.modules)]
    outside = [one for one in linear if not block_of(one.name, list(blocks))]
    tables = [one for one in found if one.param.ndim == 2 and any(_is_embedding(module) for _, module in one.modules)]
    rows = max((one.size[0] for one in tables), default=0)
    heads = {id(one.param) for one in outside if one.size[0] == rows} or {id(one.param) for one in outside[-1:]}
    others = [one for one in found if id(one.param) not in heads and _by_shape(one, set())[0] == MUON]
    return heads if others else set()


def _match(patterns: Mapping[str, T], one: Found) -> T | None:
    """The value of a name itself, or of the first pattern that a name matches."""
    for name in one.names:
        if name in patterns:
            return patterns[name]
    return next((value for pattern, value in patterns.items() if _names(pattern, one)), None)


def _names(pattern: str, one: Found) -> bool:
    return pattern in one.names or any(fnmatch.fnmatchcase(name, pattern) for name in one.names)


def _check_patterns(patterns: Mapping[str, object], found: Sequence[Found], argument: str) -> None:
    for pattern in patterns:
        if not any(_names(pattern, one) for one in found):
            raise OptimizerError(
                f"{argument}= names {pattern!r}, which no parameter is called; names are such as "
                f"{', '.join(one.name for one in found[:3])}"
            )


def _check_split(split: Split, found: Sequence[Found], made: Mapping[int, Decision]) -> None:
    """Raises for patterns that name only parameters which AdamW updates."""
    for pattern in split:
        named = [one for one in found if _names(pattern, one)]
        if all(made[id(one.param)].by == ADAMW for one in named):
            raise OptimizerError(
                f"split= names {pattern!r}, but AdamW updates {named[0].name} ({made[id(named[0].param)].why}); say "
                f"place={{{pattern!r}: 'muon'}} too, or leave it out"
            )


def _rows(name: str, size: tuple[int, ...], parts: int | Sequence[int]) -> Matrices:
    if isinstance(parts, Sequence) and parts and all(isinstance(count, int) for count in parts):
        return tuple(parts)
    if not isinstance(parts, int):
        raise OptimizerError(
            f"split= says {parts!r} of {name}; say the number of equal parts, or the rows of each part"
        )
    rows = size[0] if size else 0
    if parts < 1 or rows % parts:
        raise OptimizerError(
            f"split= cuts {name} of shape {size} into {parts} equal parts, but it has {rows} rows; give a divisor of "
            f"{rows}, or the rows of each part"
        )
    return (rows // parts,) * parts


def _check(name: str, size: tuple[int, ...], matrices: Matrices) -> None:
    try:
        places_of(size, matrices)
    except OptimizerError as error:
        raise OptimizerError(f"Muon cannot update {name}: {error}") from error
