"""``tessera.table_*`` beside loops over single cells, and the arguments that they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tessera.kernels import ops

ops.load()
TABLE = torch.ops.tessera

NONE = torch.empty(0)


class Columns:
    """Random columns, as Python sees them and as the operators take them."""

    def __init__(self, seed, rows, dense, singles, lists, *, weighted=(), skew=0):
        draw = np.random.default_rng(seed)
        self.rows = rows
        self.numbers = [self._with_gaps(draw, draw.normal(size=rows)) for _ in range(dense)]
        self.ids = [
            self._with_gaps(draw, draw.integers(-(2**62), 2**62, rows)) for _ in range(singles)
        ]
        self.lists = []
        for feature in range(lists):
            lengths = draw.integers(0, 5, rows)
            # Bags that do not lie one behind the other, with ids between that no row has.
            order = draw.permutation(rows) if feature % 2 else np.arange(rows)
            starts = np.empty(rows, np.int64)
            gap = skew if feature % 2 else 0
            starts[order] = np.cumsum(lengths[order] + gap) - lengths[order] - gap
            size = int((lengths + gap).sum())
            values = draw.integers(0, 2**40, size)
            weights = draw.random(size).astype(np.float32) if feature in weighted else None
            self.lists.append((values, weights, starts, lengths.astype(np.int32)))
        self.weighted = bool(weighted)

    @staticmethod
    def _with_gaps(draw, values):
        share = draw.choice([0.0, 0.1, 0.9])
        there = draw.random(len(values)) >= share
        return values, None if share == 0.0 else there

    def of_columns(self):
        def tensors(columns, kind):
            return (
                [torch.from_numpy(values.astype(kind)) for values, _ in columns],
                [
                    torch.empty(0, dtype=torch.uint8)
                    if there is None
                    else torch.from_numpy(np.packbits(there, bitorder="little"))
                    for _, there in columns
                ],
            )

        return (*tensors(self.numbers, np.float32), *tensors(self.ids, np.int64))

    def of_lists(self):
        parts = zip(*self.lists, strict=True) if self.lists else ([], [], [], [])
        return [[NONE if part is None else torch.from_numpy(part) for part in own] for own in parts]

    def expected(self, rows):
        """Dense values, lengths, ids and weights of these rows, cell by cell."""
        dense = np.empty((len(rows), len(self.numbers)), np.float32)
        for column, (values, there) in enumerate(self.numbers):
            for place, row in enumerate(rows):
                missing = there is not None and not there[row]
                dense[place, column] = np.nan if missing else values[row]
        lengths, ids, weights = [], [], []
        for values, there in self.ids:
            for row in rows:
                own = [] if there is not None and not there[row] else [values[row]]
                lengths.append(len(own))
                ids += own
                weights += [1.0] * len(own)
        for values, own_weights, starts, own_lengths in self.lists:
            for row in rows:
                bag = slice(starts[row], starts[row] + own_lengths[row])
                lengths.append(own_lengths[row])
                ids += values[bag].tolist()
                bag_weights = np.ones(own_lengths[row]) if own_weights is None else own_weights[bag]
                weights += bag_weights.tolist()
        return (
            dense,
            np.array(lengths, np.int32),
            np.array(ids, np.int64),
            np.array(weights if self.weighted else [], np.float32),
        )


SHAPES = [
    {"rows": 1, "dense": 1, "singles": 1, "lists": 0},
    {"rows": 64, "dense": 0, "singles": 3, "lists": 0},
    {"rows": 200, "dense": 3, "singles": 0, "lists": 2, "skew": 2},
    {"rows": 331, "dense": 13, "singles": 26, "lists": 1},
    {"rows": 100, "dense": 0, "singles": 131, "lists": 0},
    {"rows": 150, "dense": 2, "singles": 2, "lists": 3, "weighted": (1,), "skew": 1},
    {"rows": 150, "dense": 0, "singles": 0, "lists": 2, "weighted": (0, 1)},
]


def same(found, expected):
    for own, wanted in zip(found, expected, strict=True):
        assert own.numpy().dtype == wanted.dtype
        np.testing.assert_array_equal(own.numpy(), wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neighbouring_rows_are_those_of_single_cells(shape):
    columns = Columns(0, **shape)
    rows = columns.rows
    for first, count in (
        (0, rows),
        (rows // 3, rows // 2),
        (rows - 1, 1),
        (rows, 0),
        (5 % rows, 1),
    ):
        found = TABLE.table_batch(
            *columns.of_columns(), *columns.of_lists(), first, count, columns.weighted
        )
        same(found, columns.expected(range(first, first + count)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chosen", [False, True])
def test_rows_in_any_order_are_those_of_single_cells(shape, chosen):
    columns = Columns(1, **shape)
    draw = np.random.default_rng(2)
    kept = np.arange(columns.rows)
    if chosen:
        kept = np.sort(draw.permutation(columns.rows)[: columns.rows // 2 + 1])
    stored = (
        torch.empty(len(kept), len(columns.numbers)),
        torch.empty(len(kept), len(columns.ids), dtype=torch.int64),
        torch.empty(len(kept), -(-len(columns.ids) // 64), dtype=torch.int64),
    )
    named = torch.from_numpy(kept) if chosen else None
    TABLE.table_interleave(*columns.of_columns(), named, *stored)
    of_lists = columns.of_lists()
    of_lists[2:] = [[part[kept] for part in parts] for parts in of_lists[2:]]
    for rows in (draw.permutation(len(kept)), draw.integers(0, len(kept), 77), np.arange(0)):
        found = TABLE.table_batch_at(*stored, *of_lists, torch.from_numpy(rows), columns.weighted)
        same(found, columns.expected(kept[rows]))


def test_weights_that_no_row_has_are_ones():
    # A column of weighted lists that are all empty says nothing of itself.
    empty = [torch.empty(0, dtype=torch.int64)], [NONE]
    starts, lengths = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    ids = torch.tensor([4, 5, 6])
    no_bits = torch.empty(0, dtype=torch.uint8)
    _, _, values, weights = TABLE.table_batch(
        [], [], [ids], [no_bits], *empty, [starts], [lengths], 0, 3, True
    )
    assert values.tolist() == [4, 5, 6]
    assert weights.tolist() == [1.0, 1.0, 1.0]


def lists_with(**changed):
    given = {
        "values": torch.arange(6),
        "weights": NONE,
        "starts": torch.tensor([0, 2, 4]),
        "lengths": torch.tensor([2, 2, 2], dtype=torch.int32),
    } | changed
    return [[part] for part in given.values()]


@pytest.mark.parametrize(
    ("lists", "first", "rows", "says"),
    [
        (lists_with(lengths=torch.tensor([2, 2, 3], dtype=torch.int32)), 0, 3, "row 2 .* 3 ids"),
        (lists_with(lengths=torch.tensor([-1, 2, 2], dtype=torch.int32)), 0, 3, "row 0"),
        (lists_with(starts=torch.tensor([0, -2, 4])), 0, 3, "row 1"),
        (lists_with(weights=torch.ones(5)), 0, 3, "5 weights of 6 ids"),
        (lists_with(starts=torch.tensor([0, 2])), 0, 2, "2 of them, but 3 lengths"),
        (lists_with(values=torch.arange(6.0)), 0, 3, "list_values"),
        (lists_with(), 1, 3, "3 rows, expected at least 4"),
        (lists_with(), -1, 2, "at least 0"),
    ],
)
def test_lists_that_do_not_fit_are_refused(lists, first, rows, says):
    with pytest.raises(RuntimeError, match=says):
        TABLE.table_batch([], [], [], [], *lists, first, rows, False)


def test_columns_that_do_not_fit_are_refused():
    none = ([], [], [], [])
    ids, bits = torch.arange(20), torch.empty(0, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="column 0 has 20 rows, expected at least 21"):
        TABLE.table_batch([], [], [ids], [bits], *none, 1, 20, False)
    with pytest.raises(RuntimeError, match="2 bytes do not say it of 20 rows"):
        TABLE.table_batch([], [], [ids], [torch.zeros(2, dtype=torch.uint8)], *none, 0, 20, False)
    with pytest.raises(RuntimeError, match="1 columns, but 0 bitmaps"):
        TABLE.table_batch([], [], [ids], [], *none, 0, 20, False)
    stored = torch.empty(4, 0), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 1).long()
    for row in (4, -1):
        with pytest.raises(RuntimeError, match=f"entry 1 is {row}, expected 0 to 3"):
            TABLE.table_batch_at(*stored, *none, torch.tensor([0, row]), False)
    with pytest.raises(RuntimeError, match="entry 0 is 20, expected 0 to 19"):
        TABLE.table_interleave(
            [], [], [ids, ids], [bits, bits], torch.tensor([20, 0, 0, 0]), *stored
        )
    with pytest.raises(RuntimeError, match="needed, got"):
        TABLE.table_interleave([], [], [ids], [bits], None, *stored)


def ids_of_rows(first, rows):
    """The values of a batch of one column whose ids are the numbers of its rows."""
    none = ([], [], [], [])
    column, bits = torch.arange(first + rows), torch.empty(0, dtype=torch.uint8)
    return TABLE.table_batch([], [], [column], [bits], *none, first, rows, False)[2]


def test_memory_of_a_batch_is_used_again_once_nobody_holds_it():
    rows = 100_000  # large enough not to be the C library's
    held = [ids_of_rows(first, rows) for first in range(4)]
    places = [values.data_ptr() for values in held]
    assert len(set(places)) == len(places)
    last_rows = held[0][-5:]  # holds the whole of it
    numbers = held[1].numpy()
    del held
    others = [ids_of_rows(first, rows) for first in range(10, 14)]
    assert {values.data_ptr() for values in others} & set(places[2:])
    assert not {values.data_ptr() for values in others} & set(places[:2])
    for first, values in enumerate(others, start=10):
        assert torch.equal(values, torch.arange(first, first + rows))
    assert torch.equal(last_rows, torch.arange(rows - 5, rows))
    assert np.array_equal(numbers, np.arange(1, 1 + rows))


def test_threads_make_and_let_go_of_batches_at_once():
    def make(worker):
        kept = []
        for turn in range(60):
            first = 1_000 * worker + turn
            kept.append((first, ids_of_rows(first, 8_192 + 512 * (turn % 7))))
            first, values = kept[0] if len(kept) < 4 else kept.pop(0)
            assert torch.equal(values, torch.arange(first, first + len(values)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(8)))
