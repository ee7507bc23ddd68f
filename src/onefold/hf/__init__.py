"""Hugging Face: accelerate's Accelerator and transformers' Trainer, with Onefold in place of DDP."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.hf.accelerator import Accelerator
    from onefold.hf.sequences import cut_sequences
    from onefold.hf.tiled_loss import tile_loss
    from onefold.hf.trainer import Trainer, sharded
    from onefold.integrations.transformers_loading import from_pretrained

__all__ = ["Accelerator", "Trainer", "cut_sequences", "from_pretrained", "sharded", "tile_loss"]


def __getattr__(name: str) -> Any:
    """Each name when it is asked for: an Accelerate loop needs no transformers, and the launcher reads models first."""
    if name == "Accelerator":
        from onefold.hf.accelerator import Accelerator

        return Accelerator
    if name == "from_pretrained":
        from onefold.integrations.transformers_loading import from_pretrained

        return from_pretrained
    if name == "cut_sequences":
        from onefold.hf.sequences import cut_sequences

        return cut_sequences
    if name == "tile_loss":
        from onefold.hf.tiled_loss import tile_loss

        return tile_loss
    if name in ("Trainer", "sharded"):
        from onefold.hf import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
