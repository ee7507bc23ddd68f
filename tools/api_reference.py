"""docs/api.md and docs/api-frameworks.md, made from signatures and docstrings of the public names and never by hand.

    python -m tools.api_reference            # write them
    python -m tools.api_reference --check    # fail, and name what differs

Names stand under the task they are for. Text is taken from the source, not from evaluated annotations and defaults, so
that it reads as it was written and is the same under every version of Python.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import onefold

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
FRAMEWORKS_PAGE = PAGE.with_name("api-frameworks.md")
COMMAND = "python -m tools.api_reference"
WIDTH = 100  # of a signature: one that is longer has a line for each argument


class Task(NamedTuple):
    """Public names for one task; the guides that explain it; types that these names return, as module:class."""

    title: str
    guides: tuple[str, ...]
    names: tuple[str, ...]
    returned: tuple[str, ...] = ()


TASKS = (
    Task("Start a script", ("install", "parallelism"), ("init", "shutdown", "mesh")),
    Task(
        "Shard a model",
        ("shard", "precision", "offload"),
        ("shard", "unshard", "Zero", "preset", "Precision", "Offload"),
    ),
    Task(
        "Train",
        ("optimizers", "gradients", "precision"),
        (
            "Optimizer", "Muon", "accumulate", "grad_norms", "EMA", "LossScale", "Scheduler", "Spikes",
            "check_replicas",
        ),
    ),
    Task("Compute in tiles", ("activations",), ("tiled_cross_entropy", "tiled")),
    Task("Cut sequences over ranks", ("long-context",), ("sequence_attention", "cut_sequence", "token_mean")),
    Task("Use parameters at stage 3", ("stage3",), ("full_parameters", "full_state_dict", "shards", "catch_up")),
    Task(
        "Come from DeepSpeed",
        ("migration",),
        ("from_deepspeed", "DeepSpeedConfig"),
        (
            "onefold.integrations.deepspeed_reading:Key", "onefold.integrations.deepspeed_reading:Outcome",
            "onefold.integrations.deepspeed_schedules:Schedule",
        ),
    ),
    Task("Build a pipeline", ("pipeline",), ("PipelineStage",)),
    Task(
        "Save and load",
        ("checkpoints",),
        ("save", "finish_saves", "load", "export", "import_checkpoint"),
        ("onefold.checkpoint.format.export:Exported", "onefold.integrations.checkpoints.imported:Imported"),
    ),
    Task(
        "Survive lost ranks",
        ("resilience",),
        ("resilient", "Resilient"),
    ),
    Task(
        "Plan before you run",
        ("planning",),
        ("plan", "Plan"),
        ("onefold.planner.rows:Row", "onefold.planner.rows:Recommendation"),
    ),
    Task(
        "See memory, traffic and time",
        ("reports", "profiling"),
        (
            "memory", "MemoryReport", "track_memory", "traffic", "TrafficReport", "placement", "PlacementReport",
            "profile", "ProfileReport",
        ),
        (
            "onefold.observe.reports:Bytes", "onefold.observe.inventory:TierRow", "onefold.comm.meter:Flow",
            "onefold.observe.reports:PlacementRow", "onefold.observe.profiling.report:StepProfile",
        ),
    ),
    Task(
        "Handle errors",
        ("troubleshooting",),
        (
            "OnefoldError", "ConfigError", "ModelError", "OptimizerError", "StateError", "PrecisionError",
            "MismatchError", "CommError", "OffloadError", "CheckpointError", "CheckpointDamaged",
        ),
    ),
)  # fmt: skip

FRAMEWORKS = (
    Task(
        "Hugging Face",
        ("huggingface", "peft"),
        ("hf.Trainer", "hf.sharded", "hf.Accelerator", "hf.from_pretrained", "hf.tile_loss", "hf.cut_sequences"),
    ),
    Task("Lightning", ("lightning",), ("lightning.ZeroStrategy", "lightning.FabricZeroStrategy")),
)  # fmt: skip

# Members without an underscore that other rooms of the package call and users do not.
INHERITED = {"Optimizer": ("add_param_group",)}  # public members of a base that is not public
INTERNAL = {
    "Zero": {"of", "describe"},
    "Precision": {"of", "narrow", "decided", "dtypes", "kept"},
    "Offload": {"of", "check_stage", "optimizer_tier", "parameters_tier"},
    "Optimizer": {
        "clipped", "gradients_change", "forget_clipping", "notes", "load_notes", "pending_clip", "replaced",
    },
    "PipelineStage": {"perform_reduce_grad", "scale_grads"},
    "ProfileReport": {"part_s"},
    "lightning.ZeroStrategy": {"model_to_device", "tensor_init_context", "teardown"},
    "lightning.FabricZeroStrategy": {
        "module_init_context", "module_to_device", "setup_module_and_optimizers", "clip_gradients_norm",
        "get_module_state_dict",
    },
}  # fmt: skip


class Field(NamedTuple):
    name: str
    annotation: str
    default: str
    text: str


# -- reading the source ------------------------------------------------------------------------------------------------


class Source:
    """The source text of one function or class, and its syntax tree."""

    def __init__(self, thing: Callable[..., object]) -> None:
        plain = inspect.unwrap(thing)
        self.text = textwrap.dedent(inspect.getsource(plain))
        self.names = vars(sys.modules[plain.__module__])
        self.node = ast.parse(self.text).body[0]
        self.comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(StringIO(self.text).readline)
            if token.type == tokenize.COMMENT
        }

    def of(self, node: ast.expr | None) -> str:
        """A part of the source, on one line; a constant or an alias of types by what it stands for."""
        if node is None:
            return ""
        if isinstance(node, ast.Name) and isinstance(known := self.names.get(node.id), str | int):
            return str(known)
        return " ".join((ast.get_source_segment(self.text, node) or "").split())

    def arguments(self) -> list[str]:
        """Each argument as it was written, with its annotation and default."""
        assert isinstance(self.node, ast.FunctionDef)
        given = self.node.args
        plain = [*given.posonlyargs, *given.args]
        defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
        shown = [self._argument(arg, default) for arg, default in zip(plain, defaults, strict=True)]
        if given.posonlyargs:
            shown.insert(len(given.posonlyargs), "/")
        if given.vararg:
            shown.append(f"*{self._argument(given.vararg, None)}")
        elif given.kwonlyargs:
            shown.append("*")
        shown += [
            self._argument(arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        ]
        if given.kwarg:
            shown.append(f"**{self._argument(given.kwarg, None)}")
        return shown[1:] if shown[:1] in (["self"], ["cls"]) else shown

    def _argument(self, arg: ast.arg, default: ast.expr | None) -> str:
        kind = f": {self.of(arg.annotation)}" if arg.annotation else ""
        if default is None:
            return arg.arg + kind
        return f"{arg.arg}{kind} = {self.of(default)}" if kind else f"{arg.arg}={self.of(default)}"

    def returns(self) -> str:
        assert isinstance(self.node, ast.FunctionDef)
        found = self.of(self.node.returns)
        if any(isinstance(by, ast.Name) and by.id == "contextmanager" for by in self.node.decorator_list):
            found = found.replace("Iterator", "ContextManager")
        return f" -> {found}" if found else ""

    def fields(self) -> Iterator[Field]:
        """Annotated names of a class, each with the string below it or the comment beside it."""
        assert isinstance(self.node, ast.ClassDef)
        body = self.node.body
        for statement, after in zip(body, [*body[1:], None], strict=True):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            text = self.comments.get(statement.end_lineno or 0, "")
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = inspect.cleandoc(str(after.value.value))
            yield Field(statement.target.id, self.of(statement.annotation), self.of(statement.value), text)


# -- writing the page --------------------------------------------------------------------------------------------------


def signature(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"
    return f"```text\n{line}\n```\n"


def prose(doc: str | None) -> str:
    """A docstring as Markdown: its examples in blocks."""
    parts = []
    for paragraph in inspect.cleandoc(doc or "").split("\n\n"):
        parts.append(f"```pycon\n{paragraph}\n```" if paragraph.startswith(">>>") else paragraph)
    return "\n\n".join(parts) + "\n"


def function(name: str, thing: Callable[..., object]) -> str:
    source = Source(thing)
    return f"{signature(f'onefold.{name}', source.arguments(), source.returns())}\n{prose(thing.__doc__)}"


def item(shown: str, text: str) -> str:
    """One entry of a list: code, and below it what it means."""
    lines = f"`{shown}`:\n{text}" if text else f"`{shown}`"
    return "- " + textwrap.indent(lines, "  ").lstrip() + "\n"


def described(fields: list[Field]) -> str:
    """A list of fields, each with its type, its default and what it means."""
    return "".join(
        item(f"{field.name}: {field.annotation}" + (f" = {field.default}" if field.default else ""), field.text)
        for field in fields
    )


def _body(thing: type) -> list[ast.stmt]:
    node = Source(thing).node
    assert isinstance(node, ast.ClassDef)
    return node.body


def _own(thing: type) -> dict[str, object]:
    """What a class defines, less functions not in its source: torch sets an inherited `step` on a class once used."""
    written = {statement.name for statement in _body(thing) if isinstance(statement, ast.FunctionDef)}
    return {name: value for name, value in vars(thing).items() if name in written or not inspect.isfunction(value)}


def members(name: str, thing: type) -> str:
    """Public methods and properties that the class defines and explains, and those in INHERITED."""
    lines = []
    inherited = {member: getattr(thing, member) for member in INHERITED.get(name, ())}
    for member, value in {**_own(thing), **inherited}.items():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        text = plain.__doc__ if inspect.isfunction(plain) or isinstance(plain, property) else None
        if member.startswith("_") or member in INTERNAL.get(name, ()) or not text:
            continue
        if isinstance(plain, property):
            assert plain.fget is not None
            shown = f"{member}: {Source(plain.fget).returns().removeprefix(' -> ')}"
        else:
            source = Source(plain)
            shown = f"{member}({', '.join(source.arguments())}){source.returns()}"
        lines.append(item(shown, inspect.cleandoc(text)))
    return "".join(lines)


def klass(name: str, thing: type) -> str:
    """A class: how it is made, what it is, its fields, its members."""
    parts = []
    fields = list(Source(thing).fields()) if dataclasses.is_dataclass(thing) or hasattr(thing, "_fields") else []
    if not fields:
        parts.append(signature(f"onefold.{name}", Source(thing.__init__).arguments(), ""))
    parts.append(prose(thing.__doc__))
    if not fields and thing.__init__.__doc__:
        parts.append(prose(thing.__init__.__doc__))
    if found := described(fields) + members(name, thing):
        parts.append(found)
    return "\n".join(parts)


def error(name: str, thing: type[Exception]) -> str:
    """One entry of the list of errors, with the classes it is one of."""
    bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not Exception)
    return item(f"{name}({bases})" if bases else name, inspect.cleandoc(thing.__doc__ or ""))


def public(name: str) -> Any:
    """What a public name stands for: of onefold, or of a package in it."""
    package, _, own = name.rpartition(".")
    return getattr(importlib.import_module(f"onefold.{package}") if package else onefold, own)


def anchor(heading: str) -> str:
    """Where a link to a heading leads, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def is_error(name: str) -> bool:
    thing = public(name)
    return inspect.isclass(thing) and issubclass(thing, Exception)


