"""Every element has one owner, padding is nobody's, and resharding loses nothing: on random models and by hand."""

from itertools import groupby, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.cost.layout import (
    ALIGN,
    SHARED_BYTES,
    Move,
    ParamInfo,
    Piece,
    Span,
    UnitLayout,
    padded,
    plan_units,
    reshard,
)

ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2}
SMALL = st.one_of(st.sampled_from([0, 1, ALIGN - 1, ALIGN, ALIGN + 1]), st.integers(0, 700))
ANY_SIZE = st.one_of(SMALL, st.integers(0, 10**12))
RANKS = st.integers(1, 9)
BUCKETS = st.one_of(st.integers(1, 5000), st.integers(1, 10**13))

fast = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def models(draw: st.DrawFn, sizes: st.SearchStrategy[int] = ANY_SIZE) -> list[ParamInfo]:
    """Parameters in registration order; kinds and blocks come and go."""
    rows = draw(st.lists(st.tuples(sizes, st.sampled_from(sorted(ITEMSIZE)), st.sampled_from(["", "", "x", "y"]))))
    return [
        ParamInfo(f"{block}.{i}" if block else f"p{i}", numel, ITEMSIZE[kind], kind, block)
        for i, (numel, kind, block) in enumerate(rows)
    ]


# -- units -------------------------------------------------------------------------------------------------------------


@fast
@given(models(), RANKS, BUCKETS)
def test_every_parameter_lies_in_exactly_one_unit_of_its_kind_in_registration_order(params, ranks, bucket):
    """Of one block where blocks share nothing; else of neighbouring blocks, or of what is outside every block."""
    check_units(params, plan_units(params, ranks, bucket, shared_bytes=0), blocks_share=False)
    check_units(params, plan_units(params, ranks, bucket), blocks_share=True)


def check_units(params: list[ParamInfo], units: list[UnitLayout], *, blocks_share: bool) -> None:
    assert sorted(slot.name for unit in units for slot in unit.slots) == sorted(p.name for p in params)
    infos = {p.name: (place, p) for place, p in enumerate(params)}
    for unit in units:
        members = [infos[slot.name] for slot in unit.slots]
        assert members and members == sorted(members)
        assert {(p.kind, p.itemsize) for _, p in members} == {(unit.kind, unit.itemsize)}
        assert len({p.block if not blocks_share else bool(p.block) for _, p in members}) == 1
        assert [slot.numel for slot in unit.slots] == [p.numel for _, p in members]


@fast
@given(models(), RANKS, BUCKETS)
def test_a_unit_is_bounded_by_bucket_bytes_unless_it_is_a_single_parameter(params, ranks, bucket):
    for unit in plan_units(params, ranks, bucket):
        assert len(unit.slots) == 1 or unit.body.numel * unit.itemsize <= bucket


@fast
@given(models(), RANKS, BUCKETS)
def test_a_parameter_as_large_as_a_bucket_stands_alone_and_smaller_ones_of_a_block_share_across_it(
    params, ranks, bucket
):
    """Of one kind and one block, a unit is closed only where the next small parameter does not fit; outside every block
    also where a large one comes."""
    runs = {p.name: number for number, (_, run) in enumerate(groupby(params, key=lambda p: p.block)) for p in run}
    blocks = {p.name: p.block for p in params}
    last: dict[tuple[int, str], UnitLayout] = {}
    for unit in plan_units(params, ranks, bucket):
        limit = bucket if blocks[unit.slots[0].name] else min(bucket, SHARED_BYTES)
        large = [slot for slot in unit.slots if padded(slot.numel) * unit.itemsize >= limit]
        key = (runs[unit.slots[0].name], unit.kind)
        if large:
            assert len(unit.slots) == 1
            if not blocks[unit.slots[0].name]:
                last.pop(key, None)
            continue
        if key in last:
            assert (last[key].body.numel + padded(unit.slots[0].numel)) * unit.itemsize > limit
        last[key] = unit


def test_units_of_a_wide_block_are_its_matrices_and_one_for_all_the_rest():
    """24 layers of 4096 in bf16, with 32 MiB: five units a block, where neighbours alone would make nine."""
    sizes = {"norm1": 8192, "qkv": 3 << 24, "qkv.bias": 12288, "out": 1 << 24, "out.bias": 4096, "norm2": 8192}
    sizes |= {"up": 1 << 26, "up.bias": 16384, "down": 1 << 26, "down.bias": 4096}
    params = [ParamInfo(name, numel, 2, "bf16", "layers.0") for name, numel in sizes.items()]
    units = [[slot.name for slot in unit.slots] for unit in plan_units(params, 8, 32 << 20)]
    small = ["norm1", "qkv.bias", "out.bias", "norm2", "up.bias", "down.bias"]
    assert units == [small, ["qkv"], ["out"], ["up"], ["down"]]
    outside = [param._replace(block="") for param in params]
    assert len(plan_units(outside, 8, 32 << 20)) == 9, "who uses them when is not known"


