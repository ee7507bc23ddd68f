"""The order of the house: who may import whom, who may talk to other ranks, and what no module does."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import onefold

# Each room imports only rooms before it, and its own files in one order.
ROOMS = [
    "version", "errors", "settings", "comm", "cost", "model", "offload", "state", "runtime",
    "optim.kernels", "optim", "parallel", "activations", "sharding", "observe.profiling", "observe",
    "checkpoint.format", "checkpoint.protocol", "checkpoint.memory", "planner", "planner.page",
    "integrations.checkpoints", "integrations", "train.run", "train.report", "__init__", "lightning", "hf", "cli",
]  # fmt: skip
DOORS = {"hf.__init__", "lightning.__init__"}  # packages with public names, which import their framework when asked
IN_THE_ROOT = {"__init__", "sharding", "errors", "version"}

SOURCE = Path(onefold.__file__).parent
FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}
MODULES = [name for name in FILES if not name.endswith(".__init__")]  # of packages only ours says anything

TALKERS = ("parallel.pipeline", "train.run.tensor_parallel")  # beside comm/: by torch's own schedules and plans
ALONE = ("integrations.checkpoints.exporting",)  # writes torch's own format by its library, in one process
READER = "integrations.checkpoints.unpickle"  # a process of its own, in a sandbox, reads pickle; nobody imports it
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


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all imports, wherever they stand: `from a import b` may mean a or a.b, and gives both."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(["onefold"] * bool(node.level) + [node.module] * bool(node.module))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_run_time(name: str) -> ast.Module:
    """A module without what only type checkers read."""

    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)

    return Strip().visit(ast.parse(FILES[name].read_text()))


def dotted(node: ast.AST) -> str:
    """As ast.unparse has it, which takes seconds for all of the package."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


def calls(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything called."""
    yield from (dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


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
            first, _, rest = dotted(node).partition(".")
            if f"{aliases.get(first, first)}.{rest}" in UNSAFE_MEMBERS:
                yield dotted(node)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room(name: str) -> str:
    """The room of a module: the innermost of those it lies in, or the module itself in the package's root."""
    return max((one for one in ROOMS if inside(name, one)), key=len, default="none")


def used(name: str) -> list[str]:
    """Our modules that a module imports: at its top, inside functions, and for type checkers alone."""
    return sorted({full.removeprefix("onefold.") for full in imports(tree_of(name))} & set(MODULES))


def test_every_module_lies_in_a_room():
    assert [name for name in MODULES if room(name) == "none" or ("." not in name and name not in IN_THE_ROOT)] == []


def test_packages_hold_nothing_but_their_modules():
    faces = [name for name in FILES if name.endswith(".__init__") and name not in DOORS]
    assert [name for name in faces if len(ast.parse(FILES[name].read_text()).body) != 1] == []


def test_rooms_import_only_rooms_below_them():
    arrows = [(name, other) for name in MODULES for other in used(name)]
    assert [arrow for arrow in arrows if ROOMS.index(room(arrow[0])) < ROOMS.index(room(arrow[1]))] == []
    below = [name for name in MODULES if ROOMS.index(room(name)) < ROOMS.index("__init__")]
    assert [name for name in below if "onefold" in imports(tree_of(name))] == [], "the package imports its modules"


def test_the_house_stays_small():
    """Folders and modules of the package's root, with the benchmarks, the tools and the command: how many there are,
    how high they stand on each other, and who imports whom."""
    root = SOURCE.parents[1]
    outside = [*root.glob("src/*.py"), *root.glob("benchmarks/**/*.py"), *root.glob("tools/**/*.py")]
    trees = {f"onefold.{name}".removesuffix(".__init__"): tree_of(name) for name in [*MODULES, "__init__"]}
    for path in outside:
        name = path.relative_to(root / "src" if path.parent == root / "src" else root).with_suffix("").parts
        trees[".".join(name)] = ast.parse(path.read_text())

    def top(name: str) -> str:
        parts = name.split(".")
        return parts[0] if parts[0] != "onefold" or len(parts) == 1 else parts[1]

    arrows: dict[str, set[str]] = {top(name): set() for name in trees}
    for name, tree in trees.items():
        arrows[top(name)] |= {top(full) for full in imports(tree) if full in trees} - {top(name)}
    floors: dict[str, int] = {}
    for one in TopologicalSorter(arrows).static_order():
        floors[one] = 1 + max((floors[below] for below in arrows[one]), default=0)
    assert len(arrows) <= 25 and max(floors.values()) <= 12 and sum(map(len, arrows.values())) <= 150


def test_no_file_holds_two_ideas():
    """At most 500 lines; most have fewer than 300."""
    assert [name for name in FILES if len(FILES[name].read_text().splitlines()) > 500] == []


def test_files_of_a_room_have_an_order():
    try:
        list(TopologicalSorter({name: used(name) for name in MODULES}).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize(
    "name",
    [
        "settings.placement",
        "settings.widths",
        "cost.layout",
        "cost.arrivals",
        "comm.strategy",
        "comm.fitting",
        "errors",
    ],
)
def test_the_integers_know_nothing_of_torch(name):
    assert [full for full in imports(tree_of(name)) if inside(full, "torch")] == []


def test_only_comm_talks_to_other_ranks():
    offenders = []
    for name in (name for name in MODULES if room(name) != "comm" and name not in TALKERS + ALONE):
        tree = at_run_time(name)
        offenders += [(name, full) for full in imports(tree) if inside(full, "torch.distributed")]
        attributes = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        offenders += [(name, at) for at in attributes if inside(at, "torch.distributed") or inside(at, "dist")]
        called = [call.rpartition(".") for call in calls(tree_of(name))]
        ours = (
            "comm",
            "_comm",
            "everyone",
            "holders",
            "tp",
            "replica",
            "_replicas",
        )  # Comms, which meter and name them
        offenders += [(name, c[2]) for c in called if c[2] in COLLECTIVES and c[0].rpartition(".")[2] not in ours]
    assert offenders == []


def test_no_module_can_be_made_to_run_what_a_file_says():
    assert [(name, found) for name in MODULES if name != READER for found in unsafe(tree_of(name))] == []


def test_only_a_process_of_its_own_reads_pickle_and_only_tensors():
    assert set(unsafe(tree_of(READER))) == {"pickle", "torch.load"}
    assert [name for name in MODULES if READER in used(name)] == []
    loads = [
        node for node in ast.walk(tree_of(READER)) if isinstance(node, ast.Call) and "torch.load" in ast.unparse(node)
    ]
    assert [ast.unparse(node) for node in loads] == [
        "torch.load(file, map_location='cpu', weights_only=True, **options)"
    ]


UNSAFE = [
    "import pickle", "from joblib import load", "from torch import load", "import torch.serialization as s; s.load(p)",
    "from torch.serialization import load", "torch.serialization.load(p)", "from numpy import load", "np.load(p)",
    "import builtins; builtins.eval(p)", "run = eval", "map(exec, texts)", "__import__('pickle')", "read = torch.load",
]  # fmt: skip


@pytest.mark.parametrize("text", UNSAFE)
def test_what_would_run_a_file_is_seen_under_any_name(text):
    assert list(unsafe(ast.parse(text)))


def test_no_module_prints():
    assert [name for name in MODULES if "print" in set(calls(tree_of(name)))] == []


def test_every_module_opens_with_its_idea():
    assert [name for name in MODULES if not ast.get_docstring(tree_of(name))] == []
