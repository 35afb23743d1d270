"""A small DeepFM over a collection, as TorchRec has it.

`tessera train` has the architecture of the paper (``arch: deepfm``,
`tessera.training.models.architectures.deepfm`); the parts here are those of TorchRec's model, under its
names and those of its state dicts.

Shapes: ``B`` samples, ``N`` dense columns, ``F`` sparse features, ``D`` embedding dimension, ``H`` columns
of the deep interaction.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.models.dlrm import ModelInput
from tessera.training.modules.deepfm import DeepFM, FactorizationMachine
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


class SparseArch(nn.Module):
    """Looks the features up in the collection."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors, ``[B, F * D]``."""
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class DenseArch(nn.Module):
    """Two layers with ReLU, from ``in_features`` over ``hidden_layer_size`` to ``embedding_dim`` columns."""

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim),
            nn.ReLU(),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, D]``."""
        out: Tensor = self.model(features)
        return out


class FMInteractionArch(nn.Module):
    """The dense vector, the deep interaction of all vectors, and the factorization machine's number.

    Args:
        fm_in_features: columns of all vectors together, the dense one's among them.
        sparse_feature_names: keys of the sparse vectors; without any, the dense vector is all.
        deep_fm_dimension: ``H``.
    """

    def __init__(
        self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int
    ) -> None:
        super().__init__()
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(
            nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU())
        )
        self.fm = FactorizationMachine()

    def forward(self, dense_features: Tensor, sparse_features: KeyedTensor) -> Tensor:
        """``[B, D]`` and ``[B, F * D]`` to ``[B, D + H + 1]``."""
        if len(self.sparse_feature_names) == 0:
            return dense_features
        vectors = [dense_features]
        for name in self.sparse_feature_names:
            vectors.append(sparse_features[name])  # noqa: PERF401 - as TorchScript has it
        return torch.cat([dense_features, self.deep_fm(vectors), self.fm(vectors)], dim=1)


class OverArch(nn.Module):
    """A linear layer to one number, and the sigmoid of it."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, 1]``."""
        out: Tensor = self.model(features)
        return out


class SimpleDeepFMNN(nn.Module):
    """The parts one after the other, to a probability.

    Args:
        num_dense_features: ``N``.
        embedding_bag_collection: tables of one dimension ``D``.
        hidden_layer_size: of the dense part.
        deep_fm_dimension: ``H``.

    Raises:
        UserError: no table, or tables of several dimensions.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        tables = embedding_bag_collection.embedding_bag_configs()
        dims = sorted({table.embedding_dim for table in tables})
        if len(dims) != 1:
            raise UserError(
                f"the tables' embedding_dim are {dims}; give at least one table, and all the same"
            )
        names = [name for table in tables for name in table.feature_names]
        width = dims[0] * (1 + len(names))
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, dims[0])
        self.inter_arch = FMInteractionArch(width, names, deep_fm_dimension)
        self.over_arch = OverArch(dims[0] + deep_fm_dimension + 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, N]`` and the features to probabilities ``[B, 1]``."""
        dense = self.dense_arch(dense_features)
        mixed = self.inter_arch(dense, self.sparse_arch(sparse_features))
        out: Tensor = self.over_arch(mixed)
        return out


class SimpleDeepFMNNWrapper(SimpleDeepFMNN):
    """A `SimpleDeepFMNN` that takes a batch, and gives its loss while it is trained.

    As in TorchRec the loss takes the probabilities for logits.
    """

    def forward(  # type: ignore[override]
        self, model_input: ModelInput
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The probabilities ``[B, 1]``; in training mode the mean binary cross entropy before them."""
        scores = super().forward(model_input.float_features, model_input.idlist_features)
        if not self.training:
            return scores
        loss = nn.functional.binary_cross_entropy_with_logits(scores.squeeze(), model_input.label)
        return loss, scores
