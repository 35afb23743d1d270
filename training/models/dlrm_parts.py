"""The parts of DLRM and of its relatives, with TorchRec's names.

Shapes: ``B`` samples, ``F`` sparse features, ``D`` embedding dimension, ``P`` pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.training.modules.dot_interaction import DotInteraction, NarrowInteraction
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.mlp import MLP
from tessera.training.sparse.checks import is_traced
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


class DenseArch(nn.Module):
    """The bottom MLP: dense features to one vector of the embeddings' size.

    Args:
        in_features: dense features.
        layer_sizes: columns after each layer; the last is ``D``.
        device: where the weights live.
    """

    def __init__(
        self, in_features: int, layer_sizes: list[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model = MLP(in_features, layer_sizes, device=device)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, D]``."""
        result: Tensor = self.model(features)
        return result


class SparseArch(nn.Module):
    """The lookups.

    Args:
        embedding_bag_collection: the tables.
        dropout: share of the vectors' numbers that training sets to zero.
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.dropout = nn.Dropout(dropout)
        self._names = list(embedding_bag_collection.embedding_names())
        self._dims = [
            table.embedding_dim
            for table in embedding_bag_collection.embedding_bag_configs()
            for _ in table.feature_names
        ]

    @property
    def sparse_feature_names(self) -> list[str]:
        """The looked-up vectors' names, in the output's order."""
        return self._names

    @property
    def dims(self) -> list[int]:
        """The looked-up vectors' sizes, in the output's order."""
        return self._dims

    def pooled(self, features: KeyedJaggedTensor) -> Tensor:
        """All vectors side by side, ``[B, sum of D]``."""
        looked_up: KeyedTensor = self.embedding_bag_collection(features)
        vectors: Tensor = self.dropout(looked_up.values())
        return vectors

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """``[B, F, D]``; all tables must have the same ``D``."""
        return self.pooled(features).reshape(-1, len(self._dims), self._dims[0])


class InteractionArch(nn.Module):
    """The dense vector, then the dot products of every pair of vectors.

    Args:
        num_sparse_features: ``F``.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.num_sparse_features = num_sparse_features
        self.dot = DotInteraction(num_sparse_features + 1)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` to ``[B, D + P]``, ``P = (F + 1) * F / 2``."""
        if self.num_sparse_features == 0:
            return dense_features
        if self.is_one_kernel(dense_features, sparse_features):
            found: Tensor = NarrowInteraction.apply(dense_features, sparse_features)  # type: ignore[no-untyped-call] # torch leaves apply untyped
            return found
        vectors = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        return torch.cat([dense_features, self.dot(vectors)], dim=1)

    def is_one_kernel(self, dense_features: Tensor, sparse_features: Tensor) -> bool:
        """Whether `forward` of these is one kernel, and so its gradient: nothing is gained by a recording."""
        return (
            self.num_sparse_features > 0
            and not is_traced(dense_features, sparse_features)
            and NarrowInteraction.takes(dense_features, sparse_features)
        )


class InteractionDCNArch(nn.Module):
    """The cross network over the dense and all sparse vectors side by side.

    Args:
        num_sparse_features: ``F``.
        crossnet: a module from ``[B, N]`` to ``[B, N]``, ``N`` the width of all vectors.
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.num_sparse_features = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` (or ``[B, sum of D]``) to ``[B, N]``."""
        if self.num_sparse_features == 0:
            return dense_features
        stacked = torch.cat([dense_features, sparse_features.flatten(1)], dim=1)
        result: Tensor = self.crossnet(stacked)
        return result


class InteractionProjectionArch(nn.Module):
    """The dense vector, then the products of two projections of all vectors.

    Args:
        num_sparse_features: ``F``.
        interaction_branch1: a module from all vectors side by side, ``[B, (F + 1) * D]``, to ``[B, F1 * D]``.
        interaction_branch2: the same to ``[B, D * F2]``.
    """

    def __init__(
        self,
        num_sparse_features: int,
        interaction_branch1: nn.Module,
        interaction_branch2: nn.Module,
    ) -> None:
        super().__init__()
        self.num_sparse_features = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` to ``[B, D + F1 * F2]``."""
        if self.num_sparse_features == 0:
            return dense_features
        samples, dim = dense_features.shape
        vectors = torch.cat([dense_features, sparse_features.flatten(1)], dim=1)
        products = torch.bmm(
            self.interaction_branch1(vectors).reshape(samples, -1, dim),
            self.interaction_branch2(vectors).reshape(samples, dim, -1),
        )
        return torch.cat([dense_features, products.flatten(1)], dim=1)


class OverArch(nn.Module):
    """The top MLP: interactions to logits; no activation behind the last layer.

    Args:
        in_features: columns of the interaction.
        layer_sizes: columns after each layer, two or more; the last is the number of logits.
        device: where the weights live.
        dropout: share of each hidden layer's outputs that training sets to zero.
        batch_norm: whether hidden layers are normalised over the batch.

    Raises:
        ValueError: fewer than two layers.
    """

    def __init__(
        self,
        in_features: int,
        layer_sizes: list[int],
        device: torch.device | None = None,
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ValueError(
                f"over-arch layer sizes are {layer_sizes}; give at least one hidden layer and "
                "the number of logits"
            )
        self.model = nn.Sequential(
            MLP(
                in_features,
                layer_sizes[:-1],
                device=device,
                dropout=dropout,
                batch_norm=batch_norm,
            ),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, logits]``."""
        result: Tensor = self.model(features)
        return result
