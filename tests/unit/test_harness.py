"""What the warm pool promises to the tests that use it."""

import os
import random
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks, run_ranks_raises


def rank_and_sum(offset, *, scale):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), offset + scale * total.item()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_rank_returns_its_own_value_and_collectives_are_real(n):
    expected = 10 + 2 * sum(range(n))
    assert run_ranks(n, rank_and_sum, 10, scale=2) == [(rank, n, expected) for rank in range(n)]


def turns(task):
    return os.sched_getscheduler(int(task.name)), os.getpriority(os.PRIO_PROCESS, int(task.name))


def turns_of_threads():
    group = dist.new_group([0, 1])
    tasks = list(Path("/proc/self/task").iterdir())
    gloo = [turns(task) for task in tasks if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    dist.destroy_process_group(group)
    return turns(Path(str(os.getpid()))), gloo


def test_ranks_take_turns_and_gloos_threads_come_after_them():
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    for rank, gloo in run_ranks(2, turns_of_threads):
        assert rank == (os.SCHED_BATCH, nice)
        assert len(gloo) >= 2 and set(gloo) == {(os.SCHED_BATCH, 19)}, "other groups may be alive, too"


def negate(tensor):
    tensor.neg_()
    return tensor, tensor[1:], torch.nn.Parameter(tensor.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_cross_by_value(dtype):
    sent = torch.arange(4).to(dtype)
    for whole, view, parameter in run_ranks(2, negate, sent):
        assert torch.equal(whole, -torch.arange(4).to(dtype)) and whole.dtype == dtype
        assert torch.equal(view, whole[1:])
        assert parameter.requires_grad
        assert not whole.is_shared()
    assert torch.equal(sent, torch.arange(4).to(dtype))


def large(numel):
    return torch.ones(numel)


def test_results_and_arguments_larger_than_a_pipe_arrive():
    numel = 1 << 20
    assert all(value.numel() == numel for value in run_ranks(2, large, numel))
    assert run_ranks(2, torch.numel, torch.ones(numel)) == [numel, numel]


def environ():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ[name] for name in names}, int(os.environ["MASTER_PORT"])


def test_the_environment_is_torchruns():
    for rank, (found, port) in enumerate(run_ranks(2, environ)):
        assert found == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert port > 0


def make_groups():
    group = dist.new_group([0, 1])
    dist.barrier(group)
    return os.getpid()


def count_groups():
    dist.barrier()
    return os.getpid(), len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))


def test_the_same_processes_serve_every_call_and_groups_do_not_pile_up():
    pids = run_ranks(2, os.getpid)
    assert os.getpid() not in pids and len(set(pids)) == 2
    before = run_ranks(2, count_groups)
    for _ in range(10):
        assert run_ranks(2, make_groups) == pids
    after = run_ranks(2, count_groups)
    assert [count[:2] for count in after] == [(pid, 1) for pid in pids]
    for (_, _, threads_before), (_, _, threads_after) in zip(before, after):
        assert threads_after < threads_before + 10, "each group left behind would be two threads or more"


def destroy_the_default_group():
    dist.destroy_process_group()


def test_a_call_may_destroy_the_default_group():
    pids = run_ranks(2, os.getpid)
    run_ranks(2, destroy_the_default_group)
    assert [pid for pid, _, _ in run_ranks(2, count_groups)] == pids


def spoil():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.backends.mkldnn.set_flags(False)
    torch.use_deterministic_algorithms(True)
    torch.rand(3), random.random(), numpy.random.rand()
    warnings.simplefilter("error")
    os.environ["RANK"] = "99"
    os.environ["SPOILED"] = "1"
    os.chdir("/")


def observe():
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "draws": (torch.rand(3).tolist(), random.random(), numpy.random.rand()),
        "filters": warnings.filters[:],
        "environ": dict(os.environ),
        "folder": os.getcwd(),
    }


def test_no_call_sees_what_an_earlier_one_changed():
    before = run_ranks(2, observe)
    run_ranks(2, spoil)
    assert run_ranks(2, observe) == before
    assert before[0]["threads"] == 1 and before[0]["dtype"] == torch.float32 and before[0]["grad"]
    assert before[0]["draws"] == before[1]["draws"]


def refuse(reason):
    raise ValueError(f"rank {dist.get_rank()}: {reason}")


def test_expected_exceptions_are_returned_and_the_pool_lives_on():
    pids = run_ranks(2, os.getpid)
    first, second = run_ranks_raises(2, refuse, "no")
    assert (first.type_name, first.message) == ("ValueError", "rank 0: no")
    assert (second.type_name, second.message) == ("ValueError", "rank 1: no")
    assert 0 <= first.seconds < 10
    assert run_ranks(2, os.getpid) == pids


def make_one_group_too_many_then_refuse():
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    raise ValueError("out of step")


def test_ranks_that_raised_out_of_step_are_in_step_again_in_the_next_call():
    run_ranks_raises(2, make_one_group_too_many_then_refuse)
    run_ranks(2, make_groups)


def refuse_on_rank_0():
    if dist.get_rank() == 0:
        raise ValueError("no")
    return "fine"


def test_a_rank_that_should_raise_but_returns_fails_the_test():
    with pytest.raises(AssertionError, match="rank 1 was expected to raise, but returned 'fine'"):
        run_ranks_raises(2, refuse_on_rank_0)


def test_a_function_that_ranks_cannot_import_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="must be defined at module level"):
        run_ranks(2, lambda: None)
