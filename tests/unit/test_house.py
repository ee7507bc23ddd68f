"""The order of the house: who may import whom, who may talk to other ranks, and what no module does."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold

# Each module imports only modules before it.
ORDER = [
    "version", "errors", "trust", "native.cache", "visible", "limited", "placement", "offload", "layout",
    "planner.shapes", "planner.sizes", "planner.states", "planner.traffic", "precision", "scaling", "rounding",
    "rule", "spans", "native.compiled", "native.threads", "native.update", "meter", "sums", "leftovers", "config",
    "planner.activations", "blocks", "parts", "memory", "tiers.memory", "tiers.files", "tiers.disk", "tiers.host",
    "tiers.image", "tiers.place", "views", "survey", "rendezvous", "mesh", "comm", "agree", "edits", "values",
    "master", "parcel", "gradients", "desk", "unit", "rounds", "lookahead", "watch", "schedule", "passes", "shown",
    "tree", "phases", "untied", "update_policy", "whole_gradients", "engine", "containers", "casts", "hooks",
    "activations.arena", "activations.moves", "activations.store", "activations.recompute", "activations.policy",
    "elementwise", "fused", "slices", "carried", "finite", "jobs", "update_at_step", "host_update",
    "update_in_backward", "provide", "optimizer", "scheduler", "full", "inventory", "report", "build",
    "profiling.intervals", "profiling.trace", "profiling.breakdown", "profiling.report", "profiling.profile",
    "planner.hardware", "planner.moves", "planner.here", "planner.seconds", "planner.arrivals", "planner.peak",
    "planner.work", "planner.estimate", "planner.search", "planner.throughput", "planner.auto", "activations.auto",
    "decide", "shard", "tied", "pipeline", "checkpoint.storage", "checkpoint.tensorfile", "checkpoint.order",
    "checkpoint.manifest", "checkpoint.commit", "checkpoint.reading", "checkpoint.verify", "checkpoint.importing",
    "checkpoint.export", "checkpoint.notes", "checkpoint.state", "checkpoint.own", "checkpoint.stages",
    "checkpoint.together", "checkpoint.moment", "checkpoint.background", "checkpoint.save", "checkpoint.names",
    "checkpoint.restore", "checkpoint.load", "planner.dry", "planner.rows", "planner.plan", "planner.measure",
    "train.model", "train.tensor_parallel", "train.run", "train.records", "train.sampling", "train.lock",
    "train.settings", "train.toml", "train.tokens", "train.cache", "train.source", "train.tokenizer",
    "train.digest", "train.data", "train.same", "train.schedule", "train.stop", "train.diagnose", "train.metrics",
    "train.profiled", "train.notes", "train.board", "train.environment", "train.probe", "train.loop", "train.start",
    "train.clean", "train.figures", "train.words", "train.charts", "train.page", "train.sections",
    "train.comparison", "train.report", "train.sample", "train.cut", "busy", "simulate", "__init__", "cli.subject",
    "cli.tables", "cli.plots", "cli.throughput", "cli.lifeline", "cli.ranks", "cli.verdict", "cli.launch",
    "cli.plan", "cli.verify", "cli.simulate", "cli.checkpoint", "cli.report", "cli.sample", "cli.run", "cli.screen",
    "cli.train", "cli.main",
]  # fmt: skip

SOURCE = Path(onefold.__file__).parent
FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}
MODULES = [name for name in FILES if not name.endswith(".__init__")]  # of packages only ours says anything
TREES = {name: ast.parse(FILES[name].read_text()) for name in MODULES}

TALKERS = ("comm", "mesh", "rendezvous", "pipeline", "train.tensor_parallel")  # the last two by torch's own schedules
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "allgather", "allreduce", "alltoall", "alltoall_base", "_allgather_base", "_reduce_scatter_base", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "irecv", "isend", "monitored_barrier", "recv",
    "recv_object_list", "reduce_scatter", "reduce_scatter_tensor", "scatter_object_list", "send", "send_object_list",
}  # fmt: skip
UNSAFE_IMPORTS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_NAMES = {"eval", "exec", "__import__"}
UNSAFE_MEMBERS = {
    "torch.load", "torch.serialization.load", "numpy.load", "np.load", "builtins.eval", "builtins.exec",
    "builtins.__import__",
}  # fmt: skip


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all imports, wherever they stand: `from a import b` may mean a or a.b, and gives both."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(["onefold"] * bool(node.level) + [node.module] * bool(node.module))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_run_time(tree: ast.Module) -> ast.Module:
    """The same without what only type checkers read."""

    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)

    return Strip().visit(ast.parse(ast.unparse(tree)))


def calls(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything called."""
    yield from (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Whatever can run what a file says, called or only named."""
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for full in imports(tree):
        if full.split(".")[0] in UNSAFE_IMPORTS or full in UNSAFE_MEMBERS:
            yield full
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in UNSAFE_NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if f"{aliases.get(first, first)}.{rest}" in UNSAFE_MEMBERS:
                yield ast.unparse(node)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_every_module_has_its_place_in_the_order():
    assert [name for name in MODULES if name not in ORDER] == []
    assert [name for name in ORDER if name not in MODULES] == []


def test_packages_hold_nothing_but_their_modules():
    assert [name for name, path in FILES.items() if name.endswith(".__init__") and path.read_text().strip()] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_modules_before_it(name):
    inner = {full.removeprefix("onefold.") for full in imports(TREES[name])} & set(MODULES)
    assert [other for other in sorted(inner) if ORDER.index(other) >= ORDER.index(name)] == []
    assert "onefold" not in imports(TREES[name]), "the package imports its modules, not the other way round"


@pytest.mark.parametrize("name", ["placement", "layout", "errors"])
def test_the_integers_know_nothing_of_torch(name):
    assert [full for full in imports(TREES[name]) if inside(full, "torch")] == []


@pytest.mark.parametrize("name", [name for name in MODULES if name not in TALKERS])
def test_only_comm_and_mesh_touch_torch_distributed(name):
    tree = at_run_time(TREES[name])
    assert [full for full in imports(tree) if inside(full, "torch.distributed")] == []
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert [text for text in attributes if inside(text, "torch.distributed") or inside(text, "dist")] == []


@pytest.mark.parametrize("name", [name for name in MODULES if name not in TALKERS])
def test_only_comm_and_mesh_call_collectives(name):
    dotted = [call.rpartition(".") for call in calls(TREES[name])]
    ours = ("comm", "_comm", "everyone")  # our Comm, which meters and names them
    assert [".".join(c) for c in dotted if c[2] in COLLECTIVES and c[0].rpartition(".")[2] not in ours] == []


@pytest.mark.parametrize("name", MODULES)
def test_no_module_can_be_made_to_run_what_a_file_says(name):
    assert list(unsafe(TREES[name])) == []


UNSAFE = [
    "import pickle", "from joblib import load", "from torch import load", "import torch.serialization as s; s.load(p)",
    "from torch.serialization import load", "torch.serialization.load(p)", "from numpy import load", "np.load(p)",
    "import builtins; builtins.eval(p)", "run = eval", "map(exec, texts)", "__import__('pickle')", "read = torch.load",
]  # fmt: skip


@pytest.mark.parametrize("text", UNSAFE)
def test_what_would_run_a_file_is_seen_under_any_name(text):
    assert list(unsafe(ast.parse(text)))


@pytest.mark.parametrize("name", MODULES)
def test_no_module_prints(name):
    assert "print" not in set(calls(TREES[name]))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_opens_with_its_idea(name):
    assert ast.get_docstring(TREES[name])
