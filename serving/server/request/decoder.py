"""Bytes of a request to checked arrays: every size and every id is looked at here.

What leaves this file is safe for the operators, which read past their buffers when sizes
disagree.  The arrays are views of the message's bytes; nothing is copied unless there are shared
features, which are put between the others.

Legend: ``B`` samples, ``F`` features of a group, ``N`` ids of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.serving.package.schema import FeatureSpec, InputSchema
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.decoded_request import (
    F32,
    I32,
    DecodedRequest,
    Ids,
    JaggedGroup,
)
from tessera.serving.server.request.shared import (
    SHARED_NAMES,
    SharedGroup,
    decode_shared,
    join_shared,
    spread_shared,
)
from tessera.serving.server.request.strings import make_ids
from tessera.serving.server.request.wire import F32_WIRE, GroupNames, read_array, read_jagged

_NO_I32: I32 = np.empty(0, np.int32)
_NO_F32: F32 = np.empty(0, np.float32)
_NO_IDS: Ids = np.empty(0, np.int64)

_KEPT_PARTITIONS = 64
"""Sets of shared features whose rules are kept; clients name the same few sets all the time."""


@dataclass(frozen=True, slots=True)
class RequestNames:
    """What messages to a client call the parts of a request, as its protocol does.

    Attributes:
        dense: the dense values.
        id_list: the group without weights.
        id_score_list: the group with weights.
    """

    dense: str
    id_list: GroupNames
    id_score_list: GroupNames


PREDICT_NAMES = RequestNames(
    "float_features.values",
    GroupNames.of_field("id_list_features"),
    GroupNames.of_field("id_score_list_features"),
)


class RequestDecoder:
    """Checks requests against one model's schema and limits.

    Args:
        schema: what the model takes.
        limits: the largest request, in samples and in ids that are looked up.
        shares_rows: whether the model takes shared features as they are; otherwise every sample
            gets its own copy of them.
        names: what a request's parts are called.
    """

    def __init__(
        self,
        schema: InputSchema,
        limits: ModelLimits,
        *,
        shares_rows: bool = False,
        names: RequestNames = PREDICT_NAMES,
    ) -> None:
        self._dense_name = names.dense
        self._limits = limits
        self._shares_rows = shares_rows
        self._dense = len(schema.dense_features)
        self._nan_is_missing = schema.dense_missing == "nan"
        self._dense_names = schema.dense_features
        self._plain = _GroupRules(names.id_list, schema.group("id_list"), weighted=False)
        self._scored = _GroupRules(
            names.id_score_list, schema.group("id_score_list"), weighted=True
        )

    def decode(self, message: pb.PredictionRequest) -> DecodedRequest:
        """Check ``message`` and give its arrays.

        Raises:
            InvalidRequestError: naming the field and both numbers.
        """
        B = message.batch_size
        if B <= 0:
            raise InvalidRequestError(f"batch_size is {B}, expected at least 1")
        limit = self._limits.max_request_samples
        if limit < B:
            raise InvalidRequestError(f"batch_size is {B}, the limit is {limit} samples")
        _refuse_unused(message)
        dense = self._decode_dense(message.float_features, B)
        given = None
        if message.HasField("shared_features"):
            given = self._decode_given(message, B)
            ids = given.ids(spread=not self._shares_rows)
        else:
            plain = self._plain.decode(message.id_list_features, B)
            ids = plain.values.size
        scored = self._scored.decode(message.id_score_list_features, B)
        ids += scored.values.size
        # Few bytes can ask for very many ids, so the sum is known before anything is spread.
        if ids > self._limits.max_request_ids:
            raise InvalidRequestError(
                f"the request has {ids} ids, the limit is {self._limits.max_request_ids}"
            )
        rows = None
        if given is None:
            self._plain.read_strings(message.id_list_features, plain.lengths, plain.values)
        else:
            given.read_strings(message)
        scored_message = message.id_score_list_features
        self._scored.read_strings(scored_message, scored.lengths, scored.values)
        if given is None:
            self._plain.check_ids(plain, B)
        else:
            given.check_ids(B)
            join = join_shared if self._shares_rows else spread_shared
            plain = join(given.own, given.shared, len(self._plain.features), B)
            rows = given.shared.rows() if self._shares_rows else None
        self._scored.check_ids(scored, B)
        return DecodedRequest(B, ids, dense, plain, scored, rows)

    def _decode_dense(self, message: pb.FloatFeatures, B: int) -> F32:
        if message.num_features != self._dense:
            raise InvalidRequestError(
                f"float_features.num_features is {message.num_features}, "
                f"the model has {self._dense}"
            )
        dense: F32 = read_array(
            self._dense_name,
            message.values,
            F32_WIRE,
            B * self._dense,
            "batch_size * num_features",
        )
        # The quick look first; the slow one finds the words for the message.
        if not _all_finite(dense):
            self._check_each(dense)
        return dense

    def _check_each(self, dense: F32) -> None:
        bad = np.isinf(dense) if self._nan_is_missing else ~np.isfinite(dense)
        where = np.flatnonzero(bad)
        if where.size:
            row, column = divmod(int(where[0]), self._dense)
            rule = (
                "only NaN (missing) or a finite number"
                if self._nan_is_missing
                else "a finite number"
            )
            raise InvalidRequestError(
                f"{self._dense_name}: feature {self._dense_names[column]!r}, row {row} is "
                f"{dense[where[0]]}, expected {rule}"
            )

    def _decode_given(self, message: pb.PredictionRequest, B: int) -> _Given:
        shared = decode_shared(
            message.shared_features,
            self._plain.features,
            B,
            max_rows=self._limits.max_request_samples,
        )
        own_rules, shared_rules = self._plain.parted(shared.positions)
        own = own_rules.decode(message.id_list_features, B)
        return _Given(own, own_rules, shared, shared_rules)


class _GroupRules:
    """One group's features and the ranges of their ids."""

    def __init__(
        self, names: GroupNames, features: tuple[FeatureSpec, ...], *, weighted: bool
    ) -> None:
        self._names = names
        self.features = features
        self._weighted = weighted
        # The last id that passes, as uint64: a negative id is a huge one there.
        last = [f.rows - 1 if _rejects(f) else np.iinfo(np.uint64).max for f in features]
        self._last_id = np.array(last, dtype=np.uint64)
        self._any_reject = any(_rejects(feature) for feature in features)
        self._parted: dict[tuple[int, ...], tuple[_GroupRules, _GroupRules]] = {}

    def parted(self, positions: tuple[int, ...]) -> tuple[_GroupRules, _GroupRules]:
        """The same rules for the features that are not at ``positions``, and for those that are."""
        if positions not in self._parted:
            gone = set(positions)
            rest = tuple(f for at, f in enumerate(self.features) if at not in gone)
            taken = tuple(self.features[at] for at in positions)
            if len(self._parted) == _KEPT_PARTITIONS:
                self._parted.clear()
            self._parted[positions] = (
                _GroupRules(self._names, rest, weighted=self._weighted),
                _GroupRules(SHARED_NAMES, taken, weighted=False),
            )
        return self._parted[positions]

    def decode(self, message: pb.SparseFeatures, B: int) -> JaggedGroup:
        """Check every size of ``message`` for ``B`` samples."""
        names = self._names
        F = len(self.features)
        if message.num_features != F:
            raise InvalidRequestError(
                f"{names.num_features} is {message.num_features}, expected {F}"
            )
        if F == 0:
            for name in ("lengths", "values", "weights", "values_int64"):
                size = len(getattr(message, name))
                if size:
                    raise InvalidRequestError(
                        f"{getattr(names, name)} has {size} bytes, expected 0: num_features is 0"
                    )
            if message.values_bytes:
                raise InvalidRequestError(
                    f"{names.values_bytes} has {len(message.values_bytes)} strings, expected 0: "
                    "num_features is 0"
                )
            return JaggedGroup(_NO_I32, _NO_IDS, _NO_F32 if self._weighted else None)
        lengths, values = read_jagged(names, message, F * B, "num_features * batch_size")
        weights = None
        if self._weighted:
            weights = read_array(
                names.weights, message.weights, F32_WIRE, values.size, "sum(lengths)"
            )
            if not _all_finite(weights):
                first = int(np.flatnonzero(~np.isfinite(weights))[0])
                raise InvalidRequestError(
                    f"{names.weights}[{first}] is {weights[first]}, expected a finite number"
                )
        elif message.weights:
            raise InvalidRequestError(
                f"{names.weights} has {len(message.weights)} bytes, expected 0: "
                "these features have no weights"
            )
        return JaggedGroup(lengths, values, weights)

    def read_strings(self, message: pb.SparseFeatures, lengths: I32, values: Ids) -> None:
        """Fill in the ids of a message with strings, which was checked but for these."""
        if message.values_bytes:
            given = message.values_bytes
            values[:] = make_ids(self._names.values_bytes, given, lengths, self.features)

    def check_ids(self, group: JaggedGroup, B: int) -> None:
        """Refuse ids outside a table whose rule is ``reject``."""
        if not self._any_reject or not group.values.size:
            return
        ids = group.values.astype(np.int64, copy=False).view(np.uint64)
        per_bag = self._last_id if B == 1 else np.repeat(self._last_id, B)
        bad = ids > np.repeat(per_bag, group.lengths)
        if not bad.any():
            return
        first = int(np.argmax(bad))
        bag = int(np.searchsorted(np.cumsum(group.lengths), first, side="right"))
        feature = self.features[bag // B]
        raise InvalidRequestError(
            f"{self._names.ids}: feature {feature.name!r}, row {bag % B}: id "
            f"{int(group.values[first])} is outside [0, {feature.rows})"
        )


@dataclass(slots=True)
class _Given:
    """The ``id_list`` features as they came: those of each sample, and those that samples share."""

    own: JaggedGroup
    own_rules: _GroupRules
    shared: SharedGroup
    shared_rules: _GroupRules

    def ids(self, *, spread: bool) -> int:
        shared = self.shared.spread_ids() if spread else self.shared.values.size
        return self.own.values.size + shared

    def read_strings(self, message: pb.PredictionRequest) -> None:
        own, shared = self.own, self.shared
        self.own_rules.read_strings(message.id_list_features, own.lengths, own.values)
        shared_message = message.shared_features.features
        self.shared_rules.read_strings(shared_message, shared.lengths.ravel(), shared.values)

    def check_ids(self, B: int) -> None:
        self.own_rules.check_ids(self.own, B)
        lengths = self.shared.lengths
        once = JaggedGroup(lengths.ravel(), self.shared.values, None)
        self.shared_rules.check_ids(once, lengths.shape[1])


def _all_finite(numbers: F32) -> bool:
    # Half the price of ``.all()``, which goes through Python.
    return bool(np.logical_and.reduce(np.isfinite(numbers)))


def _rejects(feature: FeatureSpec) -> bool:
    return feature.hashing == "none" and feature.out_of_range == "reject"


def _refuse_unused(message: pb.PredictionRequest) -> None:
    """No packaged model has these groups: what is sent in them would be lost silently."""
    if message.HasField("embedding_features"):
        _refuse_filled("embedding_features", message.embedding_features)
    if message.HasField("unary_features"):
        _refuse_filled("unary_features", message.unary_features)


def _refuse_filled(field: str, group: pb.FloatFeatures | pb.SparseFeatures) -> None:
    if group.ByteSize():
        raise InvalidRequestError(
            f"{field} has {group.ByteSize()} bytes (num_features {group.num_features}), expected "
            "an empty message: no model here uses it"
        )
