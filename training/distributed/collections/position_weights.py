"""Position weights where the rows are: an id's factor is learned for its place in the bag."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.training.distributed.tables.interfaces import BaseGroupedFeatureProcessor
from tessera.training.modules.feature_processor_ import (
    PositionWeightedModuleCollection,
    position_weighted,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class GroupedPositionWeightedModule(BaseGroupedFeatureProcessor):
    """Gives the ids of a lookup the weights of their places in the bags.

    Ids that come with weights were torn from their bags by row-wise sharding: their weights are
    their places in the whole bag.

    Args:
        max_feature_lengths: the most ids of a bag of each feature.
        device: where the weights live.
        position_weights: ``[max length]`` per feature, shared with another module; None: new
            ones, which begin as ones.

    Raises:
        ValueError: a length that is not positive.
    """

    def __init__(
        self,
        max_feature_lengths: dict[str, int],
        device: torch.device | None = None,
        *,
        position_weights: nn.ParameterDict | None = None,
    ) -> None:
        super().__init__()
        self.max_feature_lengths = dict(max_feature_lengths)
        if position_weights is None:
            position_weights = PositionWeightedModuleCollection(
                max_feature_lengths, device
            ).position_weights
        self.position_weights = position_weights

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the features with the learned factors as their weights.

        Raises:
            KeyError: a feature without position weights.
            ValueError: a bag on the CPU has more ids than its feature has weights.
        """
        missing = [key for key in features.keys() if key not in self.position_weights]  # noqa: SIM118 - not a dict
        if missing:
            raise KeyError(
                f"feature {missing[0]!r} has no position weights; there are "
                f"{list(self.position_weights.keys())}"
            )
        if features.weights_or_none() is None:
            return position_weighted(features, dict(self.position_weights.items()))
        places = features.weights().long().split_with_sizes(features.length_per_key())
        weights = [self._at(key, own) for key, own in zip(features.keys(), places, strict=True)]
        bags = features.lengths_or_none(), features.offsets_or_none()
        return features.with_fields(features.values(), torch.cat(weights), *bags)

    def _at(self, key: str, places: Tensor) -> Tensor:
        own: Tensor = self.position_weights[key]
        if places.device.type == "cpu" and places.numel() and int(places.max()) >= own.numel():
            raise ValueError(
                f"feature {key!r} has a bag of {int(places.max()) + 1} ids or more but "
                f"{own.numel()} position weights; cut the bags or give more"
            )
        return own.index_select(0, places)
