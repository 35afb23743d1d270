"""`Preprocessor`: raw values to what a model's tables and layers get, the first module of the model.

The number of tensor operations depends on the kinds of transforms, not on the number of columns.

Shapes: ``B`` samples, ``F_dense`` dense columns of the data, ``N`` ids, ``K`` keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tessera.kernels import ops
from tessera.training.sparse.checks import values_are_unknown
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.transforms.description import Transforms
from tessera.training.transforms.ids import FirstIds
from tessera.training.transforms.joined import JoinedStages
from tessera.training.transforms.kinds.vocabulary import VocabularyLookup
from tessera.training.transforms.stages import dense_stages
from tessera.training.transforms.target_statistics import StatisticsTable


@dataclass(frozen=True, kw_only=True)
class FittedSizes:
    """Sizes of what was fitted, without which a `Preprocessor` cannot be built.

    Attributes:
        vocabularies: by name, its number of ids.
        keys: keys of all target statistics.
    """

    vocabularies: dict[str, int] = field(default_factory=dict)
    keys: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain containers; ``FittedSizes(**...)`` is the inverse."""
        return {"vocabularies": dict(self.vocabularies), "keys": self.keys}


class Preprocessor(nn.Module):
    """Applies `Transforms` to batches.

    The fitted values are buffers; fresh ones are those of no training row.

    Args:
        transforms: what to do.
        sizes: those of the fitted parts.
    """

    def __init__(self, transforms: Transforms, sizes: FittedSizes | None = None) -> None:
        super().__init__()
        sizes = sizes or FittedSizes()
        self.transforms = transforms
        self._names = [column.name for column in transforms.sparse]
        self._given = self._names + [n for n in transforms.sparse_names if n not in self._names]
        self.stages = nn.ModuleList(dense_stages(transforms.dense))
        self._joined = JoinedStages()
        buckets = [place for place, c in enumerate(transforms.dense) if c.rows is not None]
        kept = [place for place, c in enumerate(transforms.dense) if c.rows is None]
        self._buckets = len(buckets)
        self.bucket_places: Tensor
        self.kept_places: Tensor
        self.cross_keys: Tensor
        self.statistic_keys: Tensor
        self._constant("bucket_places", buckets)
        self._constant("kept_places", kept)
        vocabularies = {name: sizes.vocabularies.get(name, 0) for name in transforms.vocabularies}
        self.vocabulary: VocabularyLookup | None = None
        if vocabularies:
            of = [column.vocabulary for column in transforms.sparse]
            self.vocabulary = VocabularyLookup(of, vocabularies)
        crossed = [cross.of for cross in transforms.crosses.values()]
        keyed = [statistic.key for statistic in transforms.target_statistics.values()]
        different = list(dict.fromkeys([*crossed, *keyed]))
        self.first_ids: FirstIds | None = None
        if different:
            self.first_ids = FirstIds([list(map(self._names.index, key)) for key in different])
        self._crosses = len(crossed)
        self._constant("cross_keys", [different.index(key) for key in crossed])
        self._constant("statistic_keys", [different.index(key) for key in keyed])
        self.statistics: StatisticsTable | None = None
        if keyed:
            settings = list(transforms.target_statistics.values())
            self.statistics = StatisticsTable(settings, sizes.keys)

    def _constant(self, name: str, places: Sequence[int]) -> None:
        value = torch.tensor(places, dtype=torch.int64)
        self.register_buffer(name, value, persistent=False)

    @property
    def is_needed(self) -> bool:
        """Whether it changes anything."""
        return bool(len(self.stages)) or self.reads_ids

    @property
    def reads_ids(self) -> bool:
        """Whether the ids matter to it, and not the dense values alone."""
        return self.vocabulary is not None or self.first_ids is not None

    def fixed_rows(self) -> dict[str, int]:
        """By feature whose ids it makes rows of: how many rows there are."""
        made = self.transforms.bucket_features
        for column in self.transforms.sparse:
            if column.vocabulary is not None and self.vocabulary is not None:
                made[column.name] = self.vocabulary.sizes[column.vocabulary] + 1
        return made

    def forward(
        self, dense: Tensor, features: KeyedJaggedTensor, row_numbers: Tensor | None = None
    ) -> tuple[Tensor, KeyedJaggedTensor]:
        """Transform a batch.

        Args:
            dense: ``[B, F_dense]`` float32, NaN where missing.
            features: raw int32 or int64 ids of at least the data's features.
            row_numbers: ``[B]`` int64: these are rows that the transforms were fitted to, which
                must not see their own labels.

        Returns:
            ``[B, F']`` float32 in the order of `Transforms.dense_names`, and int64 ids of
            `Transforms.sparse_names`; the inputs themselves where nothing is to be done.

        Raises:
            KeyError: a feature is missing.
        """
        values = self._staged(dense)
        if not (self.reads_ids or self._buckets):
            return values, features
        features = self.in_order(features)
        lengths = [features.lengths()]
        ids = [features.values().long() if self.vocabulary is None else self.vocabulary(features)]
        made = [values]
        if self._buckets:
            made = [values.index_select(1, self.kept_places)]
        if self.first_ids is not None:
            key_KB, has_KB = self.first_ids(features)
            if self._crosses:
                has = has_KB.index_select(0, self.cross_keys).flatten()
                ids.append(key_KB.index_select(0, self.cross_keys).flatten()[has])
                lengths.append(has.type_as(lengths[0]))
            if self.statistics is not None:
                key_TB = key_KB.index_select(0, self.statistic_keys)
                has_TB = has_KB.index_select(0, self.statistic_keys)
                made.append(self.statistics(key_TB, has_TB, row_numbers))
        if self._buckets:
            buckets = values.index_select(1, self.bucket_places).t().flatten()
            ids.append(buckets.long())
            lengths.append(torch.ones_like(buckets).type_as(lengths[0]))
        dense = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        if len(ids) == 1:
            return dense, features.with_values(ids[0])
        return dense, self._with_more(features, ids, lengths)

    def _staged(self, dense: Tensor) -> Tensor:
        """The dense values behind all stages."""
        joins = (
            bool(len(self.stages))
            and not values_are_unknown(dense)
            and dense.is_cuda
            and ops.is_built_for("dense_steps", "cuda")
        )
        if joins:
            return self._joined(self.stages, dense)
        values = dense
        for stage in self.stages:
            values = stage(values, dense)
        return values

    def in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The data's features in their order; a `KeyError` where one is missing."""
        if features.keys() == self._names:
            return features
        places = features.index_per_key()
        if missing := [name for name in self._names if name not in places]:
            raise KeyError(f"feature {missing[0]!r} is missing; the input has {features.keys()}")
        return features.permute([places[name] for name in self._names])

    def _with_more(
        self, features: KeyedJaggedTensor, ids: list[Tensor], lengths: list[Tensor]
    ) -> KeyedJaggedTensor:
        """The features with those that were made behind them; a made id has weight 1."""
        weights = features.weights_or_none()
        if weights is not None:
            more = torch.cat(ids[1:])
            weights = torch.cat([weights, torch.ones_like(more, dtype=torch.float32)])
        return KeyedJaggedTensor(
            self._given,
            torch.cat(ids),
            weights,
            lengths=torch.cat(lengths),
            stride=features.stride(),
            validate=False,
        )
