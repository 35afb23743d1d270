"""Embedding collections with fewer rows than ids, which are pruned while they are trained."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from tessera.training.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.itep_modules import GenericITEPModule, PrunedRows
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

C = TypeVar("C", EmbeddingBagCollection, EmbeddingCollection)


class _Pruned(nn.Module, Generic[C]):
    """A collection whose tables have rows for their most used ids alone.

    A row that gets another id begins with zeros, once training is under way; a dense optimizer's state of it stays.
    ``_iter`` counts the steps of training.  In evaluation ids are looked up, and nothing is counted or changed.

    Args:
        collection: its tables have as many rows as are kept.
        itep_module: says how many ids each table has.
    """

    _iter: Tensor

    def __init__(self, collection: C, itep_module: GenericITEPModule) -> None:
        super().__init__()
        self._itep_module = itep_module
        self.register_buffer("_iter", torch.tensor(0))
        tables = (
            collection.embedding_bag_configs()
            if isinstance(collection, EmbeddingBagCollection)
            else collection.embedding_configs()
        )
        weights = {name.split(".")[-2]: table for name, table in collection.named_parameters()}
        if not itep_module.held:
            spans = [
                (table, itep_module.ids_of(table.name, table.num_embeddings)) for table in tables
            ]
            itep_module.hold(
                [
                    PrunedRows(table.name, tuple(table.feature_names), weights[table.name], ids)
                    for table, ids in spans
                    if ids is not None
                ]
            )

    def _rows_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        remapped = self._itep_module(features, int(self._iter))
        if self.training:
            self._iter += 1
        return cast("KeyedJaggedTensor", remapped)


class ITEPEmbeddingBagCollection(_Pruned[EmbeddingBagCollection]):
    """An `EmbeddingBagCollection` with fewer rows than ids, which is pruned while it is trained.

    A row that gets another id begins with zeros, once training is under way; a dense optimizer's state of it stays.
    ``_iter`` counts the steps of training.  In evaluation ids are looked up, and nothing is counted or changed.

    Args:
        embedding_bag_collection: its tables have as many rows as are kept.
        itep_module: says how many ids each table has.

    Raises:
        UserError: a table has fewer ids than rows.
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, itep_module: GenericITEPModule
    ) -> None:
        super().__init__(embedding_bag_collection, itep_module)
        self._embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The collection's output for the rows of the ids.

        Raises:
            IndexError: an id is not one of its table's (on the CPU).
            ValueError: the values are not int32 or int64.
        """
        return cast("KeyedTensor", self._embedding_bag_collection(self._rows_of(features)))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The settings of every table, in the collection's order."""
        return list(self._embedding_bag_collection.embedding_bag_configs())


class ITEPEmbeddingCollection(_Pruned[EmbeddingCollection]):
    """An `EmbeddingCollection` with fewer rows than ids, which is pruned while it is trained.

    See `ITEPEmbeddingBagCollection`.

    Args:
        embedding_collection: its tables have as many rows as are kept.
        itep_module: says how many ids each table has.

    Raises:
        UserError: a table has fewer ids than rows.
    """

    def __init__(
        self, embedding_collection: EmbeddingCollection, itep_module: GenericITEPModule
    ) -> None:
        super().__init__(embedding_collection, itep_module)
        self._embedding_collection = embedding_collection

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The collection's output for the rows of the ids.

        Raises:
            IndexError: an id is not one of its table's (on the CPU).
            ValueError: the values are not int32 or int64.
        """
        return cast("dict[str, JaggedTensor]", self._embedding_collection(self._rows_of(features)))

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The settings of every table, in the collection's order."""
        return list(self._embedding_collection.embedding_configs())

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """The same, under the name that TorchRec has for it."""
        return self.embedding_configs()
