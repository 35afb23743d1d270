from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.training.data import dataset as dataset_module
from tessera.training.data.batch import Batch, PackedBatch, make_batch
from tessera.training.data.columns import FeatureColumns, LabelColumn, SparseColumn
from tessera.training.data.dataset import DatasetView, PacksRows, packing
from tessera.training.data.loader import BatchLoader
from tests.patience import PATIENCE_S


class Numbers:
    """Row ``i`` has label ``i``; remembers how many batches it made."""

    columns = FeatureColumns(sparse=(SparseColumn(name="a"),), labels=(LabelColumn(name="label"),))

    def __init__(self, size: int, fail_at: int | None = None) -> None:
        self.size, self.made, self.fail_at = size, 0, fail_at

    def __len__(self) -> int:
        return self.size

    def batch(self, rows: np.ndarray) -> Batch:
        if self.made == self.fail_at:
            raise OSError("the disk is gone")
        self.made += 1
        return make_batch(
            dense=np.zeros((len(rows), 0), np.float32),
            keys=("a",),
            lengths=np.ones(len(rows), np.int32),
            values=np.asarray(rows, np.int64),
            labels=np.asarray(rows, np.float32),
        )

    def take(self, start: int, stop: int) -> Batch:
        return self.batch(np.arange(start, stop))

    def labels(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows, np.float32)


def view(size: int) -> DatasetView:
    return DatasetView(Numbers(size), range(size))


