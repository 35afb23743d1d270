"""Lookups with the module that takes their vectors, as one: a tower, and several side by side.

`DistributedModelParallel` shards the collections inside of towers as it does others; with the sharders of
`tessera.training.distributed.embedding_tower_sharding` a tower lives on one node.

Shapes: ``B`` samples, ``N`` columns of a tower's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


def tower_input_params(module: nn.Module) -> tuple[bool, bool]:
    """Whether a tower's lookups take ids without weights, and whether they take ids with weights.

    A module that is not a collection takes both.
    """
    if isinstance(module, EmbeddingCollection):
        return True, False
    if isinstance(module, EmbeddingBagCollection):
        return not module.is_weighted(), module.is_weighted()
    return True, True


class EmbeddingTower(nn.Module):
    """Lookups, then an interaction of their vectors.

    Args:
        embedding_module: what looks up.
        interaction_module: takes its output.
        device: where the interaction is moved; None: it stays where it is.
    """

    def __init__(
        self,
        embedding_module: nn.Module,
        interaction_module: nn.Module,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding_module
        self.interaction = interaction_module if device is None else interaction_module.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The arguments go to the lookups; the interaction's output is returned, ``[B, N]``."""
        output: Tensor = self.interaction(self.embedding(*args, **kwargs))
        return output


class EmbeddingTowerCollection(nn.Module):
    """Towers whose outputs stand side by side.

    Args:
        towers: in the output's order.
        device: where their interactions are moved; None: they stay where they are.
    """

    def __init__(self, towers: list[EmbeddingTower], device: torch.device | None = None) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)
        self._input_params = [tower_input_params(tower.embedding) for tower in towers]
        if device is not None:
            for tower in towers:
                tower.interaction.to(device)

    def forward(
        self,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> Tensor:
        """Each tower's output side by side, ``[B, sum of N]``.

        Args:
            features: ids, for the towers whose lookups take them without weights.
            weighted_features: ids with weights, for the others; a tower that takes both is given both.

        Raises:
            ValueError: a tower needs one that is not given.
        """
        given = features, weighted_features
        outputs = []
        for place, (tower, needs) in enumerate(zip(self.towers, self._input_params, strict=True)):
            taken = []
            for name, one, needed in zip(
                ("features", "weighted_features"), given, needs, strict=True
            ):
                if needed and one is None:
                    raise ValueError(f"tower {place} needs {name}; give them")
                if needed:
                    taken.append(one)
            outputs.append(tower(*taken))
        return torch.cat(outputs, dim=1)
