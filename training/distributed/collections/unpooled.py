"""EmbeddingCollection whose tables are spread over ranks, and the sharder that makes it.

As in `tessera.training.distributed.embeddingbag`, but every id has a vector of its own: vectors
travel back along the way of the ids, and nothing is pooled.

Legend: ``N`` ids, ``D`` columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.distributed.collections.sharded_collection import (
    CollectionContext,
    ShardedCollection,
    VectorsAwaitable,
)
from tessera.training.distributed.collections.sharders import CollectionSharder
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.sharding.embedding_sharding import TableSharding
from tessera.training.distributed.sharding.interfaces import OutputColumns, blocks_by_name
from tessera.training.distributed.sharding.sequence_sharding import SequenceShardingContext
from tessera.training.distributed.travel.index_dedup import IndexDeduplicator, get_ec_index_dedup
from tessera.training.modules.embedding_modules import EmbeddingCollection
from tessera.training.modules.tables import DescribesUnpooled, embedding_names
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
        """The output of the collection.

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
        ids = [
            features.values().split_with_sizes(features.length_per_key())
            for features in sent
            if self._need_indices
        ]
        result: dict[str, JaggedTensor] = {}
        for name, blocks in self._blocks.items():
            parts = []
            for block in blocks:
                part = vectors[block.source][block.place]
                parts.append(part if part.size(1) == block.width else part[:, : block.width])
            sharding, place = blocks[0].source, blocks[0].place
            result[name] = JaggedTensor(
                parts[0] if len(parts) == 1 else torch.cat(parts, dim=1),
                ids[sharding][place].long() if self._need_indices else None,
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


class EmbeddingCollectionAwaitable(VectorsAwaitable[dict[str, JaggedTensor]]):
    """Waits for the vectors of all shardings' ids and joins them."""


class ShardedEmbeddingCollection(
    DescribesUnpooled, ShardedCollection[dict[str, JaggedTensor], EmbeddingCollectionContext]
):
    """An `EmbeddingCollection` whose tables live where a plan puts them.

    Its arguments, its names and its memory are those of `ShardedCollection`, besides:

    Args:
        use_index_dedup: send each id once and repeat its vector here.  It pays where ids come
            often: the price is a sort of the batch's ids.
    """

    embeddings: nn.ModuleDict
    _holder, _is_sequence = "embeddings", True
    _context = EmbeddingCollectionContext
    _sharding_context = SequenceShardingContext
    _awaitable = EmbeddingCollectionAwaitable

    def __init__(  # noqa: PLR0917 - the reference's signature
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> None:
        self._deduplicates = use_index_dedup or get_ec_index_dedup()
        super().__init__(
            module,
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
        )

    def _deduplicator(self, sharding: TableSharding) -> IndexDeduplicator | None:
        if not self._deduplicates or sharding.layout.pg is None or sharding.strategy.replicated:
            return None
        rows = [
            rows
            for groups in sharding.layout.groups_per_team()
            for group in groups
            for rows in group.feature_hash_sizes()
        ]
        return IndexDeduplicator(rows, self._device)

    def _prepare_output(self, module: EmbeddingCollection) -> None:
        self.configs = module.embedding_configs()
        self._need_indices = module.need_indices()
        self._deduplicators = [self._deduplicator(own) for own in self._shardings.values()]
        self._output = SequenceOutput(
            embedding_names(self.configs),
            [
                [part.columns for part in sharding.layout.parts()]
                for sharding in self._shardings.values()
            ],
            need_indices=self._need_indices,
        )

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection]:
        """Return the type of module that this is the sharded form of."""
        return EmbeddingCollection

    def _prepared(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> list[KeyedJaggedTensor]:
        ctx.input_features = self._router.route(features)
        sent, ctx.reverse_indices = [], []
        for part, deduplicator in zip(ctx.input_features, self._deduplicators, strict=True):
            alone, places = (part, None) if deduplicator is None else deduplicator.deduplicate(part)
            sent.append(alone)
            ctx.reverse_indices.append(places)
        return sent

    def _joined(
        self, ctx: EmbeddingCollectionContext, outputs: list[Tensor]
    ) -> dict[str, JaggedTensor]:
        vectors = [
            arrived if places is None else arrived.index_select(0, places)
            for arrived, places in zip(outputs, ctx.reverse_indices, strict=True)
        ]
        return self._output.join(vectors, ctx.input_features)


class EmbeddingCollectionSharder(
    CollectionSharder[EmbeddingCollection, ShardedEmbeddingCollection]
):
    """Turns `EmbeddingCollection` into its sharded form; see `CollectionSharder` and that form."""

    _plain, _sharded = EmbeddingCollection, ShardedEmbeddingCollection

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self.use_index_dedup = use_index_dedup
        self._more = (use_index_dedup,)
