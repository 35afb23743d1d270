"""Ids of the strings in an Arrow column, without a copy of the strings.

`tessera.kernels.string_ids` says what the id of a string is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.kernels import ops
from tessera.training.data.read_only import read_only_tensor


def is_string_type(kind: Any) -> bool:
    """Whether columns of the Arrow type ``kind`` hold strings or bytes, dictionary-encoded or not."""
    if pa.types.is_dictionary(kind):
        return is_string_type(kind.value_type)
    tests = (
        *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
        pa.types.is_fixed_size_binary,
    )
    return any(test(kind) for test in tests)


def arrow_string_ids(column: Any) -> NDArray[np.int64]:
    """The ids of the strings of an Arrow array or chunked array.

    Args:
        column: an array whose type `is_string_type`.  A dictionary's strings are hashed once each.

    Returns:
        ``[rows]`` int64.  What stands at a null has no meaning; ``column.is_null()`` says where.
    """
    if isinstance(column, pa.ChunkedArray):
        parts = [arrow_string_ids(chunk) for chunk in column.chunks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _of_dictionary(column)
    if not (pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)):
        wide = not (pa.types.is_string(kind) or pa.types.is_binary(kind))
        column = column.cast(pa.large_binary()) if wide else column
    return _of_buffers(column)


def _of_dictionary(column: Any) -> NDArray[np.int64]:
    if len(column.dictionary) == 0:  # every row is a null
        return np.zeros(len(column), np.int64)
    ids = arrow_string_ids(column.dictionary)
    places: NDArray[Any] = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
    named: NDArray[np.int64] = ids[places]
    return named


def _of_buffers(column: Any) -> NDArray[np.int64]:
    ops.load()
    rows = len(column)
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offsets, content = column.buffers()
    if rows == 0:
        return np.empty(0, np.int64)
    ends = np.frombuffer(offsets, np.int64 if large else np.int32)
    ends = ends[column.offset : column.offset + rows + 1]
    ids: Tensor = torch.ops.tessera.xxh64(_bytes_tensor(content), read_only_tensor(ends))
    return ids.numpy()


def _bytes_tensor(content: Any) -> Tensor:
    """The bytes of an Arrow buffer, which may be absent where all strings are empty."""
    if content is None or content.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return read_only_tensor(np.frombuffer(content, np.uint8))
