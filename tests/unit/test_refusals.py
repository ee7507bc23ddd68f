"""The table of refusals: each has a text with a remedy, and errors about the moment of a call come from it alone."""

import ast
import re
from pathlib import Path
from string import Formatter

import pytest

import onefold
from onefold.errors import StateError
from onefold.runtime.refusals import REFUSALS, REFUSED_IN, Call, Situation, refuse
from onefold.runtime.situations import SITUATION_CHECKS

SOURCE = Path(onefold.__file__).parent
FACTS = {"unit": "blocks.0", "name": "blocks.0.weight", "use": "add_()", "before": 1.0, "now": 2.0}
REMEDY = re.compile(r"\b(call|leave|use|load|scale|clip after|must get its gradient once)\b")
BY_THE_CALLER = {  # situations that only the code that makes the call can see
    Situation.SHARDED, Situation.RELEASED, Situation.NO_GRADIENTS, Situation.NO_RANK_HAS_GRADIENTS,
    Situation.UNIT_UPDATED, Situation.REPLACED, Situation.TRANSFORMED, Situation.UNEVEN_BACKWARDS,
    Situation.OLD_GRAPH,
}  # fmt: skip

# StateErrors outside the table, by file: each is about content, and would be as wrong at any other moment.
ABOUT_CONTENT = {
    "activations/store.py": 1,  # a block writes to its input
    "activations/tiled_loss.py": 1,  # a second derivative
    "comm/mesh.py": 2,  # no process group: there is no model yet
    "comm/simulated_world.py": 1,  # a process that has joined ranks cannot simulate others
    "hf/accelerator.py": 3,  # optimizers that were not prepared, parameters of none, a call of DDP's
    "model/tree.py": 2,  # a parameter was added, replaced or removed
    "observe/profiling/profile.py": 3,  # the profiler's own life
    "offload/disk.py": 2,  # the files' own life
    "optim/foreign_checkpoints.py": 1,  # DCP, which reads and writes one rank's state
    "optim/optimizer.py": 4,  # other saved state; copies; GradScaler
    "optim/unit_optimizer.py": 1,  # other saved state
    "optim/whole_unit_optimizer.py": 1,  # other saved state
    "parallel/pipeline.py": 1,  # a schedule that divides .grad
    "runtime/casts.py": 1,  # a state dict cut in another way
    "runtime/engine.py": 1,  # copies
    "runtime/full_parameters.py": 1,  # a parameter split along an unknown dim
    "runtime/hooks.py": 1,  # assign=True
    "runtime/moves.py": 1,  # .to() and .half()
    "runtime/quantized_modules.py": 1,  # .to() of a 4-bit weight
    "runtime/refusals.py": 1,  # the table's own
    "runtime/user_writes.py": 1,  # a write inside a context for reading
    "state/flat_parameters.py": 2,  # a parameter left its buffer, or was written
    "state/guarded_parameters.py": 1,  # the model is gone
    "state/transitions.py": 1,  # a fault of ours
    "state/visible_gradients.py": 3,  # .grad was replaced, or used; a plain torch optimizer
}


@pytest.mark.parametrize("situation", Situation)
@pytest.mark.parametrize("call", Call)
def test_a_refused_call_hears_what_to_do_and_any_other_is_not_looked_at(call, situation):
    if (call, situation) not in REFUSALS:
        assert situation not in REFUSED_IN[call]
        return
    with pytest.raises(StateError) as caught:
        refuse(call, situation, **FACTS)
    said = str(caught.value)
    assert REMEDY.search(said) and "\n" not in said and "{" not in said
    assert {field for _, field, _, _ in Formatter().parse(REFUSALS[call, situation]) if field} <= set(FACTS)


def test_every_call_and_every_situation_is_in_the_table_and_every_situation_can_be_seen():
    assert {call for call, _ in REFUSALS} == set(Call)
    assert {situation for _, situation in REFUSALS} == set(Situation)
    assert set(SITUATION_CHECKS) | BY_THE_CALLER == set(Situation) and not set(SITUATION_CHECKS) & BY_THE_CALLER


def state_errors(path: Path) -> list[int]:
    """Lines that make a StateError with a text of their own."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if ast.unparse(call.func) == "StateError"]


def test_no_error_about_the_moment_of_a_call_is_written_outside_the_table():
    found = {str(path.relative_to(SOURCE)): state_errors(path) for path in sorted(SOURCE.rglob("*.py"))}
    offenders = {name: lines for name, lines in found.items() if len(lines) != ABOUT_CONTENT.get(name, 0)}
    assert offenders == {}, "put what depends on the moment into runtime/refusals.py, and count what is about content"
