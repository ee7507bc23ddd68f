"""Which modules of a model are its blocks: the repeated modules whose parameters become units.

By default a block is an element of a container (ModuleList, Sequential, ModuleDict) that holds two or more of its
class, and has submodules itself: transformer layers, residual blocks. The outermost counts: a block's experts belong to
the block. A container is never a block; its elements may be. Parameters outside every block (the plain layers of an
MLP, embeddings, heads) form units with their neighbours.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from onefold.settings.zero import Units

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module, units: Units) -> list[str]:
    """The names of the blocks, in registration order, none inside another."""
    blocks: list[str] = []

    def visit(name: str, module: nn.Module, listed: bool) -> None:
        if name and _is_block(name, module, listed, units):
            blocks.append(name)
            return
        twins = Counter(type(child) for child in module.children() if _has_params(child))
        for child_name, child in module.named_children():
            inside_list = isinstance(module, LISTS) and twins[type(child)] > 1
            visit(f"{name}.{child_name}" if name else child_name, child, inside_list)

    visit("", model, False)
    return blocks


def _is_block(name: str, module: nn.Module, listed: bool, units: Units) -> bool:
    if units is None:
        return listed and not isinstance(module, LISTS) and any(True for _ in module.children()) and _has_params(module)
    if isinstance(units, type | tuple):
        return isinstance(module, units)
    return bool(units(name, module))


def block_of(name: str, blocks: list[str]) -> str:
    """The name of the block that a parameter belongs to, or ''."""
    return next((block for block in blocks if name.startswith(block + ".")), "")


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
