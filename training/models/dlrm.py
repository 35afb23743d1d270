"""DLRM and DLRM with a cross network, in the parts and names of TorchRec.

Sources: Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems" (2019); Wang et al., "DCN V2" (2020).

Shapes: ``B`` samples, ``F`` sparse features, ``D`` embedding dimension, ``P`` pairs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from tessera.training.models.terms import LogitTerms
from tessera.training.modules.crossnet import LowRankCrossNet
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


def _check_dense_width(dense_arch_layer_sizes: list[int], dims: list[int]) -> None:
    if len(set(dims)) > 1:
        raise ValueError(
            f"the tables have different embedding_dims {sorted(set(dims))}; dot products need "
            "one size (DLRM_DCN takes mixed sizes)"
        )
    if dims and dense_arch_layer_sizes[-1] != dims[0]:
        raise ValueError(
            f"the last dense_arch_layer_size is {dense_arch_layer_sizes[-1]}; it must be the "
            f"embedding_dim, {dims[0]}"
        )


class DLRM(nn.Module):
    """Bottom MLP, lookups, dot interaction, top MLP.

    Args:
        embedding_bag_collection: the tables, all of one ``embedding_dim``.
        dense_in_features: dense features.
        dense_arch_layer_sizes: of the bottom MLP; the last is the ``embedding_dim``.
        over_arch_layer_sizes: of the top MLP; the last is the number of logits.
        dense_device: where the weights of the dense parts live.
        dropout: in the top MLP, while training.
        embedding_dropout: of the looked-up vectors, while training.
        batch_norm: whether the top MLP's hidden layers are normalised over the batch.
        concat: whether the top MLP is given the looked-up vectors, too.
        terms: what is added to the logits.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dense_device: torch.device | None = None,
        *,
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        batch_norm: bool = False,
        concat: bool = False,
        terms: LogitTerms | None = None,
    ) -> None:
        super().__init__()
        self._concat = concat
        self.terms = terms
        self.sparse_arch = SparseArch(embedding_bag_collection, dropout=embedding_dropout)
        _check_dense_width(dense_arch_layer_sizes, self.sparse_arch.dims)
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        features = len(self.sparse_arch.dims)
        self.inter_arch = InteractionArch(features)
        width = dense_arch_layer_sizes[-1] + (features + 1) * features // 2
        if concat:
            width += sum(self.sparse_arch.dims)
        self.over_arch = OverArch(
            width,
            over_arch_layer_sizes,
            dense_device,
            dropout=dropout,
            batch_norm=batch_norm,
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, dense_in_features]`` and ids of ``B`` samples to ``[B, logits]``."""
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch(sparse_features)
        interaction = self.inter_arch(dense, sparse)
        if self._concat:
            interaction = torch.cat([interaction, sparse.flatten(1)], dim=1)
        logits: Tensor = self.over_arch(interaction)
        if self.terms is not None:
            vectors = [dense, sparse.flatten(1)]
            logits = self.terms(logits, dense_features, sparse_features, vectors)
        return logits


class DLRM_DCN(nn.Module):  # noqa: N801 - the name TorchRec users know
    """Bottom MLP, lookups, low-rank cross network, top MLP.

    Args:
        embedding_bag_collection: the tables; their sizes may differ.
        dense_in_features: dense features.
        dense_arch_layer_sizes: of the bottom MLP.
        over_arch_layer_sizes: of the top MLP; the last is the number of logits.
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: rank of its weight matrices.
        dense_device: where the weights of the dense parts live.
        dropout: in the top MLP, while training.
        embedding_dropout: of the looked-up vectors, while training.
        batch_norm: whether the top MLP's hidden layers are normalised over the batch.
        concat: whether the top MLP is given the vectors that are not crossed, too.
        terms: what is added to the logits.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
        *,
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        batch_norm: bool = False,
        concat: bool = False,
        terms: LogitTerms | None = None,
    ) -> None:
        super().__init__()
        self._concat = concat
        self.terms = terms
        self.sparse_arch = SparseArch(embedding_bag_collection, dropout=embedding_dropout)
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        width = dense_arch_layer_sizes[-1] + sum(self.sparse_arch.dims)
        crossnet = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim).to(dense_device)
        self.inter_arch = InteractionDCNArch(len(self.sparse_arch.dims), crossnet)
        self.over_arch = OverArch(
            2 * width if concat else width,
            over_arch_layer_sizes,
            dense_device,
            dropout=dropout,
            batch_norm=batch_norm,
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, dense_in_features]`` and ids of ``B`` samples to ``[B, logits]``."""
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch.pooled(sparse_features)
        interaction = self.inter_arch(dense, sparse)
        if self._concat:
            interaction = torch.cat([interaction, dense, sparse], dim=1)
        logits: Tensor = self.over_arch(interaction)
        if self.terms is not None:
            logits = self.terms(logits, dense_features, sparse_features, [dense, sparse])
        return logits


class RankingBatch(Protocol):
    """What `DLRMTrain` needs of a batch."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


class DLRMTrain(nn.Module):
    """A model with its loss, binary cross entropy of the logits.

    Args:
        dlrm_module: a module from (dense, sparse) to logits ``[B, 1]`` or ``[B]``.
    """

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: RankingBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Score a batch.

        Returns:
            The mean loss, and (loss, logits ``[B]``, labels ``[B]``) cut off from the gradient.
        """
        logits = self.model(batch.dense_features, batch.sparse_features).flatten()
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
