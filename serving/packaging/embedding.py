"""The model's tables, swapped for stored rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from tessera.errors import UserError
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.backends import LookupBackend
from tessera.serving.packaging.tables.quantize import FloatTable, StoredTables
from tessera.training.models.dlrm import DLRM
from tessera.training.models.ranking import RankingModel
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


class QuantEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` over stored rows that takes raw ids.

    Args:
        trained: the collection that it stands in for; gives the output's keys.
        tables: the stored tables.
        features: the features in the order of the keys that `forward` is given.
        backend: whose lookup.
    """

    def __init__(
        self,
        trained: EmbeddingBagCollection,
        tables: StoredTables,
        features: Sequence[FeatureSpec],
        backend: LookupBackend,
    ) -> None:
        super().__init__()
        self._input_names = [feature.name for feature in features]
        self._names = trained.embedding_names()
        dims = {feature.name: feature.dim for feature in features}
        self._dims = [dims[name] for name in self._names]
        self._weighted = trained.is_weighted()
        self.lookup = backend.lookup(tables, features, self._names)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool raw ids of exactly the constructor's features, in its order."""
        assert features.keys() == self._input_names, features.keys()
        weights = features.weights() if self._weighted else None
        pooled = self.lookup(features.values(), features.lengths(), weights)
        return KeyedTensor(self._names, self._dims, pooled)


class KeepIds(nn.Module):
    """Stands where the model hashes ids: the stored tables' lookup does that itself."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` unchanged."""
        return features


def float_tables(model: RankingModel) -> list[FloatTable]:
    """The model's tables.

    Raises:
        UserError: the tables are not those of a plain collection (the model is still in the
            trainer's hands).
    """
    trained = _collection(model)
    tables = []
    for config in trained.embedding_bag_configs():
        weights = trained.embedding_bags[config.name].weight
        assert isinstance(weights, torch.Tensor)
        tables.append(FloatTable(name=config.name, weights=weights))
    return tables


def _collection(model: RankingModel) -> EmbeddingBagCollection:
    found = list(model.collections().values())
    if len(found) != 1:
        raise UserError(
            f"the model has {len(found)} plain collections of tables, expected 1; package a model "
            "that load_trained returned"
        )
    return found[0]


def with_stored_tables(
    model: RankingModel,
    tables: StoredTables,
    features: Sequence[FeatureSpec],
    backend: LookupBackend,
    *,
    interaction: nn.Module | None = None,
) -> RankingModel:
    """A copy of ``model`` that looks up stored rows; the float tables are not copied.

    Args:
        model: the trained model, left as it is.
        tables: its tables, stored.
        features: the features in the order in which the copy is given their ids.
        backend: whose operators.
        interaction: stands for DLRM's, if given; see `LookupBackend.interaction`.
    """
    trained = _collection(model)
    stored = QuantEmbeddingBagCollection(trained, tables, features, backend)
    # What is in the memo counts as copied already.
    memo: dict[int, object] = {id(trained): stored, id(model.hasher): KeepIds()}
    if interaction is not None and isinstance(model.arch, DLRM):
        memo[id(model.arch.inter_arch)] = interaction
    return copy.deepcopy(model, memo).eval()
