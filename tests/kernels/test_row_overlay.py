"""``tessera::overlay_*``: lookups read a commit's rows where they were staged until the tables have them."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera.kernels.ops  # noqa: F401 - registers the operators
from tessera.kernels.plan import IdRule, OutOfRange, Pooling, ScaleType, plan_column
from tessera.kernels.quantize import quantize_table
from tessera.kernels.row_types import FLOAT32
from tessera.kernels.tables import FeatureLookup, make_plan, pack_tables
from tests.kernels.cases import calls

LEAST_COMMITS, MOST_COMMITS = 5, 1_000
"""A test makes so many, at most and at least, until lookups came between two pieces of one."""


class Overlay:
    """An overlay of rows ``[(offset, stride, rows, values), ...]`` of one storage; kept, unless that is for `keep_some`."""

    def __init__(self, storage, patches, *, kept=True):
        self.values = [values for *_, values in patches]
        arguments = (
            [storage] * len(patches),
            [rows for _, _, rows, _ in patches],
            self.values,
            [offset for offset, *_ in patches],
            [stride for _, stride, *_ in patches],
        )
        if kept:
            self.number = torch.ops.tessera.overlay_make_aside(*arguments, 1.0, 0.0)
        else:
            self.number = torch.ops.tessera.overlay_make(*arguments)

    def keep_some(self):
        return torch.ops.tessera.overlay_keep(self.number)

    def show(self):
        torch.ops.tessera.overlay_show(self.number)

    def show_beside(self):
        torch.ops.tessera.overlay_show_beside(self.number)

    def fits(self):
        return torch.ops.tessera.overlay_fits(self.number)

    def take_back(self):
        torch.ops.tessera.overlay_take_back(self.number)

    def write(self):
        torch.ops.tessera.overlay_write_aside(self.number, 1.0, 0.0)

    def write_some(self):
        return torch.ops.tessera.overlay_write(self.number)

    def drop(self):
        torch.ops.tessera.overlay_drop(self.number)


def exchanged(storage, patches):
    """The storage after a commit, by a plain loop."""
    after = storage.clone()
    for offset, stride, rows, values in patches:
        for row, value in zip(rows.tolist(), values, strict=True):
            after[offset + row * stride :][: len(value)] = value
    return after


def region_of(place):
    """Offset and width of what a table's rows take, their scales with them where these lie beside the numbers."""
    begin, end = place.data_offset, place.data_offset + place.weight_type.data_bytes(place.dim)
    if place.scale_type in {ScaleType.FLOAT16, ScaleType.FLOAT32} and not place.scale_shift:
        scale = place.scale_offset
        both = min(begin, scale), max(end, scale + 4 * int(place.scale_type))
        if both[1] - both[0] <= place.row_stride:
            begin, end = both
    return begin, end - begin


def look_up(weights, call):
    found = torch.ops.tessera.lookup(
        weights,
        call.plan,
        call.indices,
        call.lengths,
        call.width,
        call.id_weights,
        dtype=call.dtype,
    )
    # No feature writes the columns before the first one's; any bits are a number of some kind.
    return (
        found[:, int(call.plan[:, plan_column("out_column")].min()) :]
        .contiguous()
        .view(torch.uint8)
    )


@st.composite
def commits(draw, **kwargs):
    """A call, and patches of some of its tables with any bytes."""
    call = draw(calls(**kwargs))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    patches = []
    for place in call.tables.places:
        count = draw(st.integers(0, place.rows))
        if not count:
            continue
        offset, width = region_of(place)
        rows = torch.randperm(place.rows, generator=generator)[:count].sort().values
        values = torch.randint(0, 256, (count, width), dtype=torch.uint8, generator=generator)
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        patches.append((offset, place.row_stride, rows.to(dtype), values))
    return call, patches


@settings(max_examples=60)
@given(drawn=commits())
def test_lookups_have_the_new_rows_from_when_it_is_shown(drawn):
    call, patches = drawn
    if not patches:
        return
    weights = call.tables.weights.clone()
    after = exchanged(weights, patches)
    old, new = look_up(weights, call), look_up(after, call)
    overlay = Overlay(weights, patches, kept=False)
    while overlay.keep_some():
        assert torch.equal(look_up(weights, call), old)
    assert torch.equal(weights, call.tables.weights)
    overlay.show()
    more = True
    while more:
        assert torch.equal(look_up(weights, call), new)
        more = overlay.write_some()
    assert torch.equal(weights, after)
    assert torch.equal(look_up(weights, call), new)
    overlay.drop()
    assert torch.equal(look_up(weights, call), new)
    undo = [(*patch[:3], kept) for patch, kept in zip(patches, overlay.values, strict=True)]
    assert torch.equal(exchanged(weights, undo), call.tables.weights)


