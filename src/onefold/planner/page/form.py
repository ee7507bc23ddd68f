"""The fields of the page: their labels, how they are written in markup, and how what a user gave is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from onefold.cost.families import FAMILIES
from onefold.cost.hardware import TABLE
from onefold.cost.shapes import SHAPES
from onefold.cost.states import STATE_COSTS
from onefold.errors import ConfigError
from onefold.planner.page.results import text

Value = int | float | str | None
AUTO = "automatic"
TIERS = (("", AUTO), ("none", "the device"), ("host", "host memory"), ("disk", "disk"))
KNOWN_BY = (("name", "its name or config.json"), ("shape", "its shape"), ("count", "its number of parameters"))
LONGEST = 400  # characters of a value


class FieldError(ConfigError):
    """What was given in one field cannot be."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Field(NamedTuple):
    """One field; an empty one means the default."""

    name: str
    label: str
    kind: Literal["whole", "number", "text", "choice"]
    choices: tuple[tuple[str, str], ...] = ()
    powers: int = 0  # of two, up to which a slider goes
    empty: str = ""  # what an empty field means
    known_by: str = ""  # only for models that are known by a name, a shape or a count


def _same(*values: str) -> tuple[tuple[str, str], ...]:
    return tuple((value, value) for value in values)


GROUPS: tuple[tuple[str, tuple[Field, ...]], ...] = (
    ("Model", (
        Field("by", "Known by", "choice", KNOWN_BY),
        Field("model", "Name, or path of a config.json", "text", known_by="name"),
        Field("params", "Parameters", "number", known_by="count"),
        Field("layers", "Layers", "whole", known_by="shape"),
        Field("hidden", "Hidden size", "whole", known_by="shape"),
        Field("heads", "Attention heads", "whole", known_by="shape"),
        Field("vocab", "Vocabulary", "whole", empty="the model's", known_by="shape"),
        Field("seq", "Tokens per sequence", "whole", empty="the model's"),
    )),
    ("Hardware", (
        Field("hardware", "GPUs", "choice", tuple((key, row.name) for key, row in TABLE.items())),
        Field("ranks", "Number of GPUs", "whole", powers=12),
        Field("memory_gb", "Memory of a GPU, GB", "number", empty="the table's"),
        Field("node_link_gb", "Link inside a node, GB/s", "number", empty="the table's"),
        Field("network_gb", "Network of a node, GB/s", "number", empty="the table's"),
    )),
    ("Training", (
        Field("batch", "Batch: sequences per replica", "whole", powers=10, empty="largest"),
        Field("micro_batches", "Micro-batches per step", "whole", powers=7, empty="1"),
        Field("precision", "Precision", "choice", _same("bf16", "fp16", "fp32")),
        Field("master", "Master parameters", "choice", (("", "as in a run"), *_same("fp32", "split"))),
        Field("optimizer", "Optimizer", "choice", _same(*STATE_COSTS)),
        Field("optimizer_state", "Its moments in", "choice", _same("fp32", "bf16", "8bit")),
        Field("lora", "LoRA rank", "whole", empty="none"),
        Field("activations", "Activations", "choice", (("", "recompute blocks"), ("auto", AUTO), *_same(
            "keep", "checkpoint", "checkpoint+host", "partition", "partition+host"))),
        Field("tile", "Tile of loss and MLPs, tokens", "whole", empty="no tiles"),
        Field("compile", "Compile blocks", "choice", (("", "no"), *_same("yes"))),
        Field("tokens", "Tokens to train on", "number", empty="20 × params"),
    )),
    ("Sharding", (
        Field("stage", "Stage", "choice", (("", AUTO), *_same("0", "1", "2", "3"))),
        Field("offload", "Optimizer state on", "choice", TIERS),
        Field("offload_parameters", "Parameters on", "choice", TIERS),
        Field("tp", "Tensor parallel", "whole", powers=5, empty="1"),
        Field("pp", "Pipeline stages", "whole", powers=6, empty="1"),
        Field("replica", "Replicas of the shards", "whole", powers=6, empty="1"),
        Field("sequence", "Ranks that cut a sequence", "whole", powers=5, empty="1"),
    )),
)  # fmt: skip
FIELDS = {field.name: field for _, fields in GROUPS for field in fields}
FORM = tuple(name for name in FIELDS if name != "by")  # settings of the planner


