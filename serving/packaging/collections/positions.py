"""Position weights that answer bags of any length: what stands in a packaged module for its own.

In training a bag with more ids than there are weights is a mistake; a server meets it in a request of
somebody else.  Ids past the last weight weigh nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tessera.training.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
    places_in_bags,
)
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


def packed_positions(module: nn.Module) -> dict[int, object]:
    """The stand-ins for a module's position weights, by the ``id`` of what they stand for."""
    found: dict[int, object] = {}
    for part in module.modules():
        if type(part) is PositionWeightedModule:
            found[id(part)] = PackedPositions(part.position_weight)
        elif type(part) is PositionWeightedModuleCollection:
            found[id(part)] = PackedPositionsCollection(dict(part.position_weights.items()))
    return found


class PackedPositions(nn.Module):
    """A `PositionWeightedModule` over bags of any length.

    Args:
        weights: ``[max length]`` float32.
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights: Tensor
        # One more, for all places beyond.
        self.register_buffer("weights", pad(weights.detach(), (0, 1)))
        self._last = weights.numel()

    def at(self, places: Tensor) -> Tensor:
        """The weights ``[N]`` float32 of places ``[N]`` int64."""
        return self.weights.index_select(0, places.clamp(max=self._last))

    def forward(self, bags: JaggedTensor) -> JaggedTensor:
        """See `PositionWeightedModule.forward`."""
        places = places_in_bags(bags.offsets(), bags.lengths(), bags.values())
        return JaggedTensor(
            bags.values(),
            self.at(places),
            bags.lengths_or_none(),
            bags.offsets_or_none(),
            validate=False,
        )


class PackedPositionsCollection(nn.Module):
    """A `PositionWeightedModuleCollection` over bags of any length.

    Args:
        weights: ``[max length]`` float32 of each feature that has them.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.positions = nn.ModuleDict(
            {name: PackedPositions(own) for name, own in weights.items()}
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """See `PositionWeightedModuleCollection.forward`."""
        values, old = features.values(), features.weights_or_none()
        places = places_in_bags(features.offsets(), features.lengths(), values)
        ids = features.offset_per_key()
        parts = []
        for index, key in enumerate(features.keys()):
            start, stop = ids[index], ids[index + 1]
            if key in self.positions:
                own = self.positions[key]
                assert isinstance(own, PackedPositions)
                parts.append(own.at(places[start:stop]))
            elif old is not None:
                parts.append(old[start:stop])
            else:
                parts.append(torch.ones_like(values[start:stop], dtype=torch.float32))
        return features.with_fields(
            values, torch.cat(parts), features.lengths_or_none(), features.offsets_or_none()
        )