@settings(max_examples=60)
@given(drawn=commits(), looked=st.booleans())
def test_what_is_taken_back_was_never_there(drawn, looked):
    call, patches = drawn
    if not patches:
        return
    weights = call.tables.weights.clone()
    old = look_up(weights, call)
    overlay = Overlay(weights, patches)
    overlay.show()
    if looked:  # which may write the rows, where a plan has scales apart
        look_up(weights, call)
    overlay.take_back()
    assert torch.equal(weights, call.tables.weights)
    assert torch.equal(look_up(weights, call), old)
    overlay.drop()


def assert_reads_laid_rows(read, call, patches):
    """``read(weights)`` gives what it gives of the storage after the commit, from when the overlay is shown."""
    weights = call.tables.weights.clone()
    new = read(exchanged(weights, patches))
    overlay = Overlay(weights, patches)
    overlay.show()
    assert torch.equal(read(weights), new)
    overlay.write()
    assert torch.equal(read(weights), new)
    overlay.drop()
    assert torch.equal(read(weights), new)


@settings(max_examples=60)
@given(drawn=commits(dim=32), upper=st.booleans())
def test_the_interaction_reads_them_too(drawn, upper):
    call, patches = drawn
    if not patches:
        return
    dense = torch.randn(len(call.lengths) // len(call.plan), 32)
    plan = call.plan.clone()
    plan[:, plan_column("out_column")] = 0  # which this operator does not use

    def interact(weights):
        return torch.ops.tessera.lookup_dot_interaction(
            *(weights, plan, call.indices, call.lengths, dense, call.id_weights), upper=upper
        ).view(torch.uint8)

    assert_reads_laid_rows(interact, call, patches)


@settings(max_examples=60)
@given(drawn=commits(dim=16, rows_output=True))
def test_rows_without_pooling_are_read_there_too(drawn):
    call, patches = drawn
    if not patches:
        return

    def rows_of(weights):
        return torch.ops.tessera.lookup_rows(
            weights, call.plan, call.indices, call.lengths, 16
        ).view(torch.uint8)

    assert_reads_laid_rows(rows_of, call, patches)


def plain_call(rows, *, dim=16):
    """A float32 table of ``rows`` rows, and the plan of one feature over it."""
    packed = pack_tables([quantize_table(torch.zeros(rows, dim), FLOAT32)])
    (place,) = packed.places
    return packed.weights, place, plan_of(place)


def plan_of(place):
    """The plan of one feature over a table."""
    feature = FeatureLookup(
        table=place,
        out_column=0,
        pooling=Pooling.SUM,
        id_rule=IdRule.NONE,
        out_of_range=OutOfRange.CLAMP,
    )
    return make_plan([feature])


def values_of(numbers, dim=16):
    return numbers.float()[:, None].repeat(1, dim).view(torch.uint8)


def test_every_lookup_beside_the_writing_has_all_new_rows():
    rows = 200_000
    weights, place, plan = plain_call(rows)
    ids, lengths = torch.randint(0, rows, (2_000,)), torch.ones(2_000, dtype=torch.int32)
    chosen = torch.arange(0, rows, 2)
    end, wrong, looked = threading.Event(), [], [0]
    state = [0.0]  # what rows with even numbers hold
    lock = threading.Lock()

    def read():
        while not end.is_set():
            with lock:  # a batch, whole, in one state
                expected = (ids % 2 == 0) * state[0]
                found = torch.ops.tessera.lookup(weights, plan, ids, lengths, 16)
            looked[0] += 1
            if not torch.equal(found, expected[:, None].repeat(1, 16)):
                wrong.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    beside = 0
    for number in range(1, MOST_COMMITS):
        if beside and number > LEAST_COMMITS:
            break
        values = values_of(torch.full((len(chosen),), number))
        overlay = Overlay(weights, [(place.data_offset, place.row_stride, chosen, values)])
        while overlay.keep_some():
            pass
        with lock:
            overlay.show()
            state[0] = float(number)
        before = looked[0]
        while overlay.write_some():
            pass
        beside += looked[0] - before
        with lock:
            overlay.drop()
    end.set()
    reader.join()
    assert not wrong
    assert beside > 0


def test_a_lookup_in_a_part_of_the_storage_finds_them():
    weights, place, plan = plain_call(40)
    storage = torch.zeros(weights.numel() + 128, dtype=torch.uint8)
    part = storage[64 : 64 + weights.numel()]
    rows = torch.tensor([0, 7, 39])
    overlay = Overlay(
        storage,
        [(64 + place.data_offset, place.row_stride, rows, values_of(torch.tensor([1, 2, 3])))],
    )
    overlay.show()
    ids = torch.tensor([0, 1, 7, 38, 39])
    found = torch.ops.tessera.lookup(part, plan, ids, torch.ones(5, dtype=torch.int32), 16)
    assert found[:, 0].tolist() == [1, 0, 2, 0, 3]
    assert not storage.any()
    other = weights.clone()  # another table is read as it is
    assert not torch.ops.tessera.lookup(
        other, plan, ids, torch.ones(5, dtype=torch.int32), 16
    ).any()
    overlay.take_back()
    overlay.drop()


def test_two_overlays_of_two_storages_stand_beside_each_other():
    first, place, plan = plain_call(10)
    second = first.clone()
    ids, lengths = torch.arange(10), torch.ones(10, dtype=torch.int32)
    made = []
    for number, weights in enumerate((first, second), 1):
        values = values_of(torch.full((10,), number))
        overlay = Overlay(
            weights, [(place.data_offset, place.row_stride, torch.arange(10), values)]
        )
        overlay.show()
        made.append(overlay)
    for number, weights in enumerate((first, second), 1):
        assert (torch.ops.tessera.lookup(weights, plan, ids, lengths, 16) == number).all()
    made[0].write()
    made[0].drop()
    assert (torch.ops.tessera.lookup(second, plan, ids, lengths, 16) == 2).all()
    assert not second.any()
    made[1].take_back()
    made[1].drop()


def on_a_thread_of_its_own(work):
    """``work()`` there."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def test_a_thread_sees_the_overlays_that_it_looks_up_to():
    weights, place, plan = plain_call(10)
    ids, lengths = torch.arange(10), torch.ones(10, dtype=torch.int32)

    def first_numbers(up_to=None):
        if up_to is not None:
            torch.ops.tessera.overlay_look_up_to(up_to)
        return torch.ops.tessera.lookup(weights, plan, ids, lengths, 16)[:, 0].tolist()

    before = 0
    for value in (1.0, 2.0):
        values = values_of(torch.full((10,), value))
        overlay = Overlay(
            weights, [(place.data_offset, place.row_stride, torch.arange(10), values)]
        )
        assert overlay.number > before
        overlay.show_beside()
        for up_to, seen in (
            (None, value),
            (overlay.number, value),
            (before, value - 1),
            (overlay.number + 1, value),
        ):
            found = on_a_thread_of_its_own(lambda up_to=up_to: first_numbers(up_to))
            assert found == [seen] * 10
        overlay.write()
        assert on_a_thread_of_its_own(lambda before=before: first_numbers(before)) == [value] * 10
        overlay.drop()
        before = overlay.number


def test_a_plan_under_which_rows_cannot_be_laid_beside_others_raises_and_writes_nothing():
    weights, place, _ = plain_call(10)
    every_second = plan_of(dataclasses.replace(place, rows=5, row_stride=2 * place.row_stride))
    values = values_of(torch.ones(10))
    overlay = Overlay(weights, [(place.data_offset, place.row_stride, torch.arange(10), values)])
    overlay.show_beside()
    assert overlay.fits()
    ids, lengths = torch.arange(5), torch.ones(5, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cannot be laid"):
        torch.ops.tessera.lookup(weights, every_second, ids, lengths, 16)
    assert not overlay.fits()
    assert not weights.any()
    overlay.take_back()
    overlay.drop()
    assert not torch.ops.tessera.lookup(weights, every_second, ids, lengths, 16).any()


@pytest.mark.parametrize("kept", [True, False])
def test_bad_arguments_are_refused(kept):
    weights, place, _ = plain_call(10)
    good = (place.data_offset, place.row_stride)
    values = values_of(torch.arange(2))
    with pytest.raises(RuntimeError, match="entry 1 is 10, expected more than 0 and less than 10"):
        Overlay(weights, [(*good, torch.tensor([0, 10]), values)], kept=kept)
    with pytest.raises(RuntimeError, match="at least one of each table"):
        Overlay(weights, [(*good, torch.tensor([], dtype=torch.int64), values[:0])], kept=kept)
    with pytest.raises(RuntimeError, match="two tables lie within each other"):
        Overlay(
            weights,
            [(*good, torch.tensor([0, 5]), values), (*good, torch.tensor([3, 4]), values.clone())],
            kept=kept,
        )
    with pytest.raises(RuntimeError, match="there is no overlay 999999999"):
        torch.ops.tessera.overlay_show(999_999_999)