def heading(name: str) -> str:
    thing = public(name)
    return f"class onefold.{name}" if inspect.isclass(thing) else f"onefold.{name}()"


def section(task: Task) -> str:
    guides = ", ".join(f"[{guide}]({guide}.md)" for guide in task.guides)
    parts = [f"## {task.title}\n\nExplained in {guides}.\n"]
    errors = []
    for name in task.names:
        thing = public(name)
        if is_error(name):
            errors.append(error(name, thing))
            continue
        text = klass(name, thing) if inspect.isclass(thing) else function(name, thing)
        parts.append(f"### {heading(name)}\n\n{text}")
    for path in task.returned:
        module, _, name = path.partition(":")
        parts.append(f"### class {name}\n\n{klass(name, returned(module, name))}")
    return "\n".join([*parts, *(["".join(errors)] if errors else [])])


def returned(module: str, name: str) -> type:
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type)
    return found


def contents(task: Task) -> str:
    links = [f"`{name}`" if is_error(name) else f"[`{name}`](#{anchor(heading(name))})" for name in task.names]
    return f"| [{task.title}](#{anchor(task.title)}) | {', '.join(links)} |\n"


def page() -> str:
    return _page("API reference", "Every public name, by task.", TASKS)


def frameworks_page() -> str:
    """The names that need another framework, which is imported here."""
    return _page("API reference: frameworks", "Every public name of `onefold.hf` and `onefold.lightning`.", FRAMEWORKS)


