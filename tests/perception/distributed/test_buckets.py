"""The bucket plan: complete, aligned, within its limits, and the same on every rank."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from perception.distributed.buckets import BucketPlan, ParameterSpec, digest, first_difference, plan_buckets

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "complex128": 16, "uint8": 1}
SETTINGS = settings(deadline=None, max_examples=60)


@st.composite
def parameters(draw: st.DrawFn, smallest: int = 0) -> list[ParameterSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=smallest, max_size=30))
    dtypes = draw(st.lists(st.sampled_from(sorted(BYTES)), min_size=len(shapes), max_size=len(shapes)))
    pairs = enumerate(zip(shapes, dtypes, strict=True))
    return [ParameterSpec(f"layer{i}.weight", shape, dtype, BYTES[dtype]) for i, (shape, dtype) in pairs]


limits = st.tuples(st.integers(1, 4000), st.integers(1, 20_000))


def padded_bytes(spec: ParameterSpec) -> int:
    return -(-spec.numel * spec.element_bytes // 64) * 64


@SETTINGS
@given(parameters(), limits)
def test_every_parameter_lies_in_one_slot_of_its_size(specs: list[ParameterSpec], sizes: tuple[int, int]) -> None:
    plans = plan_buckets(specs, *sizes)
    assert sorted(slot.parameter for plan in plans for slot in plan.slots) == list(range(len(specs)))
    for plan in plans:
        assert plan.slots
        for slot in plan.slots:
            assert slot.numel == specs[slot.parameter].numel
            assert plan.dtype == specs[slot.parameter].dtype


@SETTINGS
@given(parameters(), limits)
def test_slots_are_aligned_and_do_not_overlap(specs: list[ParameterSpec], sizes: tuple[int, int]) -> None:
    for plan in plan_buckets(specs, *sizes):
        end = 0
        for slot in plan.slots:
            spec = specs[slot.parameter]
            assert slot.offset == end and slot.offset * spec.element_bytes % 64 == 0
            end = slot.offset + padded_bytes(spec) // spec.element_bytes
        assert end == plan.numel
        assert plan.num_bytes == plan.numel * BYTES[plan.dtype]


@SETTINGS
@given(parameters(), limits)
def test_size_limits_hold_and_buckets_are_filled(specs: list[ParameterSpec], sizes: tuple[int, int]) -> None:
    by_dtype: dict[str, list[BucketPlan]] = {}
    for plan in plan_buckets(specs, *sizes):
        by_dtype.setdefault(plan.dtype, []).append(plan)
    for plans in by_dtype.values():
        for number, plan in enumerate(plans):
            limit = sizes[0] if number == 0 else sizes[1]
            assert plan.num_bytes <= limit or len(plan.slots) == 1
            if number + 1 < len(plans):
                following = specs[plans[number + 1].slots[0].parameter]
                assert plan.num_bytes + padded_bytes(following) > limit, "the next one would have fitted"


@SETTINGS
@given(parameters(), limits)
def test_buckets_come_in_the_order_in_which_backward_fills_them(
    specs: list[ParameterSpec], sizes: tuple[int, int]
) -> None:
    plans = plan_buckets(specs, *sizes)
    for plan in plans:
        order = [slot.parameter for slot in plan.slots]
        assert order == sorted(order, reverse=True)
    last_ready = [plan.slots[-1].parameter for plan in plans]
    assert last_ready == sorted(last_ready, reverse=True)


@SETTINGS
@given(parameters(), limits)
def test_the_plan_is_the_same_for_the_same_parameters(specs: list[ParameterSpec], sizes: tuple[int, int]) -> None:
    again = [replace(spec) for spec in specs]
    assert plan_buckets(specs, *sizes) == plan_buckets(again, *sizes)
    assert digest(specs, plan_buckets(specs, *sizes)) == digest(again, plan_buckets(again, *sizes))
    assert first_difference(specs, again, 0, 1) is None


@SETTINGS
@given(parameters(smallest=1), st.data())
def test_any_change_changes_the_digest_and_is_named(specs: list[ParameterSpec], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(specs) - 1))
    spec = specs[place]
    other_dtype = "float32" if spec.dtype != "float32" else "float64"
    change = data.draw(st.sampled_from(["name", "shape", "dtype", "more", "fewer"]))
    changed = list(specs)
    if change == "name":
        changed[place] = replace(spec, name=spec.name + "x")
    elif change == "shape":
        changed[place] = replace(spec, shape=(*spec.shape, 1))
    elif change == "dtype":
        changed[place] = replace(spec, dtype=other_dtype, element_bytes=BYTES[other_dtype])
    elif change == "more":
        changed.insert(place, ParameterSpec("new", (2,), "float32", 4))
    else:
        del changed[place]
    plans, changed_plans = plan_buckets(specs, 100, 1000), plan_buckets(changed, 100, 1000)
    assert digest(specs, plans) != digest(changed, changed_plans)
    difference = first_difference(specs, changed, 0, 3)
    assert difference is not None
    assert difference.startswith(f"parameter {place} is {spec.name} ")
    assert " on rank 0 but " in difference and difference.endswith(" on rank 3")


def test_other_bucket_sizes_change_the_digest() -> None:
    specs = [ParameterSpec(f"p{i}", (100,), "float32", 4) for i in range(10)]
    digests = {digest(specs, plan_buckets(specs, first, size)) for first in (500, 1000) for size in (1000, 2000)}
    assert len(digests) == 4


def test_a_known_plan() -> None:
    """Three of 400 bytes, padded to 448: one in the small first bucket, two in the next; the large one alone."""
    specs = [
        ParameterSpec("large", (1000,), "float32", 4),
        *(ParameterSpec(name, (10, 10), "float32", 4) for name in "abc"),
    ]
    plans = plan_buckets(specs, 500, 1000)
    assert [[specs[slot.parameter].name for slot in plan.slots] for plan in plans] == [["c"], ["b", "a"], ["large"]]
    assert [[slot.offset for slot in plan.slots] for plan in plans] == [[0], [0, 112], [0]]
    assert [plan.num_bytes for plan in plans] == [448, 896, 4032]


def test_no_parameters_no_buckets() -> None:
    assert plan_buckets([], 1, 1) == ()


def test_first_difference_names_the_first_and_what_is_missing() -> None:
    ours = [ParameterSpec("a", (1,), "float32", 4), ParameterSpec("b", (2, 3), "float32", 4)]
    theirs = [ours[0], ParameterSpec("b", (2, 4), "float16", 2), ParameterSpec("c", (1,), "float32", 4)]
    assert first_difference(ours, theirs, 0, 2) == (
        "parameter 1 is b [2, 3] float32 on rank 0 but b [2, 4] float16 on rank 2"
    )
    assert first_difference(ours, ours[:1], 1, 0) == "parameter 1 is b [2, 3] float32 on rank 1 but missing on rank 0"
