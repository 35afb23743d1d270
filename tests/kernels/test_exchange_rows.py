"""``tessera::exchange_rows``, which applies commits, against its slow form."""

import mmap
import resource
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import tessera.kernels.ops  # noqa: F401 - registers the operators
from tessera.kernels import reference


def drawn(generator, *, rows, width, stride, offset, count, spare=0):
    size = offset + (rows - 1) * stride + width + spare
    storage = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    chosen = torch.randperm(rows, generator=generator)[:count].sort().values
    values = torch.randint(0, 256, (count, width), dtype=torch.uint8, generator=generator)
    return storage, chosen, values


SHAPES = [
    (1, 1, 1, 0, 1),
    (50, 132, 132, 0, 50),
    (300, 36, 48, 128, 40),
    (20, 700, 704, 64, 7),
    (3, 9000, 9000, 1, 3),
    (9, 5, 5, 3, 0),
]


@pytest.mark.parametrize(("rows", "width", "stride", "offset", "count"), SHAPES)
def test_it_exchanges_the_rows_and_nothing_else(rows, width, stride, offset, count):
    generator = torch.Generator().manual_seed(rows)
    storage, chosen, values = drawn(
        generator, rows=rows, width=width, stride=stride, offset=offset, count=count, spare=11
    )
    expected, old = storage.clone(), values.clone()
    reference.exchange_rows(expected, chosen, old, offset, stride)
    before = storage.clone()
    torch.ops.tessera.exchange_rows(storage, chosen, values, offset, stride)
    assert torch.equal(storage, expected)
    assert torch.equal(values, old)
    torch.ops.tessera.exchange_rows(storage, chosen, values, offset, stride)
    assert torch.equal(storage, before)


@pytest.mark.parametrize(("rows", "width", "stride", "offset", "count"), SHAPES)
def test_touching_rows_changes_nothing(rows, width, stride, offset, count):
    generator = torch.Generator().manual_seed(rows)
    storage, chosen, values = drawn(
        generator, rows=rows, width=width, stride=stride, offset=offset, count=count, spare=11
    )
    before = storage.clone()
    torch.ops.tessera.touch_rows_of([storage], [chosen], [values], [offset], [stride])
    assert torch.equal(storage, before)