def numbers(loader: BatchLoader, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [batch.sparse_features.values().tolist() for batch in loader.epoch(epoch, start)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 3 blocks of 5 rows, so that a few dozen rows need several."""
    monkeypatch.setattr(dataset_module, "BLOCK_ROWS", 5)
    monkeypatch.setattr(dataset_module, "WINDOW_BLOCKS", 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    size=st.integers(0, 70),
    batch_size=st.integers(1, 20),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 5),
    data=st.data(),
)
def test_an_epoch_is_a_permutation_and_can_be_taken_up_at_any_batch(
    small_windows: None, *, size: int, batch_size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    loader = BatchLoader(view(size), batch_size=batch_size, shuffle=True, seed=seed, prefetch=0)
    whole = numbers(loader, epoch)
    assert sorted(flat(whole)) == list(range(size))
    assert [len(batch) for batch in whole[:-1]] == [batch_size] * (len(whole) - 1)
    assert len(whole) == loader.num_batches == -(-size // batch_size)
    start = data.draw(st.integers(0, loader.num_batches))
    assert numbers(loader, epoch, start) == whole[start:]
    # A loader made anew, as in a resumed process, with a thread this time.
    again = BatchLoader(view(size), batch_size=batch_size, shuffle=True, seed=seed, prefetch=2)
    assert numbers(again, epoch, start) == whole[start:]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(flat(numbers(BatchLoader(view(50), batch_size=7, shuffle=True, seed=seed), epoch)))
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 6


def test_a_view_of_one_window_is_shuffled_as_a_whole() -> None:
    loader = BatchLoader(view(4000), batch_size=4000, shuffle=True, seed=0)
    order = np.array(flat(numbers(loader)))
    # Of a random order: correlation with the sorted one within 5 of its standard deviations,
    # and rows of the first half evenly among the places.
    assert abs(np.corrcoef(order, np.arange(4000))[0, 1]) < 5 / np.sqrt(4000)
    assert abs((order[:2000] < 2000).mean() - 0.5) < 5 * 0.5 / np.sqrt(2000)


def test_a_window_mixes_blocks_from_all_over_the_view(small_windows: None) -> None:
    loader = BatchLoader(view(150), batch_size=15, shuffle=True, seed=3)
    for batch in numbers(loader):  # a batch is a window here
        assert len({number // 5 for number in batch}) == 3
        assert batch != sorted(batch)


def test_rows_of_an_array_view(small_windows: None) -> None:
    rows = np.arange(100, 140, 2)
    array_view = DatasetView(Numbers(200), rows)
    in_order = BatchLoader(array_view, batch_size=6, shuffle=False, seed=0)
    assert flat(numbers(in_order)) == rows.tolist()
    shuffled = BatchLoader(array_view, batch_size=6, shuffle=True, seed=0)
    assert sorted(flat(numbers(shuffled))) == rows.tolist()
    assert flat(numbers(shuffled)) != rows.tolist()


def test_in_order_from_a_range_that_does_not_begin_at_zero() -> None:
    loader = BatchLoader(
        DatasetView(Numbers(30), range(10, 25)), batch_size=4, shuffle=False, seed=0
    )
    assert numbers(loader) == [
        [10, 11, 12, 13],
        [14, 15, 16, 17],
        [18, 19, 20, 21],
        [22, 23, 24],
    ]
    assert numbers(loader, start=3) == [[22, 23, 24]]


@settings(max_examples=50)
@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    parts=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_parts_make_up_every_batch_or_each_reads_its_share(
    size: int, batch_size: int, parts: int, *, shuffle: bool
) -> None:
    def loader(part: tuple[int, int]) -> BatchLoader:
        return BatchLoader(
            view(size), batch_size=batch_size, shuffle=shuffle, seed=3, part=part, prefetch=0
        )

    whole = loader((0, 1))
    cut = [list(loader((part, parts)).epoch(2)) for part in range(parts)]
    assert all(len(batches) == whole.num_batches for batches in cut)
    for number, batch in enumerate(whole.epoch(2)):
        assert whole.batch_rows(number) == batch.size
        pieces = [batches[number] for batches in cut]
        sizes = [piece.size for piece in pieces]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == batch.size
        if shuffle:
            rows = [row for piece in pieces for row in piece.labels.tolist()]
            assert rows == batch.labels.tolist()
    if not shuffle:  # every part is one stretch of the view, the parts are all of it
        stretches = [[row for batch in batches for row in batch.labels.tolist()] for batches in cut]
        assert [row for stretch in stretches for row in stretch] == list(range(size))
    # Beginning later in the epoch gives what the epoch gives from there on.
    start = whole.num_batches // 2
    for part in range(parts):
        again = [batch.labels.tolist() for batch in loader((part, parts)).epoch(2, start)]
        assert again == [batch.labels.tolist() for batch in cut[part][start:]]


def test_drop_last() -> None:
    loader = BatchLoader(view(10), batch_size=4, shuffle=False, seed=0, drop_last=True)
    assert loader.num_batches == 2
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture
def prefetches() -> Callable[[], bool]:
    """Whether a thread of a loader runs that has begun since: those of other tests may wait to be collected."""
    before = set(threading.enumerate())

    def found() -> bool:
        since = set(threading.enumerate()) - before
        return any(
            thread.name.startswith(("tessera-prefetch", "tessera-window")) for thread in since
        )

    return found


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_surfaces_in_its_place(prefetch: int, prefetches: Callable[[], bool]) -> None:
    broken = DatasetView(Numbers(100, fail_at=3), range(100))
    loader = BatchLoader(broken, batch_size=10, shuffle=False, seed=0, prefetch=prefetch)
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(batch.size for batch in loader.epoch(0))
    assert seen == [10, 10, 10]
    assert not prefetches()


def test_closing_early_stops_the_thread(prefetches: Callable[[], bool]) -> None:
    batches = BatchLoader(view(1000), batch_size=1, shuffle=True, seed=0).epoch(0)
    next(batches)
    assert prefetches()
    batches.close()
    assert not prefetches()


@pytest.mark.parametrize("count", [1, 3])
def test_several_threads_make_the_same_batches_in_the_same_order(count: int) -> None:
    one = BatchLoader(view(1000), batch_size=7, shuffle=True, seed=0, prefetch=0)
    many = BatchLoader(
        view(1000), batch_size=7, shuffle=True, seed=0, prefetch=5, threads=count, finish=twice
    )
    for expected, batch in zip(one.epoch(1, 2), many.epoch(1, 2), strict=True):
        assert torch.equal(batch.labels, 2 * expected.labels)
        assert torch.equal(batch.sparse_features.values(), expected.sparse_features.values())


def twice(batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=2 * batch.labels)


def test_the_next_window_is_shuffled_while_one_is_read(
    small_windows: None, monkeypatch: pytest.MonkeyPatch, prefetches: Callable[[], bool]
) -> None:
    drawn: queue.SimpleQueue[int] = queue.SimpleQueue()
    draw = dataset_module._ShuffledOrder._draw

    def noted(order: Any, number: int) -> np.ndarray:
        drawn.put(number)
        return draw(order, number)

    monkeypatch.setattr(dataset_module._ShuffledOrder, "_draw", noted)
    order = view(100).order(0, seed=1, threads=1)  # windows of 15 rows, the last one of 10
    for start, windows in ((0, [0, 1]), (10, []), (20, [2]), (95, [6])):
        order.place(start, start + 5)
        assert [drawn.get(timeout=PATIENCE_S) for _ in windows] == windows
    order.close()
    assert drawn.empty()
    assert not prefetches()


class PackedNumbers(PackedBatch):
    """Rows of `Numbers`, packed."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @property
    def size(self) -> int:
        return self._batch.size

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:  # noqa: FBT001, FBT002 - as of torch.Tensor
        return self._batch.to(device, non_blocking)


class PackingNumbers(Numbers, PacksRows):
    """Numbers that can be packed."""

    def packed(self, batches: Sequence[np.ndarray]) -> list[PackedNumbers]:
        return [PackedNumbers(self.batch(rows)) for rows in batches]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_view_that_packs_gives_the_same_rows_packed(prefetch: int) -> None:
    rows = DatasetView(PackingNumbers(100), range(10, 90))
    how: dict[str, Any] = {"batch_size": 7, "seed": 5, "prefetch": prefetch, "part": (1, 2)}
    as_they_are = BatchLoader(rows, shuffle=True, **how)
    packed = BatchLoader(packing(rows), shuffle=True, finish=twice, numbered=True, **how)
    given: list[Any] = list(packed.epoch(1, 3))
    assert all(isinstance(batch, PackedNumbers) for batch in given)
    made = [batch.to(torch.device("cpu")) for batch in given]
    expected = list(as_they_are.epoch(1, 3))
    assert [batch.size for batch in given] == [batch.size for batch in expected]
    assert [batch.labels.tolist() for batch in made] == [
        batch.labels.tolist() for batch in expected
    ]
    # In the view's own order nothing is packed, as in evaluations.
    in_order = BatchLoader(packing(rows), shuffle=False, **how)
    assert all(isinstance(batch, Batch) for batch in in_order.epoch(0))


def test_closing_early_stops_the_threads_that_pack(prefetches: Callable[[], bool]) -> None:
    rows = packing(DatasetView(PackingNumbers(200), range(200)))
    epoch = BatchLoader(rows, batch_size=10, shuffle=True, seed=5, prefetch=8).epoch(0)
    next(epoch)
    assert prefetches()
    epoch.close()
    assert not prefetches()


def test_several_batches_are_packed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    class Recorded(PackingNumbers):
        def packed(self, batches: Sequence[np.ndarray]) -> list[PackedNumbers]:
            asked.append([len(rows) for rows in batches])
            return super().packed(batches)

    rows = DatasetView(Recorded(200), range(200))
    how: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 5, "threads": 3}
    expected = [b.labels.tolist() for b in BatchLoader(rows, **how).epoch(0)]

    def groups(**more: Any) -> list[list[int]]:
        loader = BatchLoader(packing(rows), **{**how, **more})
        made = [batch.to(torch.device("cpu")).labels.tolist() for batch in loader.epoch(0)]
        assert made == expected
        found = sorted(map(len, asked))
        asked.clear()
        return found

    # The first groups are small, so that the first batch is not waited for.
    assert groups(prefetch=8) == [1, 2, 4, 5, 8]
    assert groups(prefetch=0) == [1] * 20
    monkeypatch.setattr("tessera.training.data.loader.PACKED_ROWS", 25)
    assert groups(prefetch=8) == [1] * 2 + [2] * 9


def test_a_view_whose_dataset_does_not_pack_stays_as_it_is() -> None:
    rows = view(10)
    assert packing(rows) is rows


def test_no_more_is_made_ahead_than_asked_for() -> None:
    dataset = Numbers(400)
    loader = BatchLoader(
        DatasetView(dataset, range(400)), batch_size=4, shuffle=False, seed=0, prefetch=3
    )
    ahead = [dataset.made - taken for taken, _ in enumerate(loader.epoch(0), start=1)]
    # 3 are being made or wait, beside the one that was taken.
    assert len(ahead) == 100
    assert max(ahead) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"threads": 0}, "threads=0"),
        ({"seed": -1}, "seed=-1"),
        ({"part": (2, 2)}, r"part=\(2, 2\): give \(r, n\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchLoader(view(3), **{"batch_size": 1, "shuffle": True, "seed": 0, **arguments})


def test_wrong_places() -> None:
    loader = BatchLoader(view(10), batch_size=4, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="epoch=-1"):
        loader.epoch(-1)
    with pytest.raises(ValueError, match="start_batch=4: an epoch has batches 0 to 3"):
        loader.epoch(0, 4)
