"""The tables of a collection that share a sharding, with all that serves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.comm.replicas import replicas
from tessera.training.distributed.sharding.embedding_sharding import (
    EmbeddingSharding,
    TableSharding,
)
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.distributed.tables.batched_kernels import Kernel
from tessera.training.distributed.tables.grouped_lookup import GroupedLookup
from tessera.training.distributed.tables.interfaces import BaseGroupedFeatureProcessor


@dataclass(frozen=True)
class ShardingPart:
    """Holds what serves the tables of one sharding.

    Attributes:
        infos: the tables, and where the plan puts them.
        sharding: who holds what.
        lookup: of the rows that are here.
        as_called: the same, in what averages the gradients of whole copies.
        input_dist: how ids travel.
        output_dist: how vectors travel back.
    """

    infos: list[EmbeddingShardingInfo]
    sharding: TableSharding
    lookup: GroupedLookup
    as_called: nn.Module
    input_dist: nn.Module
    output_dist: nn.Module

    @classmethod
    def made(
        cls,
        kind: str,
        infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device,
        codecs: dict[str, QuantizedCommCodecs] | None,
        *,
        is_sequence: bool,
        feature_processor: BaseGroupedFeatureProcessor | None,
    ) -> ShardingPart:
        """The part of a sharding that works as type ``kind`` does; its tables hold zeros.

        Raises:
            ValueError: a plan that does not fit the tables or the ranks.
        """
        sharding: TableSharding = EmbeddingSharding(
            strategy_of(kind),
            infos,
            env,
            device,
            codecs,
            is_sequence=is_sequence,
            permute_embeddings=not is_sequence,
        )
        lookup = cast(
            "GroupedLookup", sharding.create_lookup(device, feature_processor=feature_processor)
        )
        # The gradients of replicas are averaged over the ranks.
        replicated = sharding.strategy.replicated and env.process_group is not None
        return cls(
            infos,
            sharding,
            lookup,
            replicas(lookup, cast("Any", env.process_group), device) if replicated else lookup,
            sharding.create_input_dist(device),
            sharding.create_output_dist(device),
        )

    def kernels(self) -> Iterator[Kernel]:
        """What holds the shards of this rank."""
        yield from self.lookup.kernels

    def same_tables(self, infos: list[EmbeddingShardingInfo]) -> bool:
        """Whether ``infos`` are of the same tables, placed and kept alike."""

        def told(infos: list[EmbeddingShardingInfo]) -> list[tuple[Any, ...]]:
            return [
                (info.embedding_config.name, info.param_sharding, info.fused_params)
                for info in infos
            ]

        return told(self.infos) == told(infos)
