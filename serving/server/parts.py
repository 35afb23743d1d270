"""A request that is larger than a batch is cut into parts; its scores are put together again.

Legend: ``B`` samples of the request, ``F`` features of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tessera.serving.schema import InputSchema
from tessera.serving.server.jagged import segment_index, segment_starts
from tessera.serving.server.request import I64, DecodedRequest, JaggedGroup


def cut_request(
    request: DecodedRequest, schema: InputSchema, *, max_samples: int, max_ids: int
) -> list[DecodedRequest]:
    """``request`` itself if it fits a batch, else consecutive parts of its samples that do.

    A sample with more than ``max_ids`` ids becomes a part of its own.
    """
    if request.samples <= max_samples and (request.ids <= max_ids or request.samples == 1):
        return [request]
    dense_features = len(schema.dense_features)
    ids_B = _ids_per_sample(request.id_list, request.samples)
    ids_B = ids_B + _ids_per_sample(request.id_score_list, request.samples)
    parts: list[DecodedRequest] = []
    for begin, end in _ranges(ids_B.tolist(), max_samples, max_ids):
        plain = _rows(request.id_list, request.samples, begin, end)
        scored = _rows(request.id_score_list, request.samples, begin, end)
        dense = request.dense[begin * dense_features : end * dense_features]
        ids = plain.values.size + scored.values.size
        parts.append(DecodedRequest(end - begin, ids, dense, plain, scored))
    return parts


def join_outputs(parts: Sequence[Mapping[str, bytes]]) -> Mapping[str, bytes]:
    """The outputs of consecutive parts as those of the whole request."""
    if len(parts) == 1:
        return parts[0]
    return {name: b"".join(part[name] for part in parts) for name in parts[0]}


def _ids_per_sample(group: JaggedGroup, B: int) -> I64:
    ids: I64 = group.lengths.reshape(-1, B).sum(axis=0, dtype=np.int64)
    return ids


def _ranges(ids_B: list[int], max_samples: int, max_ids: int) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    begin = ids = 0
    for sample, count in enumerate(ids_B):
        full = sample - begin == max_samples or ids + count > max_ids
        if full and sample > begin:
            ranges.append((begin, sample))
            begin, ids = sample, 0
        ids += count
    ranges.append((begin, len(ids_B)))
    return ranges


def _rows(group: JaggedGroup, B: int, begin: int, end: int) -> JaggedGroup:
    lengths_FB = group.lengths.reshape(-1, B)
    starts_FB = segment_starts(group.lengths).reshape(-1, B)
    ours = lengths_FB[:, begin:end]
    index = segment_index(starts_FB[:, begin], ours.sum(axis=1, dtype=np.int64))
    weights = None if group.weights is None else group.weights[index]
    return JaggedGroup(ours.ravel(), group.values[index], weights)
