"""How many values of each feature were missing, or are outside of what the training rows held, and where the others lie.

Requests wait until there are many, so that their values are looked at together: a call of numpy costs
more than its numbers do.  Owned by the event loop's thread, as all counters.
"""

from __future__ import annotations

import math

import numpy as np

from tessera.serving.package.schema import InputSchema
from tessera.serving.package.vocabulary import OutsideVocabulary, Vocabularies
from tessera.serving.server.metrics.counted_names import CountedNames
from tessera.serving.server.metrics.range_counts import RangeCounter
from tessera.serving.server.request.decoded_request import DecodedRequest, JaggedGroup

_MOST_VALUES = 8_192
"""Dense values and ids that wait: looking at them takes a fraction of a millisecond."""

_BAGS_REMEMBERED = 64


class FeatureCounter:
    """Counts the values of a model's requests.

    Attributes:
        missing: ``[len(CountedNames.missing)]`` int64, of the requests that were looked at.
        outside: ``[len(CountedNames.outside)]`` int64, likewise.
        ranges: where the dense values of those requests lie.

    Args:
        schema: the model's inputs.
        vocabularies: what its package's vocabularies hold, if that can be read.
    """

    def __init__(self, schema: InputSchema, vocabularies: Vocabularies | None) -> None:
        counted = CountedNames.of(schema)
        self._dense = len(counted.missing)
        self.missing = np.zeros(self._dense, np.int64)
        self.outside = np.zeros(len(counted.outside), np.int64)
        self.ranges = RangeCounter(schema)
        ranges = schema.dense_ranges
        # A feature of which no training row had a value has an empty range.
        self._least_F = np.array([_or(own.least, math.inf) for own in ranges], np.float32)
        self._most_F = np.array([_or(own.most, -math.inf) for own in ranges], np.float32)
        known = [feature.name for feature in schema.features if feature.vocabulary is not None]
        self._groups = []
        if vocabularies is not None:
            rule = OutsideVocabulary(schema.features, vocabularies)
            for group in ("id_list", "id_score_list"):
                features = schema.group(group)
                places = np.array([schema.features.index(one) for one in features], np.int64)
                if not places.size or not rule.has_F[places].any():
                    continue
                slots = [known.index(f.name) if f.name in known else -1 for f in features]
                self._groups.append(_GroupCounter(group, rule, places, np.array(slots)))
        self._counts = bool(self._dense or self._groups)
        self._waiting: list[DecodedRequest] = []
        self._values = 0

    def take(self, request: DecodedRequest) -> None:
        """Count a request, at the latest when somebody asks."""
        if not self._counts:
            return
        self._waiting.append(request)
        self._values += request.dense.size + request.ids
        if self._values > _MOST_VALUES:
            self.count()

    def count(self) -> None:
        """Count those that wait."""
        waiting, self._waiting, self._values = self._waiting, [], 0
        if not waiting:
            return
        if self._dense:
            dense = np.concatenate([request.dense for request in waiting]).reshape(-1, self._dense)
            self.missing += np.isnan(dense).sum(axis=0)
            outside = (dense < self._least_F) | (dense > self._most_F)
            self.outside[: self._dense] += outside.sum(axis=0)
            self.ranges.count(dense)
        for group in self._groups:
            group.count(waiting, self.outside[self._dense :])


class _GroupCounter:
    """One group's features with a vocabulary.

    Args:
        group: the group.
        rule: which ids are outside.
        places: ``[F]`` of the group's features among the schema's.
        slots: ``[F]`` where each one's count stands; -1: it is not counted.
    """

    def __init__(
        self, group: str, rule: OutsideVocabulary, places: np.ndarray, slots: np.ndarray
    ) -> None:
        self._group = group
        self._rule = rule
        self._places = places
        self._slots = slots
        self._features = np.arange(len(places))
        self._of_bags: dict[int, np.ndarray] = {}

    def count(self, requests: list[DecodedRequest], counts: np.ndarray) -> None:
        groups: list[JaggedGroup] = [getattr(request, self._group) for request in requests]
        bags = [self._feature_of_bags(request) for request in requests]
        lengths = np.concatenate([group.lengths for group in groups])
        feature_N = np.repeat(np.concatenate(bags), lengths)
        ids = np.concatenate([group.values for group in groups], dtype=np.int64)
        outside = self._rule(ids, self._places[feature_N])
        found = np.bincount(feature_N[outside], minlength=len(self._slots))
        counted = self._slots >= 0
        counts[self._slots[counted]] += found[counted]

    def _feature_of_bags(self, request: DecodedRequest) -> np.ndarray:
        """By bag of the group, its feature."""
        shared = request.shared if self._group == "id_list" else None
        if shared is not None:
            rows = np.full(len(self._features), request.samples)
            rows[list(shared.features)] = shared.rows
            return np.repeat(self._features, rows)
        known = self._of_bags.get(request.samples)
        if known is None:
            known = np.repeat(self._features, request.samples)
            if len(self._of_bags) < _BAGS_REMEMBERED and known.size < _MOST_VALUES:
                self._of_bags[request.samples] = known
        return known


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