@fast
@given(models(), RANKS, BUCKETS)
def test_unit_names_are_unique(params, ranks, bucket):
    names = [unit.name for unit in plan_units(params, ranks, bucket)]
    assert len(set(names)) == len(names)


@fast
@given(models(), BUCKETS)
def test_units_do_not_depend_on_the_number_of_ranks(params, bucket):
    plans = [[(u.name, u.kind, u.slots, u.body) for u in plan_units(params, n, bucket)] for n in range(1, 10)]
    assert all(plan == plans[0] for plan in plans)


# -- elements ----------------------------------------------------------------------------------------------------------


@fast
@given(models(), RANKS, BUCKETS)
def test_slots_and_gaps_tile_a_unit_without_overlap_and_padding_lies_only_behind_parameters(params, ranks, bucket):
    for unit in plan_units(params, ranks, bucket):
        spans = [slot.span for slot in unit.slots if slot.numel] + list(unit.gaps)
        at = 0
        for span in sorted(spans):
            assert span.start == at and span.numel > 0
            at = span.stop
        assert at == unit.numel
        assert unit.used_numel == unit.numel - sum(gap.numel for gap in unit.gaps)
        ends = {slot.span.stop for slot in unit.slots}
        assert all(gap.start in ends for gap in unit.gaps)
        assert all(gap.numel < ALIGN for gap in unit.gaps[:-1])


@fast
@given(models(), RANKS, BUCKETS)
def test_every_parameter_and_every_shard_starts_on_a_full_vector_and_shards_are_equal(params, ranks, bucket):
    for unit in plan_units(params, ranks, bucket):
        assert all(slot.start % ALIGN == 0 for slot in unit.slots)
        shards = [unit.shard(rank) for rank in range(ranks)]
        assert {shard.numel for shard in shards} == {unit.shard_numel}
        assert unit.shard_numel > 0 and unit.shard_numel % ALIGN == 0
        assert shards[0].start == 0 and shards[-1].stop == unit.numel
        assert all(one.stop == two.start for one, two in pairwise(shards))


@fast
@given(models(), RANKS, BUCKETS)
def test_shards_waste_less_than_one_vector_per_rank(params, ranks, bucket):
    for unit in plan_units(params, ranks, bucket):
        assert unit.numel - unit.body.numel < ALIGN * ranks or unit.body.numel == 0


@fast
@given(models(), RANKS, BUCKETS)
def test_every_element_is_owned_by_exactly_one_rank(params, ranks, bucket):
    owned: dict[str, list[Span]] = {p.name: [] for p in params}
    for unit in plan_units(params, ranks, bucket):
        starts = {slot.name: slot.start for slot in unit.slots}
        for rank in range(ranks):
            for piece in unit.pieces(rank):
                assert piece.elements.numel > 0
                assert 0 <= piece.offset <= unit.shard_numel - piece.elements.numel
                assert starts[piece.name] + piece.elements.start == unit.shard(rank).start + piece.offset
                owned[piece.name].append(piece.elements)
    for param in params:
        at = 0
        for elements in sorted(owned[param.name]):
            assert elements.start == at
            at = elements.stop
        assert at == param.numel


# -- resharding --------------------------------------------------------------------------------------------------------

Shards = dict[tuple[str, int], np.ndarray]


def numbered(units: list[UnitLayout], params: list[ParamInfo]) -> Shards:
    """Each shard filled with the global numbers of its elements, padding with -1; without asking `pieces`."""
    firsts = dict(zip([p.name for p in params], np.cumsum([0] + [p.numel for p in params]).tolist()))
    shards: Shards = {}
    for unit in units:
        whole = np.full(unit.numel, -1)
        for slot in unit.slots:
            whole[slot.start : slot.start + slot.numel] = firsts[slot.name] + np.arange(slot.numel)
        shards |= {(unit.name, rank): part for rank, part in enumerate(np.split(whole, unit.ranks))}
    return shards


def moved(shards: Shards, old: list[UnitLayout], new: list[UnitLayout]) -> Shards:
    """The shards after the moves; every element is written at most once."""
    result = {(unit.name, rank): np.full(unit.shard_numel, -1) for unit in new for rank in range(unit.ranks)}
    writes = {key: np.zeros(part.size, int) for key, part in result.items()}
    for move in reshard(old, new):
        at = slice(move.new_offset, move.new_offset + move.numel)
        source = shards[move.old_unit, move.old_rank][move.old_offset : move.old_offset + move.numel]
        result[move.new_unit, move.new_rank][at] = source
        writes[move.new_unit, move.new_rank][at] += 1
    assert all(count.max(initial=0) <= 1 for count in writes.values())
    return result


def same(one: Shards, two: Shards) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)


