"""From the vectors of a collection's shardings to one jagged tensor per feature.

Legend: ``B`` samples of this rank, ``N_f`` ids of feature ``f``, ``D`` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tessera.training.distributed.collections.sharded_collection import (
    CollectionContext,
    VectorsAwaitable,
)
from tessera.training.distributed.sharding.interfaces import OutputColumns, blocks_by_name
from tessera.training.distributed.sharding.sequence_sharding import SequenceShardingContext
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class SequenceOutput:
    """Puts the outputs of all shardings together by name.

    Args:
        names: the collection's names, in order.
        columns_per_sharding: per sharding, what each of the features that it sends becomes.
        need_indices: whether the ids are the weights of the result.
    """

    def __init__(
        self,
        names: Sequence[str],
        columns_per_sharding: Sequence[Sequence[OutputColumns]],
        *,
        need_indices: bool,
    ) -> None:
        # Per name its blocks of columns, from left to right.
        self._blocks = dict(zip(names, blocks_by_name(names, columns_per_sharding), strict=True))
        self._need_indices = need_indices

    def join(
        self, outputs: Sequence[Tensor], sent: Sequence[KeyedJaggedTensor]
    ) -> dict[str, JaggedTensor]:
        """Return the output of the collection.

        Args:
            outputs: per sharding ``[ids, at least D]``, in the order of the ids.
            sent: per sharding the features.

        Returns:
            Of each name ``[N_f, D]`` in the feature's bags.
        """
        vectors = [
            list(output.split_with_sizes(features.length_per_key()))
            for output, features in zip(outputs, sent, strict=True)
        ]
        bags = [features.lengths().split_with_sizes(features.stride_per_key()) for features in sent]
        ids = (
            [features.values().split_with_sizes(features.length_per_key()) for features in sent]
            if self._need_indices
            else None
        )
        result: dict[str, JaggedTensor] = {}
        for name, blocks in self._blocks.items():
            parts = [
                part if part.size(1) == block.width else part[:, : block.width]
                for block in blocks
                for part in (vectors[block.source][block.place],)
            ]
            sharding, place = blocks[0].source, blocks[0].place
            result[name] = JaggedTensor(
                parts[0] if len(parts) == 1 else torch.cat(parts, dim=1),
                None if ids is None else ids[sharding][place].long(),
                bags[sharding][place],
                validate=False,
            )
        return result


@dataclass
class EmbeddingCollectionContext(CollectionContext):
    """Holds what the steps of one batch share.

    Attributes:
        sharding_contexts: one per sharding.
        input_features: per sharding, its features of this rank's samples.
        reverse_indices: per sharding, ``[N]`` int64: the place of each id among those that were
            sent; None where all were.
    """

    sharding_contexts: list[SequenceShardingContext] = field(default_factory=list)
    input_features: list[KeyedJaggedTensor] = field(default_factory=list)
    reverse_indices: list[Tensor | None] = field(default_factory=list)

    def _tensors(self) -> list[Tensor]:
        """Places of ids; the features tell the allocator themselves."""
        return [places for places in self.reverse_indices if places is not None]

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses the tensors."""
        super().record_stream(stream)
        for features in self.input_features:
            features.record_stream(stream)


class EmbeddingCollectionAwaitable(VectorsAwaitable[dict[str, JaggedTensor]]):
    """Waits for the vectors of all shardings' ids and joins them."""
