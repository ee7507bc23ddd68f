"""A run as a Hugging Face folder that from_pretrained reads: weights under Hugging Face's names, config and tokenizer.

The built-in GPT is written as GPT-2, which computes the same. A model of transformers has its own names already.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onefold.checkpoint.format.export import NARROW, Exported, Form, export
from onefold.errors import ConfigError
from onefold.settings.limited import JSON_BYTES_LIMIT, read_bytes
from onefold.train.run.folder import RunFolder
from onefold.train.run.gpt2 import config, names
from onefold.train.run.groups import BYTES
from onefold.train.run.model import GPT
from onefold.train.run.pretrained import BYTES_KEY, CONFIG, TOKENIZER, beside
from onefold.train.run.records import read_facts
from onefold.train.run.sample import class_of, shape_of

TOKENIZERS = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
              "tokenizer.model", "added_tokens.json", "chat_template.jinja")  # fmt: skip


def export_run(run: Path, out: Path, dtype: str | None, shard_bytes: int) -> Exported:
    """Writes the last checkpoint of a run to the new folder `out`, for from_pretrained and for --weights."""
    facts, folder = read_facts(run), RunFolder(run)
    files = beside(folder.pretrained) if folder.pretrained.is_dir() else {}
    found = json.loads(files[CONFIG]) if CONFIG in files else {}
    if not isinstance(found, dict):
        raise ConfigError(f"{folder.pretrained / CONFIG} is no table; was it changed?")
    forms = {}
    if class_of(facts) == GPT.__name__:
        shape = shape_of(run, facts)
        forms = {ours: Form(theirs.name, theirs.to_theirs) for ours, theirs in names(shape).items()}
        found = found or config(shape, "float32")
    found = {name: value for name, value in found.items() if name not in ("torch_dtype", BYTES_KEY)}
    found["dtype"] = str(NARROW[dtype or "fp32"]).removeprefix("torch.")
    files |= _tokenizer(facts, files, found)
    files[CONFIG] = (json.dumps(found, indent=2) + "\n").encode()
    kept = {name: content for name, content in files.items() if content}
    return export(folder.checkpoints, out, dtype, shard_bytes, forms=forms, files=kept)


def _tokenizer(facts: dict[str, Any], files: dict[str, bytes], found: dict[str, Any]) -> dict[str, bytes]:
    """The files of the tokenizer that the run was trained with; empty ones are not written."""
    data = facts.get("data")
    name = str(data.get("tokenizer")) if isinstance(data, dict) else ""
    if name == BYTES:
        found[BYTES_KEY] = BYTES
        return dict.fromkeys(TOKENIZERS, b"")
    if not Path(name).is_file():  # of a token file; or gone, and then the copy that the run began with is the one
        return {}
    given = read_bytes(Path(name), JSON_BYTES_LIMIT)
    other = files.get(TOKENIZER) not in (None, given)
    return {**(dict.fromkeys(TOKENIZERS, b"") if other else {}), TOKENIZER: given}
