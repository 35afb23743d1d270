"""User features that a ranking request gives once: check them, then join them with the others.

A request of one user and ``B`` candidates sends the user's ids in one row; ``row_index`` says
which row each sample uses.  A model that shares rows gets them as they are and looks each id up once;
for another one the rows are copied to the samples, so that it sees an ordinary request.

Legend: ``B`` samples, ``S`` shared features, ``R`` shared rows, ``F`` features of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.serving.package.schema import FeatureSpec
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.decoded_request import I32, Ids, JaggedGroup, SharedRows
from tessera.serving.server.request.jagged import segment_index, segment_starts
from tessera.serving.server.request.wire import I32_WIRE, GroupNames, read_array, read_jagged

SHARED_NAMES = GroupNames.of_field("shared_features.features")


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

    def rows(self) -> SharedRows:
        """What is known of them once they are joined with the others."""
        return SharedRows(tuple(sorted(self.positions)), self.lengths.shape[1], self.row_index)

    def spread_ids(self) -> int:
        """Ids after every sample has got its own copy."""
        per_row = self.lengths.sum(axis=0, dtype=np.int64)
        uses = np.bincount(self.row_index, minlength=per_row.size)
        return int(per_row @ uses)


def decode_shared(
    message: pb.SharedFeatures, features: tuple[FeatureSpec, ...], B: int, *, max_rows: int
) -> SharedGroup:
    """Check ``message`` against the ``id_list`` features of the schema.

    Args:
        message: as it came.
        features: the schema's.
        B: samples of the request.
        max_rows: the most rows that it may have.

    Raises:
        InvalidRequestError: naming the field and both numbers.
    """
    positions = _positions(message, features)
    S, R = len(positions), message.num_rows
    if S == 0:
        raise InvalidRequestError("shared_features.names has 0 names, expected at least 1")
    if len(set(positions)) != S:
        raise InvalidRequestError(
            f"shared_features.names has {S} names of which {len(set(positions))} differ"
        )
    if R < 1:
        raise InvalidRequestError(f"shared_features.num_rows is {R}, expected at least 1")
    if max_rows < R:
        raise InvalidRequestError(f"shared_features.num_rows is {R}, the limit is {max_rows} rows")
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
    lengths, values = read_jagged(SHARED_NAMES, message.features, S * R, "len(names) * num_rows")
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


def _positions(message: pb.SharedFeatures, features: tuple[FeatureSpec, ...]) -> list[int]:
    """Where each feature that ``message`` names stands among ``features``."""
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
                f"shared_features.names has '{name}', which is not an id_list feature of the model"
            )
        positions.append(known[name])
    return positions


def join_shared(own: JaggedGroup, shared: SharedGroup, F: int, B: int) -> JaggedGroup:
    """The request's own features and the shared ones in the schema's order, every bag once.

    Args:
        own: the features that the request gives per sample, in the schema's order.
        shared: the others.
        F: features of the group.
        B: samples.
    """
    place = {position: s for s, position in enumerate(shared.positions)}
    own_ends = _feature_ends(own.lengths.reshape(F - len(place), B))
    shared_ends = _feature_ends(shared.lengths)
    lengths, values = [], []
    mine = 0
    for position in range(F):
        s = place.get(position)
        if s is None:
            lengths.append(own.lengths[mine * B : (mine + 1) * B])
            values.append(own.values[own_ends[mine] : own_ends[mine + 1]])
            mine += 1
        else:
            lengths.append(shared.lengths[s])
            values.append(shared.values[shared_ends[s] : shared_ends[s + 1]])
    return JaggedGroup(np.concatenate(lengths), np.concatenate(values), None)


def spread_shared(own: JaggedGroup, shared: SharedGroup, F: int, B: int) -> JaggedGroup:
    """The same as `join_shared` for a model that cannot share: every sample gets its own copy."""
    S, R = shared.lengths.shape
    starts_SR = segment_starts(shared.lengths.ravel()).reshape(S, R)
    index = shared.row_index
    lengths_SB = shared.lengths[:, index]
    # Bag by bag, whatever the features' order is.
    gathered = segment_index(starts_SR[:, index].ravel(), lengths_SB.ravel())
    repeated = SharedGroup(shared.positions, lengths_SB, shared.values[gathered], index)
    return join_shared(own, repeated, F, B)


def _feature_ends(lengths: I32) -> list[int]:
    """Where each feature's ids begin, and where the last one's end; lengths are ``[F, bags]``."""
    ends: list[int] = [0, *np.cumsum(lengths.sum(axis=1, dtype=np.int64)).tolist()]
    return ends
