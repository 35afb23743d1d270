"""Commits whose rows passes read where they were staged until the tables have them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tessera.kernels.plan import IdRule, OutOfRange, Pooling
from tessera.kernels.quantize import quantize_table
from tessera.kernels.row_types import FLOAT32
from tessera.kernels.tables import FeatureLookup, make_plan, pack_tables
from tessera.serving.commits.file import CommitError, ReadCommit
from tessera.serving.package.commit import COMMIT_FORMAT_VERSION, Commit, Patch
from tessera.serving.package.loading import SecondInstance
from tessera.serving.package.manifest import GoldenInfo
from tessera.serving.server.follow.followed_model import FollowedModel, UndoRecord
from tessera.serving.server.follow.row_overlay import RowOverlay, rows_apart

ROWS, DIM = 40, 16
WIDTH = 4 * DIM


def patch(number, rows, *, table="t", offset=0, stride=WIDTH, width=WIDTH, record="data/0"):
    """Patch ``number``, and its records' contents: ones, two of them etc."""
    made = Patch(
        record=record,
        table=table,
        offset=offset,
        stride=stride,
        width=width,
        count=len(rows),
        rows=f"rows/{number}",
        bytes=f"bytes/{number}",
    )
    values = np.full((len(rows), width // 4), number + 1, np.float32).view(np.uint8)
    return made, {made.rows: np.array(rows, "<u4").view(np.uint8), made.bytes: values.reshape(-1)}


def read_of(*patches):
    commit = Commit(
        format_version=COMMIT_FORMAT_VERSION,
        model="m",
        version=1,
        number=1,
        base="b" * 64,
        previous="b" * 64,
        newest_example_s=None,
        created_s=0.0,
        step=None,
        patches=tuple(made for made, _ in patches),
        golden=GoldenInfo(samples=0, atol=0.0, rtol=0.0),
        records={},
    )
    contents = {name: content for _, own in patches for name, content in own.items()}
    return ReadCommit(commit=commit, sha256="c" * 64, contents=contents)


def test_rows_of_tables_that_lie_apart_can_be_laid():
    first, second = patch(0, [1, 3]), patch(1, [0, 2], offset=4 * WIDTH)
    assert rows_apart(read_of(first, second)) == {first[0], second[0]}


@pytest.mark.parametrize(
    "other",
    [
        patch(1, [0], offset=2 * WIDTH),  # lies within the first
        patch(1, [7], offset=-4 * WIDTH),
    ],
)
def test_none_can_in_a_record_where_one_lies_within_another(other):
    elsewhere = patch(2, [5], record="data/1")
    assert rows_apart(read_of(patch(0, [1, 3]), other, elsewhere)) == {elsewhere[0]}


def test_rows_of_no_table_and_rows_with_large_gaps_cannot():
    nameless, gaps = patch(0, [1], table=""), patch(1, [1], offset=10_000, stride=2 * WIDTH)
    whole = patch(2, [0], offset=20_000)
    whole = Patch(**{**vars(whole[0]), "rows": ""}), whole[1]
    assert rows_apart(read_of(nameless, gaps, whole)) == set()


class Table:
    """A table that is looked up, and a model over it."""

    def __init__(self, *, overlays=True, golden=None, second=False):
        packed = pack_tables([quantize_table(torch.zeros(ROWS, DIM), FLOAT32)])
        (place,) = packed.places
        self.memory = packed.weights
        self.offset, self.stride = place.data_offset, place.row_stride
        feature = FeatureLookup(
            table=place,
            out_column=0,
            pooling=Pooling.SUM,
            id_rule=IdRule.NONE,
            out_of_range=OutOfRange.CLAMP,
        )
        self._plan = make_plan([feature])
        self.model = FollowedModel(
            runners=[SimpleNamespace(forward=golden)] if golden or second else [],
            memory=[{"data/0": (self.memory,)}],
            sizes={"data/0": self.memory.numel()},
            base="b" * 64,
            verify_golden=False,
            overlays=overlays,
            second=self._second() if second else None,
        )

    def _second(self):
        """An instance with a table of its own."""
        memory = {"data/0": (self.memory.clone(),)}
        return SecondInstance(runner=SimpleNamespace(forward=None), memory=memory)

    def commit(self, rows):
        return read_of(patch(0, rows, offset=self.offset, stride=self.stride))

    def stage(self, rows, **kwargs):
        return self.model.stage(Path("c"), self.commit(rows), **kwargs)

    def looked_up(self):
        ids, lengths = torch.arange(ROWS), torch.ones(ROWS, dtype=torch.int32)
        return torch.ops.tessera.lookup(self.memory, self._plan, ids, lengths, DIM)[:, 0].tolist()


def expected(rows):
    return [float(row in rows) for row in range(ROWS)]


def test_passes_read_the_rows_before_the_table_has_them(monkeypatch):
    table, rows, seen = Table(), [0, 7, 39], []
    staged = table.stage(rows, beside_others=True)
    assert staged.overlay is not None
    assert not staged.exchanges
    assert table.looked_up() == expected([])

    def write(overlay, pause_s):
        seen.append((table.looked_up(), bool(table.memory.any()), table.model.lock.state.commit))
        RowOverlay.write_now(overlay, pause_s)

    monkeypatch.setattr(RowOverlay, "write_now", RowOverlay.write, raising=False)
    monkeypatch.setattr(RowOverlay, "write", write)
    table.model.put_in(staged)
    assert seen == [(expected(rows), False, 1)]
    assert table.looked_up() == expected(rows)
    assert table.memory.any()
    undo = UndoRecord.of(staged)
    assert undo.bytes == len(rows) * (WIDTH + 4)
    table.model.take_back([undo], 0)
    assert not table.memory.any()
    assert table.looked_up() == expected([])


@pytest.mark.parametrize(("overlays", "beside_others"), [(False, True), (True, False)])
def test_rows_are_exchanged_where_others_read_them_or_nobody_waits(overlays, beside_others):
    table = Table(overlays=overlays)
    staged = table.stage([1, 2], beside_others=beside_others)
    assert staged.overlay is None
    table.model.put_in(staged)
    assert table.looked_up() == expected([1, 2])


def test_rows_that_each_instance_has_are_exchanged_in_both():
    table = Table(second=True)
    staged = table.stage([1, 2], beside_others=True)
    assert staged.overlay is None
    table.model.put_in(staged)
    assert table.looked_up() == expected([1, 2])
    ((first, second),) = table.model._instances._pairs.values()
    assert torch.equal(first, second)


def test_wrong_golden_answers_leave_the_table_as_it_was(monkeypatch):
    table, seen = Table(), []

    def refuse(staged, runners):
        seen.append(table.looked_up())
        raise CommitError(staged.path, "does not give its golden answers", "golden")

    monkeypatch.setattr(table.model, "_compare", refuse)
    with pytest.raises(CommitError, match="golden"):
        table.model.put_in(table.stage([3], beside_others=True))
    assert seen == [expected([3])]
    assert table.looked_up() == expected([])
    assert not table.memory.any()
    assert table.model.lock.state.commit == 0
