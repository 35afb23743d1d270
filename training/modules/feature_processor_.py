"""Modules that work on ids before the lookup: a learned weight for each place in a bag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tessera.training.sparse.script_types import is_scripting


class FeatureProcessor(ABC, nn.Module):
    """Processes the bags of one feature."""

    @abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The bags with other ids or weights."""


class FeatureProcessorsCollection(ABC, nn.Module):
    """Processes the bags of all features at once."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The bags with other ids or weights."""


class PositionWeightedModule(FeatureProcessor):
    """Gives an id the weight of its place in the bag.

    Args:
        max_feature_length: the most ids of a bag.
        device: where the weights live.

    The parameter ``position_weight`` ``[max_feature_length]`` float32 begins as ones.

    Raises:
        ValueError: a length that is not positive.
    """

    def __init__(self, max_feature_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.position_weight = _new_weights("max_feature_length", max_feature_length, device)

    def reset_parameters(self) -> None:
        """Set every position weight to one."""
        nn.init.ones_(self.position_weight)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The bags with their places' weights.

        Raises:
            ValueError: a bag on the CPU has more ids than there are weights.
        """
        lengths = features.lengths()
        check_bag_lengths("this feature", lengths, self.position_weight.numel())
        places = places_in_bags(features.offsets(), lengths, features.values())
        return JaggedTensor(
            features.values(),
            self.position_weight.index_select(0, places),
            features.lengths_or_none(),
            features.offsets_or_none(),
            validate=False,
        )


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Gives the ids of several features the weights of their places in the bags.

    A feature without position weights keeps its ids' weights; without any, they weigh 1.

    Args:
        max_feature_lengths: the most ids of a bag of each feature.
        device: where the weights live.

    The parameters ``position_weights.<feature>`` ``[max length]`` float32 begin as ones.

    Raises:
        ValueError: a length that is not positive.
    """

    __jit_unused_properties__: ClassVar[list[str]] = ["position_weights_dict"]

    def __init__(
        self,
        max_feature_lengths: dict[str, int],
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.max_feature_lengths = dict(max_feature_lengths)
        self.position_weights = nn.ParameterDict(
            {
                name: _new_weights(f"max_feature_lengths[{name!r}]", length, device)
                for name, length in max_feature_lengths.items()
            }
        )

    @property
    def position_weights_dict(self) -> dict[str, Tensor]:
        """The weights of each feature's places, by name."""
        return dict(self.position_weights.items())

    def reset_parameters(self) -> None:
        """Set every position weight to one."""
        for weights in self.position_weights.values():
            nn.init.ones_(weights)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """See `position_weighted`."""
        return position_weighted(features, dict(self.position_weights.items()))


def position_weighted(
    features: KeyedJaggedTensor, position_weights: dict[str, Tensor]
) -> KeyedJaggedTensor:
    """``features`` whose ids weigh what their place in the bag does.

    ``position_weights`` are ``[max length]`` of each feature that has them; the ids of others keep
    their weights, or weigh 1.

    Raises:
        ValueError: a bag on the CPU has more ids than its feature has weights.
    """
    values, lengths = features.values(), features.lengths()
    places = places_in_bags(features.offsets(), lengths, values)
    ids, bags = features.offset_per_key(), features.lengths_offset_per_key()
    old = features.weights_or_none()
    parts: list[Tensor] = []
    for index, key in enumerate(features.keys()):
        start, stop = ids[index], ids[index + 1]
        if key in position_weights:
            own = position_weights[key]
            if not is_scripting():
                of_bags = lengths[bags[index] : bags[index + 1]]
                check_bag_lengths("feature " + key, of_bags, own.numel())
            parts.append(own.index_select(0, places[start:stop]))
        elif old is not None:
            parts.append(old[start:stop])
        else:
            parts.append(torch.ones_like(values[start:stop], dtype=torch.float32))
    weights = torch.empty([0], device=values.device)
    if len(parts) > 0:
        weights = torch.cat(parts)
    return features.with_fields(
        values, weights, features.lengths_or_none(), features.offsets_or_none()
    )


# One step of a traced graph: the input's keys are not known while it is traced.
torch.fx.wrap("position_weighted")


def places_in_bags(offsets: Tensor, lengths: Tensor, values: Tensor) -> Tensor:
    """``[N]`` int64: 0 for the first id of each bag, 1 for the second, and so on."""
    total = values.size(0)
    starts = torch.repeat_interleave(offsets[:-1].long(), lengths.long(), output_size=total)
    return torch.arange(total, device=values.device) - starts


def check_bag_lengths(what: str, lengths: Tensor, weights: int) -> None:
    """Refuse a bag on the CPU that is longer than its position weights.

    Bags on an accelerator and traced ones pass: the gather's own check applies.

    Raises:
        ValueError: naming the longest bag and the number of weights.
    """
    if not isinstance(lengths, Tensor) or lengths.device.type != "cpu" or not lengths.numel():
        return
    longest = int(lengths.max())
    if longest > weights:
        raise ValueError(
            f"{what} has a bag of {longest} ids but {weights} position weights; cut the bags or "
            "give more with max_feature_length"
        )


def _new_weights(name: str, length: int, device: torch.device | str | None) -> nn.Parameter:
    if length <= 0:
        raise ValueError(f"{name} is {length}; give a positive number")
    return nn.Parameter(torch.ones(length, dtype=torch.float32, device=device))
