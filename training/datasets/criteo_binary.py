"""Criteo's rows in numpy files, and batches from them.

Three ``.npy`` files hold the rows of one text file: dense ``[n, 13]`` float32, sparse ``[n, 26]``
integers, labels ``[n, 1]`` int32.
"""

# ruff: noqa: FBT001, FBT002, PLR0917 - signatures that TorchRec users know

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from tessera.errors import UserError, refuse_unknown
from tessera.training.data import criteo_format as fmt
from tessera.training.data.batch import Batch
from tessera.training.data.criteo_read import read_criteo
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

DEFAULT_CAT_NAMES = [f"cat_{number}" for number in range(fmt.NUM_SPARSE)]

Array = npt.NDArray[Any]


class BinaryCriteoUtils:
    """Makes the numpy files and reads parts of them."""

    @staticmethod
    def tsv_to_npys(
        in_file: str, out_dense_file: str, out_sparse_file: str, out_labels_file: str
    ) -> None:
        """Write a text file's rows as three numpy files.

        Missing values and categories are 0.  Dense values are ``log(value - smallest + 2)``, with the
        smallest value of all columns of the file; sparse values are int64.  The whole file's rows are in
        memory at once, 164 bytes each.

        Raises:
            UserError: a line is malformed; the first is named.
        """
        parts = []
        for part in read_criteo([Path(in_file)]):
            if part.malformed.total:
                raise UserError(f"{in_file}: {part.malformed}")
            parts.append(part.rows)
        rows = np.concatenate(parts, axis=1) if parts else np.empty((fmt.ROW_WORDS, 0), np.uint32)
        dense = np.nan_to_num(rows[fmt.DENSE_WORDS].view(np.float32).T).astype(np.float64)
        if dense.size:
            dense = np.log(dense - dense.min() + 2)
        labels = rows[fmt.LABEL_WORD].view(np.float32).astype(np.int32)
        np.save(out_dense_file, dense.astype(np.float32))
        np.save(out_sparse_file, rows[fmt.SPARSE_WORDS].T.astype(np.int64))
        np.save(out_labels_file, labels.reshape(-1, 1))

    @staticmethod
    def get_shape_from_npy(path: str) -> tuple[int, ...]:
        """The shape of the array in a file, of which only the head is read."""
        return tuple(np.load(path, mmap_mode="r", allow_pickle=False).shape)

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: list[int],
        rank: int,
        world_size: int,
        start_row: int = 0,
        last_row: int | None = None,
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """Which rows of which files belong to a rank: neighbouring ones, as many for each rank.

        Args:
            lengths: rows of each file.
            rank: whose rows; the first ranks have one more where they do not divide evenly.
            world_size: ranks.
            start_row: the first row that counts, over all files.
            last_row: the last row that counts; None: the last of all.

        Returns:
            The file's place to its first and last row, and the rows beyond equal shares.
        """
        stop = sum(lengths) if last_row is None else last_row + 1
        each, remainder = divmod(stop - start_row, world_size)
        first = start_row + rank * each + min(rank, remainder)
        after = first + each + (rank < remainder)
        ranges = {}
        begin = 0
        for place, length in enumerate(lengths):
            low, high = max(first, begin), min(after, begin + length)
            if low < high:
                ranges[place] = (low - begin, high - 1 - begin)
            begin += length
        return ranges, remainder

    @staticmethod
    def load_npy_range(fname: str, start_row: int, num_rows: int, mmap_mode: bool = False) -> Array:
        """Rows ``start_row`` to ``start_row + num_rows - 1`` of a matrix in a file.

        Args:
            fname: the file.
            start_row: the first row.
            num_rows: how many.
            mmap_mode: map them into memory instead of reading them.

        Raises:
            ValueError: no matrix, or rows that it does not have.
        """
        matrix: Array = np.load(fname, mmap_mode="r", allow_pickle=False)
        if matrix.ndim != 2:
            raise ValueError(f"{fname} has {matrix.ndim} dimensions; give a file with a matrix")
        if not 0 <= start_row < len(matrix):
            raise ValueError(f"start_row is {start_row}; {fname} has rows 0 to {len(matrix) - 1}")
        if not 0 <= num_rows <= len(matrix) - start_row:
            raise ValueError(
                f"num_rows is {num_rows}; {fname} has {len(matrix) - start_row} rows from "
                f"{start_row} on"
            )
        part = matrix[start_row : start_row + num_rows]
        return part if mmap_mode else np.array(part)


