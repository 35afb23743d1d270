"""What the steps of one batch of a pooled collection share, and its output under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tessera.training.distributed.embedding_sharding import EmbeddingShardingContext
from tessera.training.distributed.sharded_collection import CollectionContext
from tessera.training.distributed.types import Awaitable, LazyAwaitable
from tessera.training.sparse.jagged_tensor import KeyedTensor


def construct_output_kt(
    embeddings: list[Tensor], embedding_names: list[str], embedding_dims: list[int]
) -> KeyedTensor:
    """The vectors side by side, by name.

    Args:
        embeddings: ``[B, some columns]`` each; together they have the columns of all names.
        embedding_names: in the columns' order.
        embedding_dims: columns per name.
    """
    values = embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=1)
    return KeyedTensor(embedding_names, embedding_dims, values)


@dataclass
class EmbeddingBagCollectionContext(CollectionContext):
    """What the steps of one batch share.

    Attributes:
        sharding_contexts: one per sharding.
        mean_factors: per sharding, one over the bags' sizes; None where nothing is divided.
        inverse_indices: where the batch varies per feature: keys, and ``[F, B]`` the bag of its
            feature that each sample uses.
        variable_batch_per_feature: whether it does.
    """

    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=list)
    mean_factors: list[Tensor | None] = field(default_factory=list)
    inverse_indices: tuple[list[str], Tensor] | None = None
    variable_batch_per_feature: bool = False

    def _tensors(self) -> list[Tensor]:
        """Factors and inverse indices."""
        factors = [factors for factors in self.mean_factors if factors is not None]
        return factors if self.inverse_indices is None else [*factors, self.inverse_indices[1]]


class EmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """The vectors of all shardings, under way.

    Args:
        awaitables: one per sharding.
        join: makes the collection's output of what they give.
    """

    def __init__(
        self,
        awaitables: list[Awaitable[Tensor]],
        join: Callable[[list[Tensor]], KeyedTensor],
    ) -> None:
        super().__init__()
        self._awaitables = awaitables
        self._join = join

    def _wait_impl(self) -> KeyedTensor:
        return self._join([awaitable.wait() for awaitable in self._awaitables])
