"""Which rows are trained on and which are held out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tessera.training.data.config import Split
from tessera.training.data.dataset import Rows
from tessera.training.data.prepared import open_or_build

CHUNK_ROWS = 1 << 20
_PARTS = ("train", "valid", "test")

Splits = tuple[Rows | range, Rows | range, Rows | range]


def split_sizes(num_rows: int, valid_fraction: float, test_fraction: float) -> tuple[int, int, int]:
    """Rows of (train, validation, test), each held-out share rounded to the nearest row."""
    valid = round(num_rows * valid_fraction)
    test = min(round(num_rows * test_fraction), num_rows - valid)
    return num_rows - valid - test, valid, test


def split_rows(
    num_rows: int,
    *,
    split: Split,
    held_out: tuple[float, float],
    seed: int,
    prepared: Path | None,
) -> Splits:
    """Row numbers of (train, validation, test), ascending.

    ``time`` takes the first rows for training and the last for the test.  ``random`` draws
    uniformly among all splits of these sizes; of more than `CHUNK_ROWS` rows, uniformly within
    each chunk, every chunk giving its share to every part.  The numbers are kept in files beside
    the prepared folder and mapped into memory: 8 bytes of disk per row, and no memory that grows
    with the rows.

    Args:
        num_rows: rows of the dataset.
        split: see `DataConfig`.
        held_out: shares of (validation, test).
        seed: that of the random draw.
        prepared: the dataset's prepared folder; None: the numbers are kept in memory.
    """
    sizes = split_sizes(num_rows, *held_out)
    if split == "time" or sizes[0] == num_rows:
        train, valid, _ = np.cumsum(sizes).tolist()
        return range(train), range(train, valid), range(valid, num_rows)
    if prepared is None:
        drawn = list(draw_rows(sizes, seed))
        train, valid, test = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
        return train, valid, test
    folder = open_or_build(
        prepared.parent / f"{prepared.name}.splits",
        label="split",
        sources=[prepared / "manifest.json"],
        options={"sizes": list(sizes), "seed": seed},
        build=_build(sizes, seed),
    ).path
    train, valid, test = (_map(folder / f"{part}.i64") for part in _PARTS)
    return train, valid, test


def _map(file: Path) -> Rows:
    if file.stat().st_size == 0:
        return np.empty(0, np.int64)
    return np.memmap(file, "<i8", "r")


def draw_rows(sizes: tuple[int, int, int], seed: int) -> Iterator[tuple[Rows, Rows, Rows]]:
    """Row numbers for (train, validation, test), ascending, one chunk of rows after the other."""
    random = np.random.default_rng(seed)
    left = np.array(sizes, np.int64)
    for start in range(0, sum(sizes), CHUNK_ROWS):
        rows = random.permutation(min(CHUNK_ROWS, sum(sizes) - start)) + start
        counts = _share(left, len(rows))
        left -= counts
        train, valid, test = map(np.sort, np.split(rows, np.cumsum(counts)[:-1]))
        yield train, valid, test


def _build(sizes: tuple[int, int, int], seed: int) -> Callable[[Path], Mapping[str, Any]]:
    def build(folder: Path) -> Mapping[str, Any]:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context((folder / f"{part}.i64").open("wb")) for part in _PARTS]
            for pieces in draw_rows(sizes, seed):
                for file, piece in zip(files, pieces, strict=True):
                    file.write(piece.astype("<i8").data)
        return {}

    return build


def _share(left: Rows, count: int) -> Rows:
    """``count`` things dealt out in proportion to ``left``, to the largest remainders last."""
    shares, remainders = np.divmod(left * count, left.sum())
    shares[np.argsort(-remainders, kind="stable")[: count - shares.sum()]] += 1
    return shares
