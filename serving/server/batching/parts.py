"""A request that is larger than a batch is cut into parts; its scores are put together again.

A part of a request that shares rows takes those from the first to the last that its samples use, so
what it looks up is still bounded, and candidates that come user by user share as before.

Legend: ``B`` samples of the request, ``F`` features of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.serving.package.schema import InputSchema
from tessera.serving.server.request.decoded_request import (
    I32,
    I64,
    DecodedRequest,
    JaggedGroup,
    SharedRows,
)
from tessera.serving.server.request.jagged import segment_index, segment_starts


def cut_request(
    request: DecodedRequest, schema: InputSchema, *, max_samples: int, max_ids: int
) -> list[DecodedRequest]:
    """``request`` itself if it fits a batch, else consecutive parts of its samples that do.

    A sample with more than ``max_ids`` ids becomes a part of its own, and samples that share many ids
    stay together as long as those that they do not share are at most half of ``max_ids``.
    """
    if request.samples <= max_samples and (request.ids <= max_ids or request.samples == 1):
        return [request]
    dense_features = len(schema.dense_features)
    cutter = _cutter(request, len(schema.group("id_list")))
    own_B = cutter.own_ids() + _ids_per_sample(request.id_score_list, request.samples)
    parts: list[DecodedRequest] = []
    for begin, end in _ranges(own_B, cutter, max_samples, max_ids):
        plain, shared = cutter.part(begin, end)
        scored = _rows(request.id_score_list, request.samples, begin, end)
        dense = request.dense[begin * dense_features : end * dense_features]
        ids = plain.values.size + scored.values.size
        parts.append(DecodedRequest(end - begin, ids, dense, plain, scored, shared))
    return parts


class _Cutter:
    """Cuts the ``id_list`` group of a request whose samples share nothing."""

    def __init__(self, request: DecodedRequest) -> None:
        self._group, self._samples = request.id_list, request.samples

    def own_ids(self) -> I64:
        """``[B]``: each sample's ids, those of shared rows left out."""
        return _ids_per_sample(self._group, self._samples)

    def rows(self) -> tuple[list[int], list[int]]:
        """``[B]``: the shared row of each sample; ``[R + 1]``: ids of the rows before each row."""
        return [0] * self._samples, [0, 0]

    def part(self, begin: int, end: int) -> tuple[JaggedGroup, SharedRows | None]:
        """The group of samples ``begin`` to ``end``."""
        return _rows(self._group, self._samples, begin, end), None


class _SharedCutter(_Cutter):
    """Cuts that of a request whose samples share rows.

    Args:
        request: as it came.
        shared: its shared rows.
        F: features of the group.
    """

    def __init__(self, request: DecodedRequest, shared: SharedRows, F: int) -> None:
        super().__init__(request)
        self._shared = shared
        self._is_shared = np.zeros(F, dtype=np.bool_)
        self._is_shared[list(shared.features)] = True
        self._bags_F = np.where(self._is_shared, shared.rows, request.samples)
        self._first_bag_F = segment_starts(self._bags_F)
        self._starts = segment_starts(self._group.lengths)

    def own_ids(self) -> I64:
        """``[B]``: each sample's ids of the features that it does not share."""
        own = self._lengths(~self._is_shared).reshape(-1, self._samples)
        ids: I64 = own.sum(axis=0, dtype=np.int64)
        return ids

    def rows(self) -> tuple[list[int], list[int]]:
        """``[B]``: the shared row of each sample; ``[R + 1]``: ids of the rows before each row."""
        by_row = self._lengths(self._is_shared).reshape(-1, self._shared.rows)
        before = np.cumsum(by_row.sum(axis=0, dtype=np.int64))
        return self._shared.index.tolist(), [0, *before.tolist()]

    def part(self, begin: int, end: int) -> tuple[JaggedGroup, SharedRows | None]:
        """The group of samples ``begin`` to ``end``, and the shared rows that they use."""
        index = self._shared.index[begin:end]
        low, high = int(index.min()), int(index.max()) + 1
        first = self._first_bag_F + np.where(self._is_shared, low, begin)
        count = np.where(self._is_shared, high - low, end - begin)
        bags = segment_index(first, count)
        lengths = self._group.lengths[bags]
        values = self._group.values[segment_index(self._starts[bags], lengths)]
        rows = SharedRows(self._shared.features, high - low, index - np.int32(low))
        return JaggedGroup(lengths, values, None), rows

    def _lengths(self, which: NDArray[np.bool_]) -> I32:
        """The lengths of some features, one feature behind the other."""
        return self._group.lengths[segment_index(self._first_bag_F[which], self._bags_F[which])]


def _cutter(request: DecodedRequest, F: int) -> _Cutter:
    if request.shared is None:
        return _Cutter(request)
    return _SharedCutter(request, request.shared, F)


def join_outputs(parts: Sequence[Mapping[str, bytes]]) -> Mapping[str, bytes]:
    """The outputs of consecutive parts as those of the whole request."""
    if len(parts) == 1:
        return parts[0]
    return {name: b"".join(part[name] for part in parts) for name in parts[0]}


def _ids_per_sample(group: JaggedGroup, B: int) -> I64:
    ids: I64 = group.lengths.reshape(-1, B).sum(axis=0, dtype=np.int64)
    return ids


def _ranges(own_B: I64, cutter: _Cutter, max_samples: int, max_ids: int) -> list[tuple[int, int]]:
    index, before = cutter.rows()
    ranges: list[tuple[int, int]] = []
    begin = own = looked_up = looked_up_here = 0
    total = int(own_B.sum()) + before[-1]
    low = high = index[0]
    for sample, (count, row) in enumerate(zip(own_B.tolist(), index, strict=True)):
        widens = not low <= row <= high
        low, high = min(low, row), max(high, row)
        ids = own + count + before[high + 1] - before[low]
        # A row is looked up again in every part that has it.  So the rows that a part has leave own ids
        # at least half of the room, and once parts have looked up as many ids as there are, so do all.
        rows_pay = not widens or looked_up >= total
        fits = ids <= max_ids or (rows_pay and own + count <= max_ids // 2)
        if sample > begin and (sample - begin == max_samples or not fits):
            ranges.append((begin, sample))
            looked_up += looked_up_here
            begin, own, low, high = sample, 0, row, row
        own += count
        looked_up_here = own + before[high + 1] - before[low]
    ranges.append((begin, len(index)))
    return ranges


def _rows(group: JaggedGroup, B: int, begin: int, end: int) -> JaggedGroup:
    lengths_FB = group.lengths.reshape(-1, B)
    starts_FB = segment_starts(group.lengths).reshape(-1, B)
    ours = lengths_FB[:, begin:end]
    index = segment_index(starts_FB[:, begin], ours.sum(axis=1, dtype=np.int64))
    weights = None if group.weights is None else group.weights[index]
    return JaggedGroup(ours.ravel(), group.values[index], weights)
