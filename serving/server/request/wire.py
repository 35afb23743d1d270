"""The two readers of packed numbers, with the checks that every field needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.decoded_request import I32, Ids

F32_WIRE = np.dtype("<f4")
I32_WIRE = np.dtype("<i4")
I64_WIRE = np.dtype("<i8")


_NEGATIVE = 1 << 31


@dataclass(frozen=True, slots=True)
class GroupNames:
    """What messages to a client call the parts of a group of features, as its protocol does.

    Attributes:
        ids: the ids with the features that they belong to.
        num_features: the number of features.
        lengths: the lengths.
        values: the ids as int32, or as int64 where they take 8 bytes each.
        values_int64: the ids as int64; the same as ``values`` where one tensor may be either.
        values_bytes: the ids as strings; the same, too.
        weights: the weights.
    """

    ids: str
    num_features: str
    lengths: str
    values: str
    values_int64: str
    values_bytes: str
    weights: str

    @classmethod
    def of_field(cls, field: str) -> GroupNames:
        """The names of the parts of a SparseFeatures message in ``field``."""
        return cls(
            ids=field,
            num_features=f"{field}.num_features",
            lengths=f"{field}.lengths",
            values=f"{field}.values",
            values_int64=f"{field}.values_int64",
            values_bytes=f"{field}.values_bytes",
            weights=f"{field}.weights",
        )

    @classmethod
    def of_tensors(cls, group: str) -> GroupNames:
        """The names of the tensors that ``forward`` takes for ``group``."""
        return cls(
            ids=f"{group}_values",
            num_features=group,
            lengths=f"{group}_lengths",
            values=f"{group}_values",
            values_int64=f"{group}_values",
            values_bytes=f"{group}_values",
            weights=f"{group}_weights",
        )


def read_array(field: str, content: bytes, dtype: np.dtype[Any], count: int, meaning: str) -> Any:
    """``content`` as ``count`` little-endian numbers, without a copy.

    Raises:
        InvalidRequestError: ``content`` has another size.
    """
    if len(content) != count * dtype.itemsize:
        raise InvalidRequestError(
            f"{field} has {len(content)} bytes, expected {count * dtype.itemsize} "
            f"({meaning} = {count} {dtype.name} numbers)"
        )
    return np.frombuffer(content, dtype)


def read_jagged(
    names: GroupNames, message: pb.SparseFeatures, bags: int, meaning: str
) -> tuple[I32, Ids]:
    """Lengths ``[bags]`` and the ids that they promise, both checked.

    Ids that are given as strings are left open: `tessera.serving.server.request.strings` makes them once it
    is known that the request has not too many.

    Where the message has a field for each width, 8 bytes for each id in ``values`` are int64, too.

    Raises:
        InvalidRequestError: a size is wrong or a length negative.
    """
    lengths: I32 = read_array(names.lengths, message.lengths, I32_WIRE, bags, meaning)
    # One sum instead of two passes: a negative length is at least 2**31 here, more ids than a
    # message can hold.
    ids = int(np.add.reduce(lengths.view(np.uint32), dtype=np.uint64))
    if ids >= _NEGATIVE:
        _refuse_negative(names.lengths, lengths)
    wide = message.values_int64
    if message.values_bytes:
        _check_strings(names, message, ids)
        return lengths, np.empty(ids, I64_WIRE)
    if not wide:
        narrow = message.values
        # TorchRec's client sends what its tensors hold, int64 more often than int32.
        if len(narrow) == 8 * ids and names.values != names.values_int64:
            return lengths, np.frombuffer(narrow, I64_WIRE)
        return lengths, read_array(names.values, narrow, I32_WIRE, ids, "sum(lengths)")
    if message.values:
        raise InvalidRequestError(
            f"{names.ids} has {len(message.values)} bytes of values and {len(wide)} bytes of "
            "values_int64, expected only one of the two"
        )
    return lengths, read_array(names.values_int64, wide, I64_WIRE, ids, "sum(lengths)")


def _check_strings(names: GroupNames, message: pb.SparseFeatures, ids: int) -> None:
    count = len(message.values_bytes)
    numbers = len(message.values) + len(message.values_int64)
    if numbers:
        raise InvalidRequestError(
            f"{names.ids} has {count} values_bytes and {numbers} bytes of values or values_int64, "
            "expected only one of the three"
        )
    if count != ids:
        raise InvalidRequestError(
            f"{names.values_bytes} has {count} strings, expected {ids} (sum(lengths))"
        )


def _refuse_negative(field: str, lengths: I32) -> None:
    if lengths.min() < 0:
        first = int(np.argmax(lengths < 0))
        raise InvalidRequestError(f"{field}[{first}] is {lengths[first]}, expected >= 0")
