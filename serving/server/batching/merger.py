"""Many jagged requests become one batch, feature-major, in memory that is used again.

A request's ids lie feature by feature; the batch needs all requests' ids of the first feature,
then all of the second.  Each group is moved by one concatenation and one gather, however many
requests and features there are.  `merge_slowly` says the same in plain loops and is the test's
reference.

Where a request shares rows of features among its samples, the batch does: those features have the
rows of all requests one after the other, and a request that shares nothing brings a row per sample.

Legend: ``R`` requests, ``B`` samples (of a request, or of the batch), ``F`` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.serving.package.schema import FeatureSpec, InputSchema
from tessera.serving.server.request.decoded_request import (
    F32,
    I32,
    I64,
    DecodedRequest,
    JaggedGroup,
    SharedRows,
)
from tessera.serving.server.request.jagged import segment_index, segment_starts


class MergedGroup:
    """One group of a merged batch.

    Attributes:
        lengths: ``[F * B]`` int32, feature-major.
        values: ``[N]`` int64.
        weights: ``[N]`` float32; empty for a group without weights.
    """

    __slots__ = ("lengths", "values", "weights")

    def __init__(self, lengths: I32, values: I64, weights: F32) -> None:
        self.lengths = lengths
        self.values = values
        self.weights = weights


class MergedBatch:
    """The arrays of a batch; they live in the merger's memory until its next merge.

    Attributes:
        samples: ``B``.
        ids: of both groups.
        dense: ``[B, F_dense]`` float32.
        id_list: the group without weights.
        id_score_list: the group with weights.
        out_of_range_ids: ids outside their table that the model clamps or hashes.
        shared: ``[F]`` bool, the features of ``id_list`` whose rows are shared; None: none are.
        row_index: ``[B]`` int32, the shared row of each sample; None likewise.
    """

    __slots__ = (
        "dense",
        "id_list",
        "id_score_list",
        "ids",
        "out_of_range_ids",
        "row_index",
        "samples",
        "shared",
    )

    def __init__(
        self,
        dense: F32,
        id_list: MergedGroup,
        id_score_list: MergedGroup,
        out_of_range_ids: int,
    ) -> None:
        self.samples = dense.shape[0]
        self.ids = id_list.values.size + id_score_list.values.size
        self.dense = dense
        self.id_list = id_list
        self.id_score_list = id_score_list
        self.out_of_range_ids = out_of_range_ids
        self.shared: NDArray[np.bool_] | None = None
        self.row_index: I32 | None = None


class Merger:
    """Merges batches of one model; owned by one worker thread.

    Ids become int64 whatever the clients sent, so that the model sees one type only.
    """

    def __init__(self, schema: InputSchema) -> None:
        self._dense_features = len(schema.dense_features)
        self._dense = _Pool(np.dtype(np.float32))
        self._plain = _GroupMerger(schema.group("id_list"))
        self._scored = _GroupMerger(schema.group("id_score_list"))

    def merge(self, requests: Sequence[DecodedRequest]) -> MergedBatch:
        """One batch of all ``requests``' samples, in their order (at least one request).

        Requests that share rows share those of the same features.
        """
        samples = [request.samples for request in requests]
        B = sum(samples)
        dense = self._dense.take(B * self._dense_features)
        np.concatenate([request.dense for request in requests], out=dense)
        groups = [request.id_list for request in requests]
        sharing = _Sharing.of(requests, self._plain.features, samples)
        if sharing is None:
            plain = self._plain.merge(groups, samples, B)
            outside = self._plain.count_outside(plain, B)
        else:
            plain = self._plain.merge_bags(groups, sharing.bags_RF)
            outside = self._plain.count_outside(plain, sharing.bags_RF.sum(axis=0))
        scored = self._scored.merge([request.id_score_list for request in requests], samples, B)
        outside += self._scored.count_outside(scored, B)
        merged = MergedBatch(dense.reshape(B, self._dense_features), plain, scored, outside)
        if sharing is not None:
            merged.shared, merged.row_index = sharing.flags, sharing.row_index
        return merged

    def nbytes(self) -> int:
        """Bytes that the merger holds for its next batch."""
        return self._dense.nbytes() + self._plain.nbytes() + self._scored.nbytes()


class _Sharing:
    """How the requests of a batch share rows.

    Attributes:
        flags: ``[F]`` bool, the features that are shared.
        bags_RF: ``[R, F]`` int64, the bags that each request has of each feature.
        row_index: ``[B]`` int32.
    """

    __slots__ = ("bags_RF", "flags", "row_index")

    def __init__(
        self, shared: Sequence[SharedRows | None], at: tuple[int, ...], F: int, samples: list[int]
    ) -> None:
        self.flags = np.zeros(F, dtype=np.bool_)
        self.flags[list(at)] = True
        self.bags_RF: I64 = np.repeat(np.array(samples, dtype=np.int64)[:, None], F, axis=1)
        rows = [B if own is None else own.rows for own, B in zip(shared, samples, strict=True)]
        self.bags_RF[:, self.flags] = np.array(rows)[:, None]
        begins = segment_starts(np.array(rows)).tolist()
        self.row_index: I32 = np.concatenate(
            [
                (np.arange(B, dtype=np.int32) if own is None else own.index) + np.int32(begin)
                for own, B, begin in zip(shared, samples, begins, strict=True)
            ],
            dtype=np.int32,
        )

    @classmethod
    def of(cls, requests: Sequence[DecodedRequest], F: int, samples: list[int]) -> _Sharing | None:
        """How ``requests`` share rows; None where each sample has rows of its own."""
        shared = [request.shared for request in requests]
        sets = {rows.features for rows in shared if rows is not None}
        if not sets:
            return None
        (features,) = sets
        return cls(shared, features, F, samples)


class _Pool:
    """One growing array whose beginning is handed out."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._array = np.empty(256, dtype)

    def take(self, size: int) -> NDArray[Any]:
        if size > self._array.size:
            self._array = np.empty(2 * size, self._array.dtype)
        return self._array[:size]

    def nbytes(self) -> int:
        return self._array.nbytes