@settings(fast, max_examples=50)
@given(models(SMALL), RANKS, RANKS, st.integers(1, 6000), st.integers(1, 6000))
def test_resharding_to_other_ranks_and_buckets_and_back_loses_nothing(params, ranks, new_ranks, bucket, new_bucket):
    old = plan_units(params, ranks, bucket)
    new = plan_units(params, new_ranks, new_bucket)
    there = moved(numbered(old, params), old, new)
    assert same(there, numbered(new, params))
    assert same(moved(there, new, old), numbered(old, params))


@fast
@given(models(), RANKS, BUCKETS)
def test_resharding_to_the_same_layout_moves_nothing_between_ranks(params, ranks, bucket):
    units = plan_units(params, ranks, bucket)
    for move in reshard(units, units):
        assert (move.old_unit, move.old_rank, move.old_offset) == (move.new_unit, move.new_rank, move.new_offset)


# -- by hand -----------------------------------------------------------------------------------------------------------


def f32(name: str, numel: int, block: str = "") -> ParamInfo:
    return ParamInfo(name, numel, 4, "float32", block)


THREE = [f32("a", 100), f32("empty", 0), f32("c", 1)]


def test_three_parameters_over_three_ranks_as_drawn_by_hand():
    (unit,) = plan_units(THREE, ranks=3, bucket_bytes=1 << 20)
    assert [(slot.name, slot.start) for slot in unit.slots] == [("a", 0), ("empty", 128), ("c", 128)]
    assert (unit.name, unit.body, unit.shard_numel, unit.numel) == ("a…", Span(0, 192), 64, 192)
    assert unit.gaps == (Span(100, 128), Span(129, 192))
    assert [list(unit.pieces(rank)) for rank in range(3)] == [
        [Piece("a", Span(0, 64), 0)],
        [Piece("a", Span(64, 100), 0)],
        [Piece("c", Span(0, 1), 0)],
    ]


def test_three_parameters_over_two_ranks_gain_a_tail_that_rounds_up_to_equal_shards():
    (unit,) = plan_units(THREE, ranks=2, bucket_bytes=1 << 20)
    assert (unit.body, unit.shard_numel, unit.numel) == (Span(0, 192), 128, 256)
    assert unit.gaps == (Span(100, 128), Span(129, 256))


def test_moves_from_three_ranks_to_two_as_drawn_by_hand():
    old, new = plan_units(THREE, 3, 1 << 20), plan_units(THREE, 2, 1)
    assert list(reshard(old, new)) == [
        Move("a…", 0, 0, "a", 0, 0, 64),
        Move("a…", 1, 0, "a", 1, 0, 36),
        Move("a…", 2, 0, "c", 0, 0, 1),
    ]


def test_kinds_that_alternate_in_a_block_make_one_unit_each_not_one_per_parameter():
    params = [
        ParamInfo(f"x.{i}", 64, itemsize, kind, "x") for i, (itemsize, kind) in enumerate([(4, "f"), (8, "d")] * 3)
    ]
    units = plan_units(params, 2, 1 << 20)
    assert [(u.name, [slot.name for slot in u.slots]) for u in units] == [
        ("x.0…", ["x.0", "x.2", "x.4"]),
        ("x.1…", ["x.1", "x.3", "x.5"]),
    ]


def test_a_block_in_one_unit_gives_it_its_name_and_neighbours_outside_share_one():
    params = [
        f32("embed", 64),
        f32("pos", 64),
        f32("x.w", 64, "x"),
        f32("x.b", 64, "x"),
        f32("y.w", 64, "y"),
        f32("h", 64),
    ]
    names = [u.name for u in plan_units(params, 2, 1 << 20, shared_bytes=0)]
    assert names == ["embed…", "x", "y", "h"]
    assert [u.name for u in plan_units(params, 2, 1 << 20)] == ["embed…", "x…y", "h"], "small blocks share a unit"


def test_bucket_bytes_counts_padding_and_is_reached_exactly():
    params = [f32(f"p{i}", 33) for i in range(4)]  # each padded to 64 elements, 256 bytes
    assert [len(u.slots) for u in plan_units(params, 1, 512)] == [2, 2]
    assert [len(u.slots) for u in plan_units(params, 1, 511)] == [1, 1, 1, 1]


def test_no_parameters_make_no_units():
    assert plan_units([], 4, 1 << 20) == []
    assert list(reshard([], [])) == []


def test_a_unit_of_empty_parameters_still_has_a_shard_for_every_rank():
    (unit,) = plan_units([f32("a", 0), f32("b", 0)], 3, 1 << 20)
    assert (unit.used_numel, unit.shard_numel, unit.gaps) == (0, ALIGN, (Span(0, 3 * ALIGN),))
    assert all(list(unit.pieces(rank)) == [] for rank in range(3))


@fast
@given(*[st.integers(0, 12)] * 4)
def test_clip_is_the_intersection_of_two_spans(a, b, c, d):
    one, two = Span(min(a, b), max(a, b)), Span(min(c, d), max(c, d))
    assert set(range(*one.clip(two))) == set(range(*one)) & set(range(*two))
    assert one.clip(two).numel >= 0