def test_touching_rows_writes_to_their_pages():
    page = mmap.PAGESIZE
    rows, values = torch.tensor([0, 3, 7]), torch.zeros(3, 100, dtype=torch.uint8)
    with mmap.mmap(-1, 8 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        storage = torch.frombuffer(memory, dtype=torch.uint8)
        assert not storage.any()  # now all pages are the system's one page of zeros
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ops.tessera.touch_rows_of([storage], [rows], [values], [0], [page])
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt >= before + len(rows)
        del storage


@pytest.mark.parametrize(
    ("rows", "offset", "stride", "said"),
    [
        ([1, 1], 0, 4, "entry 1 is 1, expected more than 1 and less than 4"),
        ([2, 1], 0, 4, "entry 1 is 1, expected more than 2"),
        ([0, 4], 0, 4, "entry 1 is 4"),
        ([-1, 2], 0, 4, "entry 0 is -1"),
        ([0, 3], 1, 4, "entry 1 is 3, expected more than 0 and less than 3"),
        ([0, 1], 17, 4, "offset: 17"),
        ([0, 1], 0, 3, "stride: 3"),
    ],
)
def test_it_refuses_what_lies_outside(rows, offset, stride, said):
    storage, values = torch.arange(16, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    before = storage.clone()
    with pytest.raises(RuntimeError, match=said):
        torch.ops.tessera.exchange_rows(storage, torch.tensor(rows), values, offset, stride)
    with pytest.raises(RuntimeError, match=said):
        torch.ops.tessera.touch_rows_of(
            [storage], [torch.tensor(rows)], [values], [offset], [stride]
        )
    assert torch.equal(storage, before)


def several(generator):
    """Patches of two storages: one has two, of which the second overlaps the first; the rows' numbers are of both types."""
    first, rows, values = drawn(
        generator, rows=60, width=20, stride=24, offset=8, count=30, spare=40
    )
    second, others, wide = drawn(generator, rows=9, width=300, stride=300, offset=0, count=4)
    again = torch.arange(0, 60, 3, dtype=torch.int32)
    overlapping = torch.randint(0, 256, (20, 24), dtype=torch.uint8, generator=generator)
    return (
        [first, second, first],
        [rows, others.int(), again],
        [values, wide, overlapping],
        [8, 0, 4],
        [24, 300, 24],
    )


def copied(patches):
    storages, rows, values, offsets, strides = patches
    first, second = storages[0].clone(), storages[1].clone()
    return [first, second, first], rows, [one.clone() for one in values], offsets, strides


def test_many_patches_are_exchanged_in_their_order_in_one_call():
    patches = several(torch.Generator().manual_seed(7))
    before, expected = copied(patches), copied(patches)
    reference.exchange_rows_of(*expected)
    torch.ops.tessera.touch_rows_of(*patches)
    torch.ops.tessera.touch_rows_aside(*patches, 1.0, 60.0)
    for found, kept in zip(patches[0] + patches[2], before[0] + before[2], strict=True):
        assert torch.equal(found, kept)
    torch.ops.tessera.exchange_rows_of(*patches)
    for found, right in zip(patches[0] + patches[2], expected[0] + expected[2], strict=True):
        assert torch.equal(found, right)
    torch.ops.tessera.exchange_rows_of(*(one[::-1] for one in patches))  # the last is undone first
    for found, kept in zip(patches[0] + patches[2], before[0] + before[2], strict=True):
        assert torch.equal(found, kept)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_patch_that_lies_outside_leaves_all_as_they_were(place):
    patches = several(torch.Generator().manual_seed(8))
    before = copied(patches)
    patches[1][place] = patches[1][place] + 1000
    aside = partial(torch.ops.tessera.touch_rows_aside, share=0.5, seconds=60.0)
    restore = partial(torch.ops.tessera.restore_rows, threads=2)
    exchange, touch = torch.ops.tessera.exchange_rows_of, torch.ops.tessera.touch_rows_of
    for operator in (exchange, touch, aside, restore):
        with pytest.raises(RuntimeError, match="expected more than"):
            operator(*patches)
        with pytest.raises(RuntimeError, match="3 storages, 2 rows"):
            operator(patches[0], patches[1][:2], *patches[2:])
    for found, kept in zip(patches[0] + patches[2], before[0] + before[2], strict=True):
        assert torch.equal(found, kept)


def commits_of(generator, storages, tables, count):
    """Patches of ``count`` commits, one after the other: some rows of each table ``(storage, offset, rows, width, stride)``."""
    patches = [], [], [], [], []
    for commit in range(count):
        for number, offset, rows, width, stride in tables:
            some = int(torch.randint(0, rows + 1, (), generator=generator))
            chosen = torch.randperm(rows, generator=generator)[:some].sort().values
            values = torch.randint(0, 256, (some, width), dtype=torch.uint8, generator=generator)
            of_either_type = chosen.int() if (commit + number) % 2 else chosen
            of_all = (storages[number], of_either_type, values, offset, stride)
            for one, of_it in zip(patches, of_all, strict=True):
                one.append(of_it)
    return patches


TABLES = {
    "apart": [(0, 8, 300, 20, 24), (0, 8000, 40, 132, 132), (1, 0, 9, 300, 300)],
    # Scales beside the rows, and a table within which another one begins.
    "within each other": [(0, 0, 300, 20, 24), (0, 20, 300, 4, 24), (0, 7000, 60, 40, 44)],
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_many_commits_are_taken_back_in_one_call(tables, threads):
    generator = torch.Generator().manual_seed(9)
    storages = [torch.randint(0, 256, (14_000,), dtype=torch.uint8, generator=generator)] * 2
    storages[1] = storages[1][:2700].clone()
    before = [one.clone() for one in storages]
    patches = commits_of(generator, storages, tables, count=7)
    torch.ops.tessera.exchange_rows_of(*patches)
    assert not torch.equal(storages[0], before[0])
    undo = tuple(one[::-1] for one in patches)
    kept = [one.clone() for one in undo[2]]
    torch.ops.tessera.restore_rows(*undo, threads)
    for found, right in zip(storages, before, strict=True):
        assert torch.equal(found, right)
    for found, right in zip(undo[2], kept, strict=True):
        assert torch.equal(found, right)


def test_commits_of_a_table_of_several_parts_are_taken_back_by_several_threads():
    """The table has 100 MB, so that each thread gets some of it; the rows at the ends of parts are in all commits."""
    generator = torch.Generator().manual_seed(10)
    rows, width = 100_000, 1000
    storage = torch.randint(0, 256, (rows * width,), dtype=torch.uint8, generator=generator)
    before = storage.clone()
    ends = torch.cat([torch.arange(end - 1, rows, end) for end in (2097, 33554, 1 << 15, rows)])
    patches = [], [], [], [], []
    for _ in range(5):
        chosen = torch.cat([ends, ends[:-1] + 1, torch.randperm(rows, generator=generator)[:900]])
        chosen = chosen[chosen < rows].unique()
        values = torch.randint(0, 256, (len(chosen), width), dtype=torch.uint8, generator=generator)
        for one, of_it in zip(patches, (storage, chosen, values, 0, width), strict=True):
            one.append(of_it)
    torch.ops.tessera.exchange_rows_of(*patches)
    assert not torch.equal(storage, before)
    torch.ops.tessera.restore_rows(*(one[::-1] for one in patches), 4)
    assert torch.equal(storage, before)


def test_threads_are_needed_to_take_commits_back():
    patches = several(torch.Generator().manual_seed(8))
    with pytest.raises(RuntimeError, match="threads: 0, expected at least 1"):
        torch.ops.tessera.restore_rows(*patches, 0)


def resident_bytes():
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def test_pages_of_values_that_were_never_written_to_are_there_afterwards():
    # Twenty pieces of pages, in a mapping of their own that has none yet.
    count, page = 20 * 1024, 4096
    memory = mmap.mmap(-1, count * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values = torch.frombuffer(memory, dtype=torch.uint8).view(count, page)
    before = resident_bytes()
    torch.ops.tessera.touch_rows_aside(
        [torch.zeros(page, dtype=torch.uint8)],
        [torch.empty(0, dtype=torch.int64)],
        [values[:0]],
        *([0], [page], 1.0, 60.0),
    )
    assert resident_bytes() - before < count * page / 2
    storage = torch.zeros(count * page, dtype=torch.uint8)
    torch.ops.tessera.touch_rows_aside(
        [storage], [torch.arange(count)], [values], [0], [page], 1.0, 60.0
    )
    assert resident_bytes() - before > count * page * 0.9
    assert not values.any()
    assert not storage.any()


@pytest.mark.parametrize(("share", "seconds", "paused"), [(0.1, 60.0, True), (0.1, 0.0, False)])
def test_touching_aside_pauses_until_its_time_is_over(share, seconds, paused):
    storage = torch.zeros(400_000 * 64, dtype=torch.uint8)
    values = torch.zeros(400_000, 64, dtype=torch.uint8)
    arguments = ([storage], [torch.arange(400_000)], [values], [0], [64], share, seconds)
    torch.ops.tessera.touch_rows_aside(*arguments[:-2], 1.0, 0.0)  # its pages are there
    switches, used = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.thread_time()
    torch.ops.tessera.touch_rows_aside(*arguments)
    used = time.thread_time() - used
    pauses = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - switches
    # A pause is 50 ms at most, and follows some 5 ms of work at the latest.
    assert pauses >= used / 0.005 / 2 if paused else pauses <= 2


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_of_no_cpu_or_more_than_one_is_refused(share):
    patches = several(torch.Generator().manual_seed(9))
    with pytest.raises(RuntimeError, match=r"share: .* expected more than 0 and at most 1"):
        torch.ops.tessera.touch_rows_aside(*patches, share, 60.0)


def test_rows_of_another_type_are_refused():
    storage, values = torch.arange(16, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="int64 or int32"):
        torch.ops.tessera.exchange_rows(storage, torch.tensor([0.0, 1.0]), values, 0, 4)
