"""Choose the inputs of the golden answers: every rule and every edge of the schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tessera.serving.package.runner import HostBatch
from tessera.serving.package.schema import FeatureSpec, InputSchema

LONG_BAG = 50
"""Ids in each bag of the sample of long bags."""

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_RANDOM_SAMPLES = 4


def golden_batch(schema: InputSchema, *, seed: int = 0) -> HostBatch:
    """A batch that meets every edge once.

    Sample 0 has empty bags only, 1 the lowest id, 2 the highest, 3 ids outside the table and
    at the ends of int64 (where the feature's rule serves them), 4 long bags; the others are
    random.  Dense values are normal, in sample 1 missing where the schema admits that.
    """
    generator = torch.Generator().manual_seed(seed)

    def bags(feature: FeatureSpec) -> list[Tensor]:
        lengths = torch.randint(0, 6, (_RANDOM_SAMPLES,), generator=generator)
        return [
            torch.empty(0, dtype=torch.int64),
            torch.tensor([0]),
            torch.tensor([feature.rows - 1]),
            torch.tensor(_outside(feature), dtype=torch.int64),
            _random_ids(feature, LONG_BAG, generator),
            *(_random_ids(feature, int(length), generator) for length in lengths),
        ]

    batch = _batch(schema, bags, 5 + _RANDOM_SAMPLES, generator)
    if schema.dense_missing == "nan":
        batch.float_features[1] = math.nan
    return batch


def long_batch(schema: InputSchema, ids: int) -> HostBatch:
    """One sample of ``ids`` random ids per bag."""
    generator = torch.Generator().manual_seed(0)
    return _batch(schema, lambda feature: [_random_ids(feature, ids, generator)], 1, generator)


def _random_ids(feature: FeatureSpec, count: int, generator: torch.Generator) -> Tensor:
    raw = feature.hashing != "none"
    low, high = (_INT64_MIN, _INT64_MAX) if raw else (0, feature.rows)
    return torch.randint(low, high, (count,), generator=generator)


def _batch(
    schema: InputSchema,
    bags: Callable[[FeatureSpec], list[Tensor]],
    samples: int,
    generator: torch.Generator,
) -> HostBatch:
    plain = _jagged([bags(f) for f in schema.group("id_list")])
    scored = _jagged([bags(f) for f in schema.group("id_score_list")])
    dense = torch.randn(samples, len(schema.dense_features), generator=generator)
    weights = torch.rand(scored[1].numel(), generator=generator)
    return HostBatch.of(dense, plain, (*scored, weights))


def _outside(feature: FeatureSpec) -> list[int]:
    # A server refuses these before the model sees them, so there is no answer to record.
    if feature.hashing == "none" and feature.out_of_range == "reject":
        return []
    return [-1, feature.rows, _INT64_MIN, _INT64_MAX]


def _jagged(features: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    bags = [bag for feature in features for bag in feature]
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
    values = torch.cat(bags) if bags else torch.empty(0, dtype=torch.int64)
    return lengths, values
