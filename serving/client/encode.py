"""`RequestArrays` to the bytes of a ``PredictionRequest``.  Pure; imports neither grpc nor torch."""

from __future__ import annotations

import numpy as np

from tessera.errors import UserError
from tessera.serving.client.arrays import Array, GroupArrays, RequestArrays
from tessera.serving.protocol import predictor_pb2 as pb

MAX_TRAFFIC_KEY_BYTES = 1024
"""Servers refuse longer keys."""

_INT32 = np.iinfo(np.int32)


def encode_request(
    arrays: RequestArrays,
    *,
    model: str = "",
    version: str = "",
    traffic_key: str = "",
    priority: int = 0,
    compact_ids: bool = False,
) -> bytes:
    """Write one request, as `assemble` made it; every packed array is little-endian.

    ``model``, ``version``, ``traffic_key`` and ``priority`` are those of `PredictorClient.predict`.  With
    ``compact_ids``, int64 ids are sent as int32 where all of a group fit: half the bytes, for one
    more pass over the ids.  int32 ids always travel as int32.

    Raises:
        UserError: a model, version, traffic key or priority that the message cannot hold.
    """
    _check_texts(model=model, version=version, traffic_key=traffic_key)
    if not isinstance(priority, int | np.integer) or not _INT32.min <= priority <= _INT32.max:
        raise UserError(
            f"priority is {priority!r}; give a whole number from {_INT32.min} to {_INT32.max}"
        )
    request = pb.PredictionRequest(
        batch_size=arrays.batch_size,
        model_name=model,
        model_version=version,
        traffic_key=traffic_key,
        priority=int(priority),
    )
    if arrays.dense is not None:
        request.float_features.num_features = arrays.dense.shape[1]
        request.float_features.values = arrays.dense.astype("<f4", copy=False).tobytes()
    if arrays.id_list is not None:
        _write_group(request.id_list_features, arrays.id_list, compact_ids=compact_ids)
    if arrays.id_score_list is not None:
        _write_group(request.id_score_list_features, arrays.id_score_list, compact_ids=compact_ids)
    if arrays.shared is not None:
        shared = request.shared_features
        shared.names.extend(arrays.shared.names)
        shared.num_rows = arrays.shared.group.lengths.shape[1]
        _write_group(shared.features, arrays.shared.group, compact_ids=compact_ids)
        shared.row_index = arrays.shared.row_index.astype("<i4", copy=False).tobytes()
    return request.SerializeToString()


def _check_texts(**texts: object) -> None:
    for what, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"{what} is {text!r}; give a string")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise UserError(
                f"{what} is {text!r}, which UTF-8 cannot hold; give other text"
            ) from None
        if what == "traffic_key" and size > MAX_TRAFFIC_KEY_BYTES:
            raise UserError(
                f"traffic_key has {size} bytes; give at most {MAX_TRAFFIC_KEY_BYTES}, such as a hash of it"
            )


def _write_group(message: pb.SparseFeatures, group: GroupArrays, *, compact_ids: bool) -> None:
    message.num_features = group.lengths.shape[0]
    message.lengths = group.lengths.astype("<i4", copy=False).tobytes()
    if group.values.dtype == np.int32 or (compact_ids and _fits_int32(group.values)):
        message.values = group.values.astype("<i4", copy=False).tobytes()
    else:
        message.values_int64 = group.values.astype("<i8", copy=False).tobytes()
    if group.weights is not None:
        message.weights = group.weights.astype("<f4", copy=False).tobytes()


def _fits_int32(values: Array) -> bool:
    if values.size == 0:
        return True
    return bool(int(values.min()) >= _INT32.min and int(values.max()) <= _INT32.max)
