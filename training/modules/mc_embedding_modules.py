"""Embedding collections behind managed collisions: any ids in, vectors of their rows out."""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.modules.embedding_configs import BaseEmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.mc_modules import ManagedCollisionCollection
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class BaseManagedCollisionEmbeddingCollection(nn.Module):
    """A collection whose features' ids are mapped to rows first.

    A row that the map gives to another id begins anew with values as of a new table, before it is
    looked up; a dense optimizer's state of it stays.

    Args:
        embedding_module: the tables.
        managed_collision_collection: a module for each of them.
        return_remapped_features: whether the rows of the ids are part of the output.
        allow_in_place_embed_weight_update: whether rows begin anew unseen by autograd, so that a
            forward may come between another one and its backward.

    Raises:
        ValueError: the two are of different tables.
    """

    def __init__(
        self,
        embedding_module: EmbeddingBagCollection | EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        allow_in_place_embed_weight_update: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        super().__init__()
        mapped = [table.name for table in managed_collision_collection.embedding_configs()]
        tables = [table.name for table in tables_of(embedding_module)]
        if mapped != tables:
            raise ValueError(
                f"managed_collision_collection is of tables {mapped}, the embedding module has "
                f"{tables}; give both the same tables in the same order"
            )
        self._managed_collision_collection = managed_collision_collection
        self._embedding_module: Any = embedding_module
        self._return_remapped_features = return_remapped_features
        self._in_place = allow_in_place_embed_weight_update

    def forward(
        self,
        features: KeyedJaggedTensor,
        mutate_miss_lengths: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Map ids to rows, and look those up.

        Args:
            features: at least the features of all tables; others are ignored.  Any int64 is an id.
            mutate_miss_lengths: as of `ManagedCollisionCollection`.

        Returns:
            The collection's output, and the rows of the ids if they were asked for.

        Raises:
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, or what the collection says.
        """
        remapped = self._managed_collision_collection(features, mutate_miss_lengths)
        if self.training:
            evict(
                self._managed_collision_collection.evict(),
                self._embedding_module,
                in_place=self._in_place,
            )
        looked_up = self._embedding_module(remapped)
        return looked_up, remapped if self._return_remapped_features else None


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingCollection` whose features' ids are mapped to rows first.

    Its arguments are those of `BaseManagedCollisionEmbeddingCollection`, the first under its own name.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        allow_in_place_embed_weight_update: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        super().__init__(
            embedding_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_collection(self) -> Any:
        return self._embedding_module

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """The settings of every table, in the collection's order."""
        return tables_of(self._embedding_module)


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingBagCollection` whose features' ids are mapped to rows first.

    Its arguments are those of `BaseManagedCollisionEmbeddingCollection`, the first under its own name.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        allow_in_place_embed_weight_update: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_bag_collection(self) -> Any:
        return self._embedding_module

    def embedding_bag_configs(self) -> list[BaseEmbeddingConfig]:
        """The settings of every table, in the collection's order."""
        return tables_of(self._embedding_module)

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return bool(self._embedding_module.is_weighted())


def tables_of(module: EmbeddingBagCollection | EmbeddingCollection) -> list[BaseEmbeddingConfig]:
    """The settings of a collection's tables."""
    if isinstance(module, EmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    return list(module.embedding_configs())


@torch.no_grad()
def evict(
    evictions: dict[str, Tensor | None],
    ebc: EmbeddingBagCollection | EmbeddingCollection,
    *,
    in_place: bool = False,
) -> None:
    """Give rows new first values.

    Args:
        evictions: by table the rows ``[E]``, or None.
        ebc: the collection, pooled or not.
        in_place: unseen by autograd.
    """
    holder = ebc.embedding_bags if isinstance(ebc, EmbeddingBagCollection) else ebc.embeddings
    for table in tables_of(ebc):
        rows = evictions.get(table.name)
        if rows is not None and rows.numel():
            weight = holder[table.name].weight
            assert isinstance(weight, Tensor)
            fresh = weight.new_empty(rows.numel(), weight.size(1))
            table.init_weights(fresh)
            (weight.data if in_place else weight)[rows] = fresh