class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """Batches of one rank from numpy files, one id per category and sample.

    Batch ``i`` of all ranks' belongs to rank ``i % world_size``.  Rows that are left after batches of
    full size are shared out as one smaller batch for each rank.

    Args:
        stage: ``train`` takes all rows; ``val`` the first half of the first file, ``test`` the second.
        dense_paths: files of dense values, ``sparse_paths`` and ``labels_paths`` beside them.
        sparse_paths: files of ids.
        labels_paths: files of labels.
        batch_size: samples per batch.
        rank: whose batches.
        world_size: ranks.
        drop_last: leave out the smaller batches.
        shuffle_batches: the samples of a batch in random order.
        shuffle_training_set: in the stage ``train``, rows in random order over all ranks and files;
            each rank keeps its own in memory.
        shuffle_training_set_random_seed: of both, numpy's.
        mmap_mode: map the files into memory instead of reading them.
        hashes: ids are taken modulo these ``[26]`` numbers.

    Raises:
        UserError: an unknown stage, or lists of different lengths.
    """

    def __init__(
        self,
        stage: str,
        dense_paths: list[str],
        sparse_paths: list[str],
        labels_paths: list[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: list[int] | None = None,
    ) -> None:
        super().__init__()
        refuse_unknown("stage", stage, ("train", "val", "test"))
        if not len(dense_paths) == len(sparse_paths) == len(labels_paths) > 0:
            raise UserError(
                f"there are {len(dense_paths)} dense_paths, {len(sparse_paths)} sparse_paths and "
                f"{len(labels_paths)} labels_paths; give as many of each, one at least"
            )
        self.batch_size = batch_size
        self._shuffles = shuffle_batches
        self._random = np.random.RandomState(shuffle_training_set_random_seed)
        self._hashes = None if hashes is None else np.array(hashes).reshape(1, fmt.NUM_SPARSE)
        mode = "r" if mmap_mode or shuffle_training_set else None
        arrays = [
            [np.load(path, mmap_mode=mode, allow_pickle=False) for path in paths]  # type: ignore[arg-type] # numpy's Literal
            for paths in (dense_paths, sparse_paths, labels_paths)
        ]
        if stage == "train" and shuffle_training_set:
            arrays = self._shuffled_rows_of(arrays, rank, world_size)
            rank, world_size = 0, 1
        elif stage != "train":
            half = (len(arrays[0][0]) + 1) // 2
            part = slice(half) if stage == "val" else slice(half, None)
            arrays = [[kind[0][part], *kind[1:]] for kind in arrays]
        self._arrays = arrays
        self._bounds = np.cumsum([0, *map(len, arrays[0])])
        self._cuts = self._batches_of(rank, world_size, drop_last=bool(drop_last))

    def _shuffled_rows_of(
        self, arrays: Sequence[Sequence[Array]], rank: int, world_size: int
    ) -> list[list[Array]]:
        """This rank's rows; row ``i`` of all goes to place ``permutation[i]`` of all ranks' rows."""
        bounds = np.cumsum([0, *map(len, arrays[0])])
        permutation = self._random.permutation(int(bounds[-1]))
        (place,) = BinaryCriteoUtils.get_file_row_ranges_and_remainder(
            [int(bounds[-1])], rank, world_size
        )[0].values() or [(0, -1)]
        own = np.argsort(permutation)[place[0] : place[1] + 1]  # row numbers in their new order
        return [[_rows_of(kind, bounds, own)] for kind in arrays]

    def _batches_of(self, rank: int, world_size: int, *, drop_last: bool) -> list[tuple[int, int]]:
        """First row and end of each of the rank's batches, over all files."""
        total, size = int(self._bounds[-1]), self.batch_size
        full = total // size // world_size * world_size
        left = total - full * size
        sizes = [size] * full
        if left and not drop_last:
            if left < world_size and full:
                # Too few for a batch each: the last full ones take them in.
                full -= world_size
                left += size * world_size
                sizes = sizes[:full]
            each, more = divmod(left, world_size)
            sizes += [each + (place < more) for place in range(world_size)]
        ends = np.cumsum([0, *sizes])
        cuts = [(int(low), int(high)) for low, high in itertools.pairwise(ends)]
        return [(low, high) for low, high in cuts[rank::world_size] if low < high]

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._cuts)

    def __iter__(self) -> Iterator[Batch]:
        """The rank's batches in order; labels are ``[B]`` int32."""
        for low, high in self._cuts:
            dense, sparse, labels = (self._slice(kind, low, high) for kind in self._arrays)
            if self._hashes is not None:
                sparse = sparse % self._hashes
            if self._shuffles:
                order = self._random.permutation(len(dense))
                dense, sparse, labels = dense[order], sparse[order], labels[order]
            yield _batch(dense, sparse, labels)

    def _slice(self, kind: Sequence[Array], low: int, high: int) -> Array:
        parts = [
            part[max(low - begin, 0) : high - begin]
            for part, begin in zip(kind, self._bounds, strict=False)
            if begin < high and low < begin + len(part)
        ]
        # Memory of its own: a file that is mapped may not be written to.
        return np.concatenate(parts)


def _rows_of(kind: Sequence[Array], bounds: Array, numbers: Array) -> Array:
    """The rows with these numbers over all files, in this order."""
    found = np.empty((len(numbers), kind[0].shape[1]), kind[0].dtype)
    for part, begin in zip(kind, bounds, strict=False):
        here = np.flatnonzero((numbers >= begin) & (numbers < begin + len(part)))
        found[here] = part[numbers[here] - begin]
    return found


def _batch(dense: Array, sparse: Array, labels: Array) -> Batch:
    size, categories = sparse.shape
    count = size * categories
    return Batch(
        dense_features=torch.from_numpy(dense),
        sparse_features=KeyedJaggedTensor(
            DEFAULT_CAT_NAMES,
            torch.from_numpy(np.ascontiguousarray(sparse.T).reshape(-1)),
            lengths=torch.ones(count, dtype=torch.int32),
            offsets=torch.arange(count + 1, dtype=torch.int32),
            stride=size,
            length_per_key=[size] * categories,
            offset_per_key=[size * place for place in range(categories + 1)],
        ),
        labels=torch.from_numpy(labels.reshape(-1)),
    )
