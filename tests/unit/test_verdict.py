"""Whoever ended first is named, whatever the others say about it."""

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from onefold.cli.verdict import Exit, ReportedError, verdict
from onefold.comm.last_words import Level
from onefold.errors import CommError

TIMEOUT_S = 8.0


def peer(rank: int, at_s: float) -> ReportedError:
    return ReportedError(rank, f"rank {rank}: no answer from its peer", Level.PEER, "CommError", at_s)


@given(st.permutations(range(4)), st.floats(0, 5))
def test_a_killed_rank_is_named_whatever_its_peers_say(order, later):
    dead, *others = order
    words = [peer(rank, at_s=1.0 + later) for rank in others]
    exits = [Exit(dead, -9, 1.0), *(Exit(rank, 1, 1.1 + later) for rank in others)]
    outcome = verdict(words, exits, {}, TIMEOUT_S)
    assert outcome.message == f"rank {dead} was killed by SIGKILL" and outcome.lost


@given(st.permutations(range(3)))
def test_a_rank_that_is_stopped_is_named_before_those_who_missed_it(order):
    stopped, *others = order
    outcome = verdict([peer(rank, 1.0) for rank in others], [], {stopped: 8.1}, TIMEOUT_S)
    assert f"rank {stopped} was stopped" in outcome.message and "for 8 s" in outcome.message and outcome.lost


def test_the_earliest_of_several_errors_is_named_and_another_start_is_of_no_use():
    late = ReportedError(1, "late", Level.OWN, "ValueError", 2.0)
    first = ReportedError(0, "rank 0: first", Level.OWN, "KeyError", 1.0)
    outcome = verdict([late, first], [Exit(0, 1, 1.1), Exit(1, 1, 2.1)], {}, TIMEOUT_S)
    assert (outcome.message, outcome.kind, outcome.lost) == ("rank 0: first", "KeyError", False)


def test_an_error_that_made_another_process_abort_is_the_one_named():
    outcome = verdict([ReportedError(0, "out of memory", Level.OWN, "X", 1.0)], [Exit(1, -6, 1.2)], {}, TIMEOUT_S)
    assert outcome.message == "out of memory"


def test_a_rank_that_left_early_is_named_though_it_left_well():
    outcome = verdict([peer(0, 2.0)], [Exit(1, 0, 1.0)], {}, TIMEOUT_S)
    assert outcome.message.startswith("rank 1 ended, with exit code 0")


def test_ranks_that_disagree_say_so_once():
    words = [ReportedError(r, "the model differs", Level.AGREED, "MismatchError", 1.0) for r in (1, 0)]
    assert verdict(words, [], {}, TIMEOUT_S) == (1, "the model differs", "MismatchError", False, ())


def test_what_a_backend_says_of_a_peer_is_no_error_of_the_rank_that_heard_it():
    said = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert Level.of(said) is Level.of(dist.DistNetworkError("reset")) is Level.of(CommError("gone")) is Level.PEER
    assert Level.of(RuntimeError("mine")) is Level.of(ValueError("gloo/transport")) is Level.OWN
