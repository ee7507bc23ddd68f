"""Each known failure has a sentence with its remedy, and none is said of a run that is well."""

import logging
import os
import signal
import time
import warnings
from itertools import pairwise

import pytest
import torch

from onefold.train.run.diagnose import falling_scale, is_out_of_memory, lost_updates, out_of_memory, small_messages
from onefold.train.run.metrics import collect_warnings
from onefold.train.run.schedule import learning_rate
from onefold.train.run.stop import Stop


def test_a_scale_that_keeps_falling_is_noticed_and_one_that_settles_is_not():
    falling = [2.0**k for k in range(16, 4, -1)]
    assert "--precision bf16" in falling_scale(falling).message
    assert falling_scale([65536.0, 32768.0, 16384.0] + [16384.0] * 90) is None
    assert falling_scale([1.0] * 10) is None


def test_lost_updates_are_those_that_had_a_gradient_and_did_not_move():
    assert "60% of the parameters" in lost_updates(40, 100, 1e-9).message
    assert lost_updates(90, 100, 1e-3) is None
    assert lost_updates(0, 0, 1e-3) is None


def test_latency_names_the_remedy_that_helps():
    assert "raise --bucket-mb" in small_messages(100, 1e-3, 0.2, cut=True).message
    assert "raise --micro-batch" in small_messages(100, 1e-3, 0.2, cut=False).message
    assert small_messages(100, 1e-4, 1.0, cut=True) is None


@pytest.mark.parametrize(
    ("sizes", "stage", "batch", "said"),
    [
        ({"activations": 9, "optimizer": 2}, 3, 8, "activations grew .*; halve --micro-batch 8 and double --accum"),
        ({"activations": 9, "optimizer": 2}, 3, 1, "activations grew .*; compute blocks again"),
        ({"activations": 1, "optimizer": 9}, 1, 8, "model states grew .*; use a higher --stage than 1"),
        ({"activations": 1, "optimizer": 9}, 3, 8, "model states grew .*; use more ranks"),
        ({"communication": 9, "optimizer": 2}, 3, 8, "buffers grew .*; lower --bucket-mb"),
    ],
)
def test_out_of_memory_names_what_grew(sizes, stage, batch, said):
    error = out_of_memory({k: v << 30 for k, v in sizes.items()}, where="forward", stage=stage, micro_batch=batch)
    with pytest.raises(MemoryError, match=said):
        raise error


def test_a_real_failed_allocation_is_known_for_what_it_is():
    with pytest.raises(Exception) as error:
        torch.empty(1 << 60)
    assert is_out_of_memory(error.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_warnings_and_logs_are_collect_warnings_and_then_left_alone_again():
    heard = []
    with collect_warnings(lambda kind, message: heard.append((kind, message))):
        warnings.warn("one", stacklevel=1)
        logging.getLogger("onefold").warning("two %s", "words")
        logging.getLogger("onefold").info("nothing")
    with warnings.catch_warnings(record=True):
        warnings.warn("later", stacklevel=1)
    assert heard == [("UserWarning", "one"), ("log", "two words")]


def test_signals_that_come_together_are_one():
    with Stop() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while not stop.asked and time.monotonic() < deadline:
            pass
        assert stop.asked


def test_the_learning_rate_rises_in_a_line_and_falls_to_the_least():
    rates = [learning_rate(k, steps=100, warmup=10, lr=1.0, min_lr=0.1) for k in range(120)]
    assert rates[:10] == pytest.approx([0.1 * (k + 1) for k in range(10)])
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert rates[99] == pytest.approx(0.1) and rates[119] == pytest.approx(0.1)
