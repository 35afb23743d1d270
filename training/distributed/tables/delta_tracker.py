"""Which rows of tables have been trained since somebody last asked: a bitmap per shard.

A row is noted when it is looked up for a step, whatever its gradient is then; an optimizer that works in
the backward pass changes no other row.  Tables with gradients of their own are changed as a whole by their
optimizer, and are noted so.  (TorchRec's name for this is ``ModelDeltaTracker``.)

Legend: F features, N ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tessera.training.distributed.tables.kernels.bags import Bags
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable


class TouchedRows:
    """The rows that the lookups of one kernel have touched; on its device.

    Args:
        tables: the kernel's shards, in the order of their features.
        device: where their ids are.
        whole: whether each step changes every row.
    """

    def __init__(
        self, tables: Sequence[ShardedEmbeddingTable], device: torch.device, *, whole: bool
    ) -> None:
        self._whole, self._stepped = whole, False
        self._starts = [0, *accumulate(table.local_rows for table in tables)]
        features = [
            (start, table.local_rows)
            for start, table in zip(self._starts, tables, strict=False)
            for _ in table.feature_names
        ]
        self._starts_F, self._rows_F = (
            torch.tensor(column, dtype=torch.int64, device=device)
            for column in zip(*features, strict=True)
        )
        # One more than rows, so that it is never empty.
        self._touched = torch.zeros(self._starts[-1] + 1, dtype=torch.bool, device=device)

    @torch.no_grad()
    def note(self, bags: Bags) -> None:
        """Take note of a lookup whose step is to change its rows; does not wait for the device."""
        if self._whole:
            self._stepped = True
            return
        ids_N = bags.ids
        if not ids_N.numel():
            return
        bounds_F1 = bags.bounds(len(self._starts_F))
        if ids_N.device.type == "cpu":
            self._note_on_cpu(ids_N, bounds_F1)
            return
        counts_F = bounds_F1.diff()
        starts_N = torch.repeat_interleave(self._starts_F, counts_F, output_size=len(ids_N))
        # An id that is not a row reads row 0, or none.
        rows_N = torch.repeat_interleave(self._rows_F, counts_F, output_size=len(ids_N))
        outside = (ids_N < 0) | (ids_N >= rows_N)
        places = torch.where(outside, torch.zeros_like(ids_N), ids_N) + starts_N
        self._touched.index_fill_(0, places, True)

    def _note_on_cpu(self, ids_N: Tensor, bounds_F1: Tensor) -> None:
        """Take note of ids that are rows; numpy does it in less than half of torch's time."""
        ids, bounds = ids_N.detach().numpy(), bounds_F1.tolist()
        places = np.empty_like(ids)
        for start, begin, end in zip(self._starts_F.tolist(), bounds, bounds[1:], strict=False):
            np.add(ids[begin:end], start, out=places[begin:end])
        self._touched.numpy()[places] = True

    def take(self) -> list[Tensor]:
        """Give the touched rows of each shard, ascending ``[n]`` int64 on the CPU, and forget them."""
        if self._whole:
            stepped, self._stepped = self._stepped, False
            sizes = [
                end - start for start, end in zip(self._starts, self._starts[1:], strict=False)
            ]
            return [torch.arange(size if stepped else 0) for size in sizes]
        found = [
            self._touched[start:end].nonzero().flatten().cpu()
            for start, end in zip(self._starts, self._starts[1:], strict=False)
        ]
        self._touched.zero_()
        return found


class TrackedKernel(Protocol):
    """A kernel as `DeltaTracker` sees it."""

    tables: list[ShardedEmbeddingTable]
    touched: TouchedRows | None

    def split_embedding_weights(self) -> list[Tensor]:
        """Per shard its live ``[local_rows, local_cols]``."""
        ...

    def track(self) -> None:
        """Begin to take note of touched rows."""
        ...


class DeltaTracker:
    """The rows of a model's tables that this rank has touched since the last `take`.

    Args:
        kernels: of the model's sharded collections, on this rank.

    Attributes:
        kernels: the same.
    """

    def __init__(self, kernels: Sequence[TrackedKernel]) -> None:
        self.kernels = kernels
        for kernel in kernels:
            kernel.track()

    @classmethod
    def of(cls, model: nn.Module) -> DeltaTracker:
        """That of all sharded collections in a model."""
        found = [getattr(part, "table_kernels", None) for part in model.modules()]
        return cls([kernel for kernels in found if callable(kernels) for kernel in kernels()])

    def shards(self) -> Iterator[tuple[ShardedEmbeddingTable, Tensor]]:
        """Each shard of this rank with its live values ``[local_rows, local_cols]``."""
        for kernel in self.kernels:
            yield from zip(kernel.tables, kernel.split_embedding_weights(), strict=True)

    def take(self) -> dict[str, list[Tensor]]:
        """Give, by table, the touched rows ``[n]`` int64 of each of its shards here, and forget them.

        Shards of a table are in the order of `shards`.
        """
        found: dict[str, list[Tensor]] = {}
        for kernel in self.kernels:
            assert kernel.touched is not None
            for table, rows in zip(kernel.tables, kernel.touched.take(), strict=True):
                place = table.local_metadata
                begin = 0 if place is None else place.shard_offsets[0]
                found.setdefault(table.name, []).append(rows + begin)
        return found
