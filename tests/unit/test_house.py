"""The order of the house: who may import whom, who may talk to other ranks, and what no module does."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold

# Each module imports only modules before it.
ORDER = [
    "version", "errors",
    "settings.widths", "files.trust", "optim.kernels.cache", "files.visible", "files.limited", "settings.placement",
    "settings.offload", "cost.layout",
    "cost.text",
    "runtime.scaled",
    "cost.limits", "cost.shapes", "cost.sizes", "cost.states", "cost.traffic",
    "settings.precision", "optim.loss_scale", "state.rounding", "optim.kernels.rule", "comm.spans",
    "optim.kernels.compiled", "optim.kernels.threads", "optim.kernels.update", "comm.meter", "comm.sums",
    "comm.inflight", "settings.zero", "cost.activations", "model.blocks", "model.dtensor_shards", "comm.buffers",
    "model.storage",
    "observe.tracker",
    "offload.host_memory", "offload.files", "offload.disk", "offload.host", "offload.image", "offload.tiers",
    "state.views", "model.survey", "comm.rendezvous", "comm.mesh", "comm.communicator", "comm.agreement",
    "state.edits", "state.flat_parameters", "state.master", "offload.transfer", "state.gradients", "state.staging",
    "state.unit", "runtime.reduce_schedule", "cost.prefetch", "runtime.timer", "runtime.gather_schedule",
    "runtime.unsharding", "state.visible_gradients", "model.tree", "runtime.phases", "runtime.untied",
    "runtime.update_policy", "runtime.whole_gradients", "runtime.engine", "model.containers", "runtime.casts",
    "runtime.hooks", "activations.arena", "activations.transfers", "activations.store", "activations.recompute",
    "activations.policy", "optim.elementwise", "optim.kernels.fused", "optim.unit_optimizer", "optim.optimizer_state",
    "optim.finite", "optim.workers", "optim.update_at_step", "optim.host_update", "optim.update_in_backward",
    "optim.preflight", "optim.optimizer", "optim.scheduler", "runtime.full_parameters", "observe.inventory",
    "observe.reports", "model.meta", "observe.profiling.intervals", "observe.profiling.trace",
    "observe.profiling.breakdown", "observe.profiling.report", "observe.profiling.profile", "cost.hardware",
    "cost.transfers", "cost.machine", "cost.seconds", "cost.arrivals", "cost.peak", "cost.work", "cost.estimate",
    "cost.search", "planner.throughput", "cost.automatic", "activations.automatic", "runtime.automatic", "shard",
    "parallel.tied", "parallel.pipeline", "checkpoint.format.storage", "checkpoint.format.tensorfile",
    "checkpoint.format.order", "checkpoint.format.manifest",
    "checkpoint.format.folder", "checkpoint.protocol.commit",
    "checkpoint.format.reading", "checkpoint.format.verify", "checkpoint.format.weights", "checkpoint.format.export",
    "checkpoint.format.notes", "checkpoint.protocol.state", "checkpoint.protocol.own", "checkpoint.protocol.stages",
    "checkpoint.protocol.together", "checkpoint.protocol.quiesce", "checkpoint.protocol.background",
    "checkpoint.protocol.save", "checkpoint.protocol.names", "checkpoint.protocol.restore",
    "checkpoint.protocol.load", "observe.rehearsal", "planner.rows", "planner.plan", "planner.measure",
    "train.run.model", "train.run.tensor_parallel", "train.run.folder", "train.run.records", "train.run.sampling",
    "train.run.lock", "train.run.settings", "train.run.toml", "train.run.tokens", "train.run.cache",
    "train.run.source", "train.run.tokenizer", "train.run.digest", "train.run.data", "train.run.same",
    "train.run.schedule", "train.run.stop", "train.run.diagnose", "train.run.metrics", "train.run.profiled",
    "train.run.notes", "train.run.board", "train.run.environment", "train.run.probe", "train.run.loop",
    "train.run.start", "train.run.clean", "train.report.figures", "train.report.words", "train.report.charts",
    "train.report.page", "train.report.sections", "train.report.comparison", "train.report.report",
    "train.run.sample", "train.run.cut", "observe.utilization", "observe.simulation", "__init__", "cli.subject",
    "cli.tables", "cli.plots", "cli.throughput", "cli.lifeline", "cli.ranks", "cli.verdict", "cli.launch", "cli.plan",
    "cli.verify", "cli.simulate", "cli.checkpoint", "cli.report", "cli.sample", "cli.run", "cli.screen", "cli.train",
    "cli.main",
]  # fmt: skip

SOURCE = Path(onefold.__file__).parent
FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}
MODULES = [name for name in FILES if not name.endswith(".__init__")]  # of packages only ours says anything
TREES = {name: ast.parse(FILES[name].read_text()) for name in MODULES}

TALKERS = (
    "comm.communicator", "comm.mesh", "comm.rendezvous", "parallel.pipeline", "train.run.tensor_parallel",
)  # the last two by torch's own schedules
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
    faces = [name for name in FILES if name.endswith(".__init__")]
    assert [name for name in faces if len(ast.parse(FILES[name].read_text()).body) > 1] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_modules_before_it(name):
    inner = {full.removeprefix("onefold.") for full in imports(TREES[name])} & set(MODULES)
    assert [other for other in sorted(inner) if ORDER.index(other) >= ORDER.index(name)] == []
    assert "onefold" not in imports(TREES[name]), "the package imports its modules, not the other way round"


@pytest.mark.parametrize("name", ["settings.placement", "cost.layout", "errors"])
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