class _GroupMerger:
    def __init__(self, features: tuple[FeatureSpec, ...]) -> None:
        self.features = len(features)
        self._lengths = _Pool(np.dtype(np.int32))
        self._values = _Pool(np.dtype(np.int64))
        self._weights = _Pool(np.dtype(np.float32))
        counted = [f.hashing == "none" and f.out_of_range != "reject" for f in features]
        self._counts_outside = any(counted)
        # As uint64, a negative id is above every table's last row.
        self._last_id = np.array(
            [
                feature.rows - 1 if count else np.iinfo(np.uint64).max
                for feature, count in zip(features, counted, strict=True)
            ],
            dtype=np.uint64,
        )

    def merge(self, groups: list[JaggedGroup], samples: list[int], B: int) -> MergedGroup:
        F = self.features
        lengths = self._lengths.take(F * B)
        if len(groups) == 1 or F == 0:
            return self._copy(groups, lengths)
        by_request = np.concatenate([group.lengths for group in groups])
        ids_RF = _lengths_to_feature_major(by_request, samples, F, lengths)
        return self._gather(groups, ids_RF, lengths)

    def _gather(self, groups: list[JaggedGroup], ids_RF: I64, lengths: I32) -> MergedGroup:
        """The ids of all requests, feature by feature, behind their ``lengths``."""
        starts_RF = segment_starts(ids_RF.ravel()).reshape(ids_RF.shape)
        index = segment_index(starts_RF.T.ravel(), ids_RF.T.ravel())
        values = self._values.take(index.size)
        # The index is in range by construction; "clip" spares numpy a buffer for its check.
        source = np.concatenate([group.values for group in groups], dtype=np.int64)
        np.take(source, index, out=values, mode="clip")
        weights = self._weights.take(0)
        if groups[0].weights is not None:
            weights = self._weights.take(index.size)
            scores = np.concatenate(
                [group.weights for group in groups if group.weights is not None]
            )
            np.take(scores, index, out=weights, mode="clip")
        return MergedGroup(lengths, values, weights)

    def merge_bags(self, groups: list[JaggedGroup], bags_RF: I64) -> MergedGroup:
        """The same where a request's features have different numbers of bags; without weights.

        Args:
            groups: of ``R`` requests.
            bags_RF: ``[R, F]``, at least one each.
        """
        lengths = self._lengths.take(int(bags_RF.sum()))
        if len(groups) == 1:
            return self._copy(groups, lengths)
        by_request = np.concatenate([group.lengths for group in groups])
        starts = segment_starts(bags_RF.ravel())
        index = segment_index(starts.reshape(bags_RF.shape).T.ravel(), bags_RF.T.ravel())
        np.take(by_request, index, out=lengths, mode="clip")
        ids_RF = np.add.reduceat(by_request, starts, dtype=np.int64).reshape(bags_RF.shape)
        return self._gather(groups, ids_RF, lengths)

    def _copy(self, groups: list[JaggedGroup], lengths: I32) -> MergedGroup:
        """One request is in order already; it is copied because operators may write to ids."""
        group = groups[0]
        values = self._values.take(group.values.size)
        weights = self._weights.take(0)
        lengths[:] = group.lengths
        values[:] = group.values
        if group.weights is not None:
            weights = self._weights.take(group.values.size)
            weights[:] = group.weights
        return MergedGroup(lengths, values, weights)

    def count_outside(self, group: MergedGroup, bags: int | I64) -> int:
        """Ids outside their table, where each feature has so many ``bags``, or all have."""
        if not self._counts_outside or not group.values.size:
            return 0
        if isinstance(bags, int):
            ids_F = group.lengths.reshape(self.features, bags).sum(axis=1, dtype=np.int64)
        else:
            ids_F = np.add.reduceat(group.lengths, segment_starts(bags), dtype=np.int64)
        last = np.repeat(self._last_id, ids_F)
        return int(np.count_nonzero(group.values.view(np.uint64) > last))

    def nbytes(self) -> int:
        return self._lengths.nbytes() + self._values.nbytes() + self._weights.nbytes()