def _page(title: str, holds: str, tasks: tuple[Task, ...]) -> str:
    head = (
        f"# {title}\n\n"
        f"{holds} Made from the docstrings by `{COMMAND}`; a test fails if the two differ. The\n"
        "examples run in the test suite too. *Collective* means: every rank calls it, in the same order.\n\n"
        "| Task | Names |\n|---|---|\n"
    )
    return head + "".join(map(contents, tasks)) + "\n" + "\n".join(map(section, tasks))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page of onefold's own names (docs/api.md)")
    parser.add_argument("--frameworks-page", type=Path, default=FRAMEWORKS_PAGE, help="docs/api-frameworks.md")
    asked = parser.parse_args(words)
    same = [_made(path, text, asked.check) for path, text in _pages(asked.page, asked.frameworks_page)]
    return 0 if all(same) else 1


def _pages(own: Path, frameworks: Path) -> Iterator[tuple[Path, str]]:
    """The page of the frameworks is left alone where these are not installed."""
    yield own, page()
    if all(importlib.util.find_spec(name) for name in ("transformers", "accelerate", "lightning")):
        yield frameworks, frameworks_page()


def _made(path: Path, wanted: str, check: bool) -> bool:
    """Writes a page, or with `check` says how the page differs. True if it is as wanted."""
    found = path.read_text() if path.exists() else ""
    if not check:
        path.write_text(wanted)
    elif found != wanted:
        lines = difflib.unified_diff(
            found.splitlines(), wanted.splitlines(), "the page", "the docstrings", n=0, lineterm=""
        )
        print("\n".join(lines), file=sys.stderr)
        print(f"{path.name} is not what the docstrings say; run `{COMMAND}`", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
