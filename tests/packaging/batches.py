"""Random batches for any schema."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tessera.serving.package.runner import HostBatch
from tessera.serving.package.schema import FeatureSpec, InputSchema
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

INT32_MAX = 2**31 - 1


def any_ids(feature: FeatureSpec, count: int, generator: torch.Generator) -> Tensor:
    """Ids that the feature's rule has an answer for."""
    if feature.hashing == "none" and feature.out_of_range == "reject":
        return torch.randint(0, feature.rows, (count,), generator=generator)
    return torch.randint(-INT32_MAX, INT32_MAX, (count,), generator=generator)


def random_batch(
    schema: InputSchema,
    batch_size: int,
    *,
    max_length: int,
    seed: int,
    id_type: torch.dtype = torch.int64,
    ids: Callable[[FeatureSpec, int, torch.Generator], Tensor] = any_ids,
) -> HostBatch:
    """Bags of 0 to ``max_length`` ids; one dense value in eight is missing."""
    generator = torch.Generator().manual_seed(seed)

    def group(features: tuple[FeatureSpec, ...]) -> tuple[Tensor, Tensor]:
        lengths, values = [], []
        for feature in features:
            own = torch.randint(0, max_length + 1, (batch_size,), generator=generator)
            lengths.append(own)
            values.append(ids(feature, int(own.sum()), generator))
        if not features:
            return torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=id_type)
        return torch.cat(lengths).int(), torch.cat(values).to(id_type)

    plain_lengths, plain_values = group(schema.group("id_list"))
    scored_lengths, scored_values = group(schema.group("id_score_list"))
    dense = torch.randn(batch_size, len(schema.dense_features), generator=generator)
    missing = torch.rand(dense.shape, generator=generator) < 1 / 8
    return HostBatch(
        float_features=dense.masked_fill(missing, float("nan")),
        id_list_features_lengths=plain_lengths,
        id_list_features_values=plain_values,
        id_score_list_features_lengths=scored_lengths,
        id_score_list_features_values=scored_values,
        id_score_list_features_weights=torch.rand(scored_values.numel(), generator=generator),
        batch_size=batch_size,
    )


def sparse_features(batch: HostBatch, schema: InputSchema) -> KeyedJaggedTensor:
    """The batch's ids as the trained model takes them: weights of 1 where there are none."""
    plain, scored = schema.group("id_list"), schema.group("id_score_list")
    weights = torch.cat(
        [torch.ones(batch.id_list_features_values.numel()), batch.id_score_list_features_weights]
    )
    return KeyedJaggedTensor(
        keys=[feature.name for feature in (*plain, *scored)],
        values=torch.cat(
            [batch.id_list_features_values.long(), batch.id_score_list_features_values.long()]
        ),
        lengths=torch.cat([batch.id_list_features_lengths, batch.id_score_list_features_lengths]),
        weights=weights if scored else None,
    )