def read(given: Mapping[str, str]) -> dict[str, Value]:
    """The values of all fields that are given and count; raises FieldError for one that cannot be read."""
    unknown = [name for name in given if name not in FIELDS]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no field of this page; there are {', '.join(FIELDS)}")
    by = given.get("by", "name")
    found: dict[str, Value] = {}
    for name, field in FIELDS.items():
        said = given.get(name, "").strip()
        if len(said) > LONGEST:
            raise FieldError(name, f"{name} has {len(said)} characters; {LONGEST} are the most")
        if field.choices and said not in dict(field.choices) and (said or "" in dict(field.choices)):
            known = ", ".join(value for value, _ in field.choices if value)
            raise FieldError(name, f"{name}={said!r} is unknown; use one of {known}")
        if said and name != "by" and field.known_by in ("", by):
            found[name] = _value(field, said)
    return found


def _value(field: Field, said: str) -> Value:
    if field.name == "compile":
        return True
    if field.kind == "whole" or field.name == "stage":
        try:
            return int(said)
        except ValueError:
            raise FieldError(field.name, f"{field.name}={said!r} is not a whole number") from None
    if field.kind == "number":
        try:
            return float(said)
        except ValueError:
            raise FieldError(field.name, f"{field.name}={said!r} is not a number; try 7.5e9") from None
    return said


def field_of(message: str) -> str:
    """The field that a message of the planner names as a setting, or ""."""
    places: dict[str, int] = {}
    for name in FIELDS:
        for spelt in (f"--{name.replace('_', '-')}", f"{name}=", f"{name} '", f"{name} {{"):
            at = message.find(spelt)
            if at >= 0 and (at == 0 or not (message[at - 1].isalnum() or message[at - 1] in "_-")):
                places[name] = min(at, places.get(name, at))
    return min(places, key=lambda name: places[name], default="")


def written(values: Mapping[str, str]) -> str:
    """The form's markup, with these values in its fields."""
    groups = "".join(
        f"<fieldset><legend>{text(title)}</legend>{''.join(_written(field, values) for field in fields)}</fieldset>\n"
        for title, fields in GROUPS
    )
    names = "".join(f'<option value="{text(name)}">' for name in [*SHAPES, *FAMILIES])
    return f'{groups}<datalist id="models">{names}</datalist>'


def _written(field: Field, values: Mapping[str, str]) -> str:
    name, value = field.name, values.get(field.name, "")
    about = f'id="{name}" name="{name}" aria-describedby="error-{name}"'
    if field.kind == "choice":
        options = "".join(
            f'<option value="{text(v)}"{" selected" if v == value else ""}>{text(label)}</option>'
            for v, label in field.choices
        )
        box = f"<select {about}>{options}</select>"
    else:
        more = ' list="models"' if name == "model" else ""
        mode = {"whole": "numeric", "number": "decimal"}.get(field.kind, "text")
        box = (
            f'<input {about} value="{text(value)}" inputmode="{mode}" autocomplete="off" spellcheck="false"'
            f' placeholder="{text(field.empty)}"{more}>'
        )
    slider = ""
    if field.powers:
        least = 1 if field.empty == "largest" else 0
        slider = (
            f'<input type="range" data-for="{name}" data-empty="{least}" min="0" max="{field.powers + least}" '
            f'value="0" aria-label="{text(field.label)}, by powers of two">'
        )
    only = f' data-by="{field.known_by}"' if field.known_by else ""
    slid = " slid" if slider else ""
    return (
        f'<div class="field{slid}"{only}><label for="{name}">{text(field.label)}</label>{slider}{box}'
        f'<p class="error" id="error-{name}"></p></div>\n'
    )
