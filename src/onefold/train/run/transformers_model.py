"""A model of transformers as the model of `onefold train --weights`: built on the meta device, read rank by rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onefold.cost.shapes import Shape
from onefold.errors import ConfigError
from onefold.integrations.transformers_loading import deferred_values, from_pretrained
from onefold.train.run.pretrained import Pretrained
from onefold.train.run.run_model import RunModel


def make_model(start: Pretrained, shape: Shape) -> RunModel:
    """The model of a folder; each rank reads its part when the model is sharded. Without dropout, in fp32."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()  # what matters is said in one line, below
    logging.disable_progress_bar()
    try:
        model, info = from_pretrained(
            AutoModelForCausalLM, str(start.folder), dtype=torch.float32, local_files_only=True,
            trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    except ConfigError:
        raise
    except Exception as error:  # transformers raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(f"--weights {start.folder} cannot be read by transformers: {reason}") from error
    if missing := sorted(info["missing_keys"]) or sorted(str(one) for one in info["mismatched_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"--weights {start.folder} has no values for {missing[0]}{more}, as {type(model).__name__} has it; is the "
            f"download complete?"
        )
    model.config.use_cache = False
    config, kind = model.config, type(model)

    def twin() -> nn.Module:
        with torch.device("meta"):
            blank: nn.Module = kind(config)
        return blank

    return RunModel(model, shape, deferred_values(model), loss_of, twin, _sample)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy. Targets stand one token ahead already, which the model's own loss would do again."""
    logits: Tensor = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _sample(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens, "labels": tokens}
