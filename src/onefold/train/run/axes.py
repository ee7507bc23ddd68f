"""Axes of a mesh as text: shard=2,sequence=2 or replica=2,shard=*."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.errors import ConfigError

REST = "*"  # the ranks that the other axes leave
REMAINING = -1  # the same, as onefold.mesh() takes it


def parse_axes(text: str, known: Sequence[str]) -> dict[str, int]:
    """The axes and their sizes, in the order of the text, as onefold.mesh() takes them."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        sizes = {name.strip(): size.strip() for name, size in pairs}
        axes = {name: REMAINING if size == REST else int(size) for name, size in sizes.items()}
    except ValueError as error:
        raise ConfigError(f"--mesh {text!r} is not like replica=2,shard=4") from error
    if unknown := [name for name in axes if name not in known]:
        hint = "; a pipeline needs a script: see onefold.PipelineStage" if unknown[0] == "pp" else ""
        raise ConfigError(f"--mesh {text!r}: {unknown[0]!r} is none of {', '.join(known)}{hint}")
    if len(axes) != len(pairs) or any(axes[name] < 1 and sizes[name] != REST for name in axes):
        raise ConfigError(f"--mesh {text!r}: name each axis once, with a size from 1 on, or {REST} for the ranks left")
    return axes
