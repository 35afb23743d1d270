"""User features that a ranking request gives once: check them, then spread them.

A request of one user and ``B`` candidates sends the user's ids in one row; ``row_index`` says
which row each sample uses.  Here the rows are copied to the samples, so that the model sees an
ordinary request.

Legend: ``B`` samples, ``S`` shared features, ``R`` shared rows, ``F`` features of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.schema import FeatureSpec
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.jagged import segment_index, segment_starts
from tessera.serving.server.request import I32, I64, Ids, JaggedGroup
from tessera.serving.server.wire import I32_WIRE, read_array, read_jagged


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Checked shared features.

    Attributes:
        positions: ``[S]`` where each feature belongs among the group's features.
        lengths: ``[S, R]`` int32.
        values: ``[sum(lengths)]`` int32 or int64, feature-major.
        row_index: ``[B]`` int32, every entry in ``[0, R)``.
    """

    positions: tuple[int, ...]
    lengths: I32
    values: Ids
    row_index: I32

    def spread_ids(self) -> int:
        """Ids after every sample has got its own copy."""
        per_row = self.lengths.sum(axis=0, dtype=np.int64)
        uses = np.bincount(self.row_index, minlength=per_row.size)
        return int(per_row @ uses)


def decode_shared(
    message: pb.SharedFeatures, features: tuple[FeatureSpec, ...], B: int
) -> SharedGroup:
    """Check ``message`` against the ``id_list`` features of the schema.

    Raises:
        InvalidRequestError: naming the field and both numbers.
    """
    if len(message.names) > len(features):
        raise InvalidRequestError(
            f"shared_features.names has {len(message.names)} names, the model has only "
            f"{len(features)} id_list features"
        )
    known = {feature.name: position for position, feature in enumerate(features)}
    positions: list[int] = []
    for name in message.names:
        if name not in known:
            raise InvalidRequestError(
                f"shared_features.names has {name!r}, which is no id_list feature of the model"
            )
        positions.append(known[name])
    S, R = len(positions), message.num_rows
    if S == 0:
        raise InvalidRequestError("shared_features.names has 0 names, expected at least 1")
    if len(set(positions)) != S:
        raise InvalidRequestError(
            f"shared_features.names has {S} names of which {len(set(positions))} differ"
        )
    if R < 1:
        raise InvalidRequestError(f"shared_features.num_rows is {R}, expected at least 1")
    found = message.features.num_features
    if found != S:
        raise InvalidRequestError(
            f"shared_features.features.num_features is {found}, expected {S} (names)"
        )
    if message.features.weights:
        raise InvalidRequestError(
            f"shared_features.features.weights has {len(message.features.weights)} bytes, "
            "expected 0: these features have no weights"
        )
    lengths, values = read_jagged(
        "shared_features.features", message.features, S * R, "len(names) * num_rows"
    )
    row_index: I32 = read_array(
        "shared_features.row_index", message.row_index, I32_WIRE, B, "batch_size"
    )
    bad = (row_index < 0) | (row_index >= R)
    if bad.any():
        first = int(np.argmax(bad))
        raise InvalidRequestError(
            f"shared_features.row_index[{first}] is {row_index[first]}, expected [0, {R})"
        )
    return SharedGroup(tuple(positions), lengths.reshape(S, R), values, row_index)


def interleave_shared(own: JaggedGroup, shared: SharedGroup, F: int, B: int) -> tuple[I32, Ids]:
    """Put the request's own features and the spread shared ones into the schema's order.

    Args:
        own: the features that the request gives per sample, in the schema's order.
        shared: the others.
        F: features of the group.
        B: samples.

    Returns:
        Lengths ``[F * B]`` int32 and values ``[N]`` int64, feature-major.
    """
    S, R = shared.lengths.shape
    shared_starts_SR = segment_starts(shared.lengths.ravel()).reshape(S, R)
    own_starts = segment_starts(own.lengths).reshape(F - S, B)
    own_lengths = own.lengths.reshape(F - S, B)

    # Both sources behind each other, so that one index array can reach into either.
    source: I64 = np.concatenate((own.values, shared.values), dtype=np.int64)
    lengths_FB = np.empty((F, B), dtype=np.int32)
    starts_FB = np.empty((F, B), dtype=np.int64)
    at = list(shared.positions)
    lengths_FB[at] = shared.lengths[:, shared.row_index]
    starts_FB[at] = shared_starts_SR[:, shared.row_index] + own.values.size
    gone = set(at)
    rest = [position for position in range(F) if position not in gone]
    lengths_FB[rest] = own_lengths
    starts_FB[rest] = own_starts
    lengths = lengths_FB.ravel()
    return lengths, source[segment_index(starts_FB.ravel(), lengths)]
