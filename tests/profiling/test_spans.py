"""A span costs next to nothing while nobody profiles, and any unit's name comes back from a trace."""

from __future__ import annotations

import json
import timeit

from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from onefold.comm.spans import NOTHING, SpanName, read, span, span_name

words = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1)
odd = 'a "b" \\c …\n\tüber %41 <d>'


class Unspeakable:
    """Nobody may ask for its name."""

    def __str__(self) -> str:
        raise AssertionError("a name was made for nobody")


def test_while_nobody_profiles_no_name_is_made_and_a_span_takes_less_than_a_microsecond() -> None:
    assert span("wait", "gather", Unspeakable()) is NOTHING  # type: ignore[arg-type]

    def site() -> None:
        with span("wait", "gather-forward", "blocks.0"):
            pass

    assert min(timeit.repeat(site, number=2000, repeat=50)) / 2000 < 1e-6


@given(words, words, st.text(st.characters(exclude_categories=["Cs"])).filter(lambda of: "..." not in of))
def test_a_name_is_plain_text_and_reads_back_as_it_was(verb: str, what: str, of: str) -> None:
    name = span_name(verb, what, of)
    assert name.isascii() and name.isprintable() and '"' not in name and "\\" not in name
    assert read(name) == SpanName(verb, what, of)


def test_a_span_that_was_open_when_another_thread_began_to_profile_ends_quietly() -> None:
    """torch's own object raises then; an update on the host would have failed with it."""
    before, profiler._is_profiler_enabled = profiler._is_profiler_enabled, True
    try:
        begun = span("update", "host", "blocks.0")
        begun.__enter__()
    finally:
        profiler._is_profiler_enabled = before
    with profile(activities=[ProfilerActivity.CPU]):
        begun.__exit__(None, None, None)


def test_a_user_who_runs_torchs_profiler_finds_our_spans_by_any_name(tmp_path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found, span("wait", "gather-forward", odd):
        pass
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert SpanName("wait", "gather-forward", odd) in [read(event["name"]) for event in events]
