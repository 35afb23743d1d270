"""Feature processors under the names of ``torchrec.modules.feature_processor``, which older programs import.

`tessera.training.modules.feature_processor_` has those that collections over ranks take.
"""

# Annotations are not postponed: a graph that torch.fx traces has them, and TorchScript reads them there.

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tessera.training.modules.feature_processor_ import (
    PositionWeightedModuleCollection,
    places_in_bags,
)
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class BaseFeatureProcessor(ABC, nn.Module):
    """Processes bags by feature."""

    @abstractmethod
    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The bags with other ids or weights."""


class BaseGroupedFeatureProcessor(ABC, nn.Module):
    """Processes the bags of all features at once."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The bags with other ids or weights."""


def offsets_to_range_traceble(offsets: Tensor, values: Tensor) -> Tensor:
    """The place of each id in its bag, int64 ``[N]``, from offsets ``[bags + 1]``."""
    return places_in_bags(offsets, offsets.diff(), values)


def position_weighted_module_update_features(
    features: dict[str, JaggedTensor], weighted_features: dict[str, JaggedTensor]
) -> dict[str, JaggedTensor]:
    """``features`` with those of ``weighted_features`` in the place of their own."""
    features.update(weighted_features)
    return features


# Steps of a traced graph: the features are not known while it is traced.
torch.fx.wrap("offsets_to_range_traceble")
torch.fx.wrap("position_weighted_module_update_features")


class PositionWeightedModule(BaseFeatureProcessor):
    """Gives the ids of some features the weights of their places in the bags.

    Args:
        max_feature_lengths: the most ids of a bag of each feature.
        device: where the weights live.

    The parameters ``position_weights.<feature>`` ``[max length]`` float32 begin as ones.

    Raises:
        ValueError: a length that is not positive.
    """

    def __init__(
        self, max_feature_lengths: dict[str, int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        own = PositionWeightedModuleCollection(max_feature_lengths, device)
        self.max_feature_lengths = own.max_feature_lengths
        self.position_weights = own.position_weights

    def reset_parameters(self) -> None:
        """Set every position weight to one."""
        for weights in self.position_weights.values():
            nn.init.ones_(weights)

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """``features``, changed: those with position weights have them as their ids' weights."""
        weighted = {}
        for name, weights in self.position_weights.items():
            bags = features[name]
            places = offsets_to_range_traceble(bags.offsets(), bags.values())
            weighted[name] = JaggedTensor(
                values=bags.values(),
                lengths=bags.lengths(),
                offsets=bags.offsets(),
                weights=weights.index_select(0, places),
            )
        return position_weighted_module_update_features(features, weighted)


class PositionWeightedProcessor(BaseGroupedFeatureProcessor):
    """Gives the ids of features the weights of their places, and leaves out features that have none.

    Args:
        max_feature_lengths: the most ids of a bag of each feature.
        device: where the weights live.

    The parameters ``position_weights.<feature>`` ``[max length]`` float32 begin as ones.

    Raises:
        ValueError: a length that is not positive.
    """

    def __init__(
        self, max_feature_lengths: dict[str, int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        own = PositionWeightedModuleCollection(max_feature_lengths, device)
        self.max_feature_lengths = own.max_feature_lengths
        self.position_weights = own.position_weights

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features with position weights, in their order; if there are none of them, ``features``."""
        return weighted_alone(features, dict(self.position_weights.items()))


def weighted_alone(
    features: KeyedJaggedTensor, position_weights: dict[str, Tensor]
) -> KeyedJaggedTensor:
    """The features that have weights ``[max length]`` of places, with those as their ids' weights."""
    # Loops as TorchScript has them.
    by_name = features.to_dict()
    names: list[str] = []
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    weights: list[Tensor] = []
    for name in features.keys():  # noqa: SIM118 - a KeyedJaggedTensor
        if name in position_weights:
            part = by_name[name]
            places = offsets_to_range_traceble(part.offsets(), part.values())
            names.append(name)
            values.append(part.values())
            lengths.append(part.lengths())
            weights.append(position_weights[name].index_select(0, places))
    if len(names) == 0:
        return features
    return KeyedJaggedTensor.from_lengths_sync(
        names, torch.cat(values), torch.cat(lengths), torch.cat(weights)
    )


# One step of a traced graph: the input's keys are not known while it is traced.
torch.fx.wrap("weighted_alone")
