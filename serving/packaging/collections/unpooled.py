"""Unpooled collections over stored rows; see `tessera.serving.packaging.collections.pooled`."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from tessera.serving.packaging.collections.kinds import (
    CollectionKind,
    FoundCollection,
    Treatments,
)
from tessera.serving.packaging.lookups.backends import LookupBackend
from tessera.serving.packaging.tables.stored import StoredTables
from tessera.training.modules.embedding_configs import EmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingCollection
from tessera.training.modules.tables import EmbeddingCollectionInterface
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class PackedEmbeddingCollection(nn.Module):
    """An `EmbeddingCollection` over stored rows: one call per vector of its output."""

    def __init__(
        self,
        found: FoundCollection,
        stored: StoredTables,
        treatments: Treatments,
        backend: LookupBackend,
    ) -> None:
        super().__init__()
        self._need_indices = cast("EmbeddingCollectionInterface", found.module).need_indices()
        self._features = []
        for number, (feature, spec) in enumerate(found.lookups(treatments)):
            self._features.append((feature, spec.name, f"lookup_{number}"))
            self.add_module(f"lookup_{number}", backend.lookup_rows(stored, [spec]))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """See `EmbeddingCollection.forward`; ids outside a table take its nearest row."""
        found = {}
        for feature, name, lookup in self._features:
            bags = features[feature]
            found[name] = JaggedTensor(
                values=self.get_submodule(lookup)(bags.values(), bags.lengths()),
                lengths=bags.lengths(),
                offsets=bags.offsets(),
                weights=bags.values() if self._need_indices else None,
            )
        return found


def _tables(collection: EmbeddingCollection) -> list[tuple[EmbeddingConfig, Tensor]]:
    found = []
    for config in collection.embedding_configs():
        weight = collection.embeddings[config.name].weight
        assert isinstance(weight, Tensor)
        found.append((config, weight))
    return found


UNPOOLED = CollectionKind(
    module=EmbeddingCollection,
    tables=_tables,
    packed=PackedEmbeddingCollection,
    # Its output may hold the ids themselves.
    only_looks_up=lambda module: not module.need_indices(),
)
"""The record of `EmbeddingCollection`."""