def _lengths_to_feature_major(by_request: I32, samples: list[int], F: int, out: I32) -> I64:
    """Reorder lengths (request, feature, sample) into (feature, request, sample).

    Args:
        by_request: ``[sum over requests of F * B]`` int32.
        samples: ``[R]`` samples of each request.
        F: features.
        out: ``[F * sum(B)]`` int32, written.

    Returns:
        ``[R, F]`` int64: how many ids each request has of each feature.
    """
    R = len(samples)
    B = samples[0]
    if samples.count(B) == R:
        lengths_RFB = by_request.reshape(R, F, B)
        out.reshape(F, R, B)[:] = lengths_RFB.transpose(1, 0, 2)
        if B == 1:
            return lengths_RFB[:, :, 0].astype(np.int64)
        same: I64 = lengths_RFB.sum(axis=2, dtype=np.int64)
        return same
    samples_RF = np.repeat(np.array(samples, dtype=np.int64)[:, None], F, axis=1)
    starts = segment_starts(samples_RF.ravel())
    index = segment_index(starts.reshape(R, F).T.ravel(), samples_RF.T.ravel())
    np.take(by_request, index, out=out, mode="clip")
    mixed: I64 = np.add.reduceat(by_request, starts, dtype=np.int64).reshape(R, F)
    return mixed


def merge_slowly(groups: Sequence[JaggedGroup], samples: Sequence[int], F: int) -> MergedGroup:
    """What `Merger` computes for one group, in loops that a reader can check."""
    lengths: list[int] = []
    values: list[int] = []
    weights: list[float] = []
    for feature in range(F):
        for group, B in zip(groups, samples, strict=True):
            begin = int(group.lengths[: feature * B].sum())
            own = group.lengths[feature * B : (feature + 1) * B].tolist()
            end = begin + sum(own)
            lengths += own
            values += group.values[begin:end].tolist()
            if group.weights is not None:
                weights += group.weights[begin:end].tolist()
    return MergedGroup(
        np.array(lengths, dtype=np.int32),
        np.array(values, dtype=np.int64),
        np.array(weights, dtype=np.float32),
    )
