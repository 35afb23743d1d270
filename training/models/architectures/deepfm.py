"""``arch: deepfm``: first-order weights, a factorization machine and an MLP, added.

Source: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction"
(2017).  As in DLRM, a bottom MLP turns the dense values into one vector beside those of the
sparse features.

Shapes: ``B`` samples, ``N`` dense columns, ``F`` sparse features, ``D`` embedding dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tessera.training.models.config import MLPModelConfig, architecture
from tessera.training.models.dlrm_parts import DenseArch, OverArch, SparseArch
from tessera.training.models.inputs import ModelInputs
from tessera.training.models.terms import FactorizationMachine, FirstOrder
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class DeepFM(nn.Module):
    """The three parts, each of which makes a term of the logit.

    Args:
        tables: one vector of size ``D`` per feature.
        first_order: one weight per feature.
        dense_columns: ``N``.
        dense_sizes: columns after each layer of the bottom MLP; the last is ``D``.
        over_sizes: columns after each layer of the deep part; the last is 1.
        dropout: of the deep part's hidden outputs, while training.
        embedding_dropout: of the looked-up vectors, while training.
        batch_norm: whether the deep part's hidden layers are normalised over the batch.
    """

    def __init__(
        self,
        *,
        tables: EmbeddingBagCollection,
        first_order: EmbeddingBagCollection,
        dense_columns: int,
        dense_sizes: list[int],
        over_sizes: list[int],
        dropout: float,
        embedding_dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(tables, dropout=embedding_dropout)
        self.first_order = FirstOrder(first_order, dense_columns)
        self.dense_arch = DenseArch(dense_columns, dense_sizes)
        self.fm = FactorizationMachine()
        width = dense_sizes[-1] * (1 + len(self.sparse_arch.dims))
        self.over_arch = OverArch(width, over_sizes, dropout=dropout, batch_norm=batch_norm)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """``[B, N]`` and the features' rows to logits ``[B, 1]``."""
        own: Tensor = self.dense_arch(dense)
        vectors = torch.cat([own.unsqueeze(1), self.sparse_arch(sparse)], dim=1)
        deep = self.over_arch(vectors.flatten(1))
        logits: Tensor = deep + self.fm(vectors) + self.first_order(dense, sparse)
        return logits


@architecture
@dataclass(frozen=True, kw_only=True)
class DeepFMConfig(MLPModelConfig):
    """`DeepFM`; every feature has the same embedding dimension.

    Its first-order weights are a second collection of tables, with the rows of the first one's.
    """

    arch: Literal["deepfm"] = "deepfm"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_dim()

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`."""
        return DeepFM(
            tables=inputs.collection(),
            first_order=inputs.collection(prefix="first_order_", dim=1, init=0.0, own_weights=True),
            dense_columns=inputs.dense_columns,
            dense_sizes=self.dense_sizes(inputs),
            over_sizes=[*self.over_layers, len(inputs.labels)],
            dropout=self.dropout,
            embedding_dropout=self.embedding_dropout,
            batch_norm=self.batch_norm,
        )
