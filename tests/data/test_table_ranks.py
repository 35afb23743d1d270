"""Ranks that read a table together: the batches of one rank, and each its own share of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tessera.training.data import BatchLoader
from tessera.training.data.dataset import View
from tessera.training.data.table import parquet as parquet_module
from tessera.training.data.table import view as view_module
from tessera.training.data.table.parquet import TableFile
from tests.data import clicks
from tests.data.test_table import WHOLE, arrow_table, opened, plain_rows

ROWS = 1200
GROUP = 25


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """48 row groups; units have 2 of them, and shuffled windows 12 units or a part of them."""
    monkeypatch.setattr(parquet_module, "UNIT_ROWS", 50)
    monkeypatch.setattr(view_module, "WINDOW_ROWS", 600)
    path = tmp_path / "a.parquet"
    pq.write_table(arrow_table(clicks.rows(ROWS)), path, row_group_size=GROUP)
    return path


@pytest.fixture
def groups_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row groups whose features are read, in the order of reading."""
    found: list[int] = []
    read = TableFile.read

    def counting(self: TableFile, groups: Any, names: Any) -> Any:
        if "price" in names:
            found.extend(groups)
        return read(self, groups, names)

    monkeypatch.setattr(TableFile, "read", counting)
    return found


def epoch(view: View, part: tuple[int, int], *, shuffle: bool, start: int = 0) -> list[list[Any]]:
    """Each batch's rows as plain values."""
    loader = BatchLoader(
        view,
        batch_size=64,
        shuffle=shuffle,
        seed=3,
        part=part,
        numbered=True,
        threads=2,
        prefetch=3,
    )
    return [plain_rows(batch) for batch in loader.epoch(1, start)]


@pytest.mark.parametrize("held_out", [0.0, 0.2])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_make_the_batches_of_one(
    data: Path, groups_read: list[int], ranks: int, held_out: float
) -> None:
    view = opened(data, valid_fraction=held_out, test_fraction=0.0).train
    alone = epoch(view, (0, 1), shuffle=True)
    of_one = len(groups_read)
    parts, reads = [], []
    for rank in range(ranks):
        groups_read.clear()
        parts.append(epoch(view, (rank, ranks), shuffle=True))
        reads.append(len(groups_read))
        # Taken up midway, the rest of the epoch is the same.
        assert epoch(view, (rank, ranks), shuffle=True, start=5) == parts[-1][5:]
    for number, batch in enumerate(alone):
        together = [row for part in parts for row in part[number]]
        assert sorted(map(repr, together)) == sorted(map(repr, batch))
    # Nobody reads what others need, but for the row groups in which a window's shares begin.
    assert of_one == ROWS // GROUP
    windows = -(-len(view) // 500)
    assert sum(reads) <= of_one + windows * (ranks - 1)
    assert max(reads) <= of_one / ranks + 2 * windows
    # The parts are about even: 5 standard deviations of draws without replacement.
    for batch_parts in zip(*parts, strict=True):
        count = sum(map(len, batch_parts))
        bound = 5 * (count / ranks) ** 0.5 + 1
        assert all(abs(len(part) - count / ranks) <= bound for part in batch_parts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_in_order_each_rank_reads_one_stretch(
    data: Path, groups_read: list[int], ranks: int
) -> None:
    view = opened(data, **WHOLE).train
    alone = [row for batch in epoch(view, (0, 1), shuffle=False) for row in batch]
    together = []
    for rank in range(ranks):
        groups_read.clear()
        together += [row for b in epoch(view, (rank, ranks), shuffle=False) for row in b]
        # Units of two groups: its share, the units that it begins and ends in, two read ahead.
        assert len(groups_read) <= ROWS / GROUP / ranks + 2 * (2 + 2)
    assert together == alone


def test_more_ranks_than_rows(data: Path) -> None:
    view = opened(data, valid_path=str(data), test_path=str(data)).valid
    for shuffle in (True, False):
        parts = [epoch(view, (rank, 70), shuffle=shuffle) for rank in range(70)]
        assert len({len(part) for part in parts}) == 1
        rows = [row[0] for part in parts for batch in part for row in batch]
        assert sorted(rows) == list(range(ROWS))
