"""Which tensors of a checkpoint's files make which parameter of a transformers model, and how.

Most parameters are one tensor of a file under another name. Some are made of several (the experts of a layer are one
parameter in the model and many in the files), or are a part of one; transformers has conversions for those. A recipe
holds the names and the conversion, and no tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.checkpoint.format.manifest import VALUE
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import DTYPES
from onefold.checkpoint.format.weights import Weights
from onefold.cost.layout import Span


class Files:
    """The safetensors files of a checkpoint, read by name, without mapping them into memory."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._weights = Weights(Storage(), {Path(path): None for path in paths})

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.records)

    def on_meta(self, name: str) -> Tensor:
        record = self._weights.records[name]
        return torch.empty(record.shape, dtype=DTYPES[record.states[VALUE]], device="meta")

    def read(self, name: str, dtype: torch.dtype, span: Span | None = None) -> Tensor:
        """A tensor of the files; or with `span` these elements of it, as a flat tensor."""
        like = self.on_meta(name)
        wanted = Span(0, like.numel()) if span is None else span
        out = torch.empty(wanted.numel, dtype=like.dtype)
        self._weights.read(name, wanted, out)
        return (out.view(like.shape) if span is None else out).to(dtype)


class Piece(NamedTuple):
    """A tensor of the files that a recipe takes."""

    name: str
    pattern: str  # the pattern of the conversion that it matches


@dataclass
class Recipe:
    """Makes one or several parameters of tensors in files."""

    files: Files
    target: str
    """The name under which transformers collects the tensors: that of the first parameter they make."""

    conversion: Any = None
    """transformers' WeightConverter; None if the tensor is only renamed."""

    model: nn.Module | None = None
    """The model, which conversions may ask for its config."""

    pieces: list[Piece] = field(default_factory=list)

    def makes(self) -> list[str]:
        """The names of the parameters."""
        return [self.target] if self.conversion is None else list(self._converted(self.files.on_meta))

    def make(self, name: str, dtype: torch.dtype) -> Tensor:
        if self.conversion is None:
            return self.files.read(self.pieces[0].name, dtype)
        made = self._converted(partial(self.files.read, dtype=dtype))[name]
        return made[0] if isinstance(made, list) else made

    def make_range(self, dtype: torch.dtype, shape: torch.Size, span: Span) -> Tensor | None:
        """These elements of the parameter; None if only all of it can be made, or the files have another shape."""
        if self.conversion is not None or self.files.on_meta(self.pieces[0].name).shape != shape:
            return None
        return self.files.read(self.pieces[0].name, dtype, span)

    def _converted(self, read: Any) -> dict[str, Any]:
        conversion = copy.deepcopy(self.conversion)
        for piece in self.pieces:
            conversion.add_tensor(self.target, piece.name, piece.pattern, partial(read, piece.name))
        config = getattr(self.model, "config", None)
        made: dict[str, Any] = conversion.convert(self.target, model=self.model, config=config)
        return made


def recipes(model: Any, files: Files, transforms: Sequence[Any]) -> dict[str, Recipe]:
    """The recipe of each parameter and buffer that the files have, by name.

    Names are mapped as transformers.core_model_loading.convert_and_load_state_dict_in_model does (read in 5.22).
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Recipe] = {}
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target in known:
            conversion = by_pattern[pattern] if pattern is not None else None
            recipe = found.setdefault(target, Recipe(files, target, conversion, model if conversion else None))
            recipe.pieces.append(Piece(name, pattern or name))
    return {name: recipe for recipe in found.values() for name in recipe.makes()}
