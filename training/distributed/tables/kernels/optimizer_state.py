"""The optimizer of a kernel's tables, as checkpoints and schedulers see it.

Without a process group a table's states are plain tensors.  With one they are
``ShardedTensor``s whose shards are the live memory.  A column shard is a table of its own to the
optimizer: a state of one number per row then has one column per column shard, ``[rows, k]``;
with whole rows it is ``[rows]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)

from tessera.training.distributed.tables.shard_state import sharded_tensor
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable
from tessera.training.optim.fused import FusedOptimizer, FusedParams
from tessera.training.optim.optimizers import IN_BACKWARD_OPTIMIZERS
from tessera.training.optim.row_updates import RULES


def kernel_optimizer(
    tables: Sequence[ShardedEmbeddingTable],
    *,
    weights: Sequence[nn.Parameter],
    states: Sequence[Sequence[Tensor]],
    step: Tensor,
    params: FusedParams,
    pg: torch.distributed.ProcessGroup | None,
) -> FusedOptimizer:
    """The optimizer over ``weights``, which are marked as updated in the backward pass.

    Args:
        tables: what each weight is a shard of; shards of one table become one entry.
        weights: per shard ``[local_rows, local_cols]``.
        states: per shard, ``[local_rows, local_cols]`` or ``[local_rows]`` each.
        step: int64 scalar, shared by all tables.
        params: the settings to begin with.
        pg: the group that the shards are spread over; None: they are whole tables.

    Returns:
        Entries ``<table>.weight`` with states ``momentum1``, ``momentum2`` and ``step`` as far as
        the optimizer has them.
    """
    rule = RULES[params.optimizer]
    by_name: dict[str, list[int]] = {}
    for index, table in enumerate(tables):
        by_name.setdefault(table.name, []).append(index)
    entries: dict[str, Tensor] = {}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for name, shards in by_name.items():
        first = tables[shards[0]]
        spread = pg is not None and first.global_metadata is not None
        if not spread and len(shards) > 1:
            raise ValueError(
                f"table {name!r} is in one kernel twice; without a process group a "
                "table has one shard per rank"
            )
        own: dict[str, Tensor] = {}
        if spread:
            assert first.global_metadata is not None
            places = [_local(tables[shard]) for shard in shards]
            weight: Tensor = sharded(
                [weights[shard] for shard in shards], places, first.global_metadata, pg
            )
            for number, rowwise in enumerate(rule.rowwise_states):
                parts = [states[shard][number] for shard in shards]
                own[f"momentum{number + 1}"] = (
                    sharded_rowwise(parts, places, first.global_metadata, pg)
                    if rowwise
                    else sharded(parts, places, first.global_metadata, pg)
                )
        else:
            weight = weights[shards[0]]
            own = {f"momentum{n + 1}": part for n, part in enumerate(states[shards[0]])}
        if rule.counts_steps:
            own["step"] = step
        entries[f"{name}.weight"] = weight
        state[weight] = own
    numbers = params.hyper_parameters.group(rule.settings)
    group = {"params": list(entries.values()), **numbers}
    optimizer = FusedOptimizer(entries, state, [group])
    for parameter in weights:
        setattr(parameter, IN_BACKWARD_OPTIMIZERS, [optimizer])
    return optimizer


def _local(table: ShardedEmbeddingTable) -> ShardMetadata:
    assert table.local_metadata is not None, "a table with global metadata has local metadata"
    return table.local_metadata


def sharded(
    parts: Sequence[Tensor],
    places: Sequence[ShardMetadata],
    whole: ShardedTensorMetadata,
    pg: torch.distributed.ProcessGroup | None,
) -> ShardedTensor:
    """A state of one number per weight over its live parts, cut as the table is.

    Args:
        parts: per shard here ``[local_rows, local_cols]``.
        places: the shards' places in the table.
        whole: all shards of the table.
        pg: the ranks that hold them.
    """
    assert pg is not None, "shards of a table belong to a group of ranks"
    shards = [(place, part.detach()) for part, place in zip(parts, places, strict=True)]
    metadata = ShardedTensorMetadata(
        shards_metadata=whole.shards_metadata,
        size=whole.size,
        tensor_properties=TensorProperties(dtype=parts[0].dtype),
    )
    return sharded_tensor(shards, metadata, pg)


def sharded_rowwise(
    parts: Sequence[Tensor],
    places: Sequence[ShardMetadata],
    whole: ShardedTensorMetadata,
    pg: torch.distributed.ProcessGroup | None,
) -> ShardedTensor:
    """A state of one number per row and column shard: ``[rows]``, or ``[rows, k]`` of k.

    Args:
        parts: per shard here ``[local_rows]``.
        places: the shards' places in the table.
        whole: all shards of the table.
        pg: the ranks that hold them.
    """
    columns = sorted({shard.shard_offsets[1] for shard in whole.shards_metadata})

    def of_rows(shard: ShardMetadata) -> ShardMetadata:
        row, col = shard.shard_offsets
        if len(columns) == 1:
            return ShardMetadata([row], [shard.shard_sizes[0]], shard.placement)
        return ShardMetadata([row, columns.index(col)], [shard.shard_sizes[0], 1], shard.placement)

    rows = whole.size[0]
    metadata = ShardedTensorMetadata(
        shards_metadata=[of_rows(shard) for shard in whole.shards_metadata],
        size=torch.Size([rows] if len(columns) == 1 else [rows, len(columns)]),
    )
    shaped = [part if len(columns) == 1 else part.unsqueeze(1) for part in parts]
    return sharded(shaped, [of_rows(place) for place in places], metadata, pg)
