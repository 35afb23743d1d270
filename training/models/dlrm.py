"""DLRM, and DLRM with a cross network or with projections, under the names of TorchRec.

Sources: Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems" (2019); Wang et al., "DCN V2" (2020).

Shapes: ``B`` samples, ``F`` sparse features, ``D`` embedding dimension, ``P`` pairs.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from tessera.training.models.dlrm_parts import (
    DenseArch,
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    OverArch,
    SparseArch,
)
from tessera.training.models.terms import LogitTerms
from tessera.training.modules.crossnet import LowRankCrossNet
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "DLRMTrain",
    "DLRMWrapper",
    "DLRM_Projection",
    "DenseArch",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "OverArch",
    "SparseArch",
    "choose",
]


def choose(n: int, k: int) -> int:
    """How many sets of ``k`` of ``n`` things there are; 0 where ``k`` is negative or above ``n``."""
    return math.comb(n, k) if 0 <= k <= n else 0


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


class DLRM_Projection(nn.Module):  # noqa: N801 - the name TorchRec users know
    """Bottom MLP, lookups, products of two projections, top MLP.

    Args:
        embedding_bag_collection: the tables, all of one ``embedding_dim``.
        dense_in_features: dense features.
        dense_arch_layer_sizes: of the bottom MLP; the last is the ``embedding_dim``.
        over_arch_layer_sizes: of the top MLP; the last is the number of logits.
        interaction_branch1_layer_sizes: of the first projection, an MLP; the last is a multiple of the
            ``embedding_dim``.
        interaction_branch2_layer_sizes: of the second.
        dense_device: where the weights of the dense parts live.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        interaction_branch1_layer_sizes: list[int],
        interaction_branch2_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        _check_dense_width(dense_arch_layer_sizes, self.sparse_arch.dims)
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        dim, features = dense_arch_layer_sizes[-1], len(self.sparse_arch.dims)
        branches, rows = [], []
        for number, sizes in enumerate(
            (interaction_branch1_layer_sizes, interaction_branch2_layer_sizes), start=1
        ):
            if sizes[-1] % dim:
                raise ValueError(
                    f"the last interaction_branch{number}_layer_size is {sizes[-1]}; it must be a "
                    f"multiple of the embedding_dim, {dim}"
                )
            branches.append(DenseArch((features + 1) * dim, sizes, dense_device))
            rows.append(sizes[-1] // dim)
        self.inter_arch = InteractionProjectionArch(features, *branches)
        width = dim + rows[0] * rows[1] if features else dim
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, dense_in_features]`` and ids of ``B`` samples to ``[B, logits]``."""
        dense = self.dense_arch(dense_features)
        interaction = self.inter_arch(dense, self.sparse_arch(sparse_features))
        logits: Tensor = self.over_arch(interaction)
        return logits


class ModelInput(Protocol):
    """What `DLRMWrapper` needs of a batch: dense features, ids, and labels while it is trained."""

    float_features: Tensor
    idlist_features: KeyedJaggedTensor
    label: Tensor


class DLRMWrapper(DLRM):
    """A `DLRM` that takes a batch, and gives its loss while it is trained."""

    def forward(  # type: ignore[override]
        self, model_input: ModelInput
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The logits ``[B, logits]``; in training mode the mean binary cross entropy before them."""
        logits = super().forward(model_input.float_features, model_input.idlist_features)
        if not self.training:
            return logits
        loss = nn.functional.binary_cross_entropy_with_logits(logits.squeeze(), model_input.label)
        return loss, logits


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
