"""A wrong setting raises at once, and the message names the field, what was found and what to do."""

import dataclasses
import inspect
import re

import pytest
from torch import nn

from onefold import ConfigError, OnefoldError, Zero
from onefold.runtime.accumulating import check_reduce
from onefold.settings.placement import STAGES, Scope

NAN, INF = float("nan"), float("inf")

KNOWN_STAGES = ", ".join(map(str, STAGES))

BAD = [
    *[("stage", value, f"use one of {KNOWN_STAGES}") for value in (-1, 7, "2", None, True, 1.0, [1])],
    *[("bucket_bytes", value, "try 128 << 20") for value in (0, -1, 1e6, "32MB", None, True)],
    *[("buffers", value, "use one of 'local', 'rank0'") for value in ("rank1", None, True, ["local"])],
    *[("sync", value, "use one of 'rank0', 'check'") for value in ("rank1", None, False, 0)],
    *[("timeout_s", value, "try 600") for value in (0, -1.0, NAN, INF, "600", None, True, 1e300)],
    *[("units", value, "callable") for value in ("Block", 3, [nn.Linear], nn.Linear(1, 1))],
    *[("units", value, "module class") for value in (int, (int,), (nn.Linear, "Block"), (nn.Linear(1, 1),))],
]


@pytest.mark.parametrize("field, value, remedy", BAD, ids=[f"{field}={value!r}" for field, value, _ in BAD])
def test_a_bad_value_raises_an_error_that_names_field_value_and_remedy(field, value, remedy):
    with pytest.raises(ConfigError) as caught:
        Zero(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}={value!r} ")
    assert remedy in message


def test_a_config_error_is_a_value_error_and_one_of_ours():
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, OnefoldError)


@pytest.mark.parametrize(
    "fields",
    [{"stage": stage} for stage in STAGES]
    + [{"bucket_bytes": 1}, {"buffers": "rank0"}, {"sync": "check"}, {"timeout_s": 1}, {"timeout_s": 0.5}]
    + [{"units": nn.Linear}, {"units": (nn.Linear, nn.Conv2d)}, {"units": lambda name, module: True}],
    ids=lambda fields: re.sub(" at 0x[0-9a-f]*", "", str(fields)),
)
def test_good_values_are_kept_as_they_were_given(fields):
    ((name, value),) = fields.items()
    assert getattr(Zero(**fields), name) is value


def test_an_unknown_setting_is_named_beside_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown setting stgae; known are activations, bucket.*stage.*units"):
        Zero.of(None, {"stgae": 2})


def test_something_else_in_place_of_a_zero_object_is_named():
    with pytest.raises(ConfigError, match=r"a Zero object or keywords, found int: 2"):
        Zero.of(2, {})


def test_keywords_override_the_object_and_are_validated_too():
    base = Zero(stage=1, bucket_bytes=64)
    assert Zero.of(base, {"stage": 0}) == Zero(stage=0, bucket_bytes=64)
    assert Zero.of(base, {}) == base
    assert Zero.of(None, {"stage": 1, "bucket_bytes": 64}) == base
    with pytest.raises(ConfigError, match="stage=9"):
        Zero.of(base, {"stage": 9})


def test_a_config_cannot_be_changed():
    zero = Zero()
    for field in dataclasses.fields(Zero):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(zero, field.name, getattr(zero, field.name))


def test_fields_are_keyword_only():
    assert all(field.kw_only for field in dataclasses.fields(Zero))
    with pytest.raises(TypeError):
        Zero(2)


def test_every_field_is_documented_under_it():
    lines = inspect.getsource(Zero).splitlines()
    for field in dataclasses.fields(Zero):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
        assert lines[at + 1].strip().startswith('"""'), field.name


def test_ranks_compare_every_setting_that_changes_what_they_send():
    base = Zero().describe()
    for change in ({"stage": 0}, {"bucket_bytes": 64}, {"buffers": "rank0"}, {"sync": "check"}):
        assert Zero(**change).describe() != base
    assert Zero(timeout_s=5.0).describe() == base  # how long one rank waits is its own affair


@pytest.mark.parametrize("value", ["twice", "", True, 1], ids=repr)
def test_a_bad_reduce_names_field_value_and_remedy(value):
    with pytest.raises(ConfigError) as caught:
        check_reduce(value)
    assert str(caught.value) == f"reduce={value!r} is unknown; use one of 'once', 'each'"


def test_good_values_of_reduce_pass():
    for value in (None, "once", "each"):
        check_reduce(value)


def test_each_stage_shards_one_more_state_than_the_one_before():
    for stage, row in STAGES.items():
        sharded = [state for state, scope in row._asdict().items() if scope is Scope.SHARDED]
        assert sharded == ["optimizer", "gradients", "parameters"][:stage]


def test_over_one_rank_every_stage_keeps_everything_whole():
    for stage in STAGES.values():
        assert stage.over(1) == STAGES[0]
        assert stage.over(2) == stage
