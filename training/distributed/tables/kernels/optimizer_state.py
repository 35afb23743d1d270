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
        weights: per shard; see `FusedTables`.
        states: per shard.
        step: shared by all tables.
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
    for name, places in by_name.items():
        own = [tables[place] for place in places]
        weight = _entry(own, [weights[place] for place in places], pg)
        entries[f"{name}.weight"] = weight
        state[weight] = {
            f"momentum{number + 1}": _entry(
                own, [states[place][number] for place in places], pg, rowwise=rowwise
            )
            for number, rowwise in enumerate(rule.rowwise_states)
        }
        if rule.counts_steps:
            state[weight]["step"] = step
    numbers = params.hyper_parameters.group(rule.settings)
    group = {"params": list(entries.values()), **numbers}
    optimizer = FusedOptimizer(entries, state, [group])
    for parameter in weights:
        setattr(parameter, IN_BACKWARD_OPTIMIZERS, [optimizer])
    return optimizer


def _entry(
    shards: Sequence[ShardedEmbeddingTable],
    parts: Sequence[Tensor],
    pg: torch.distributed.ProcessGroup | None,
    *,
    rowwise: bool = False,
) -> Tensor:
    """A table or a state of it: its shards here put together, or what is whole here."""
    whole = shards[0].global_metadata
    if pg is not None and whole is not None:
        places = [shard.local_metadata for shard in shards if shard.local_metadata is not None]
        return sharded(parts, places, whole, pg, rowwise=rowwise)
    if len(shards) > 1:
        raise ValueError(
            f"table {shards[0].name!r} is in one kernel twice; without a process group a table has "
            "one shard per rank"
        )
    return parts[0]


def sharded(
    parts: Sequence[Tensor],
    places: Sequence[ShardMetadata],
    whole: ShardedTensorMetadata,
    pg: torch.distributed.ProcessGroup | None,
    *,
    rowwise: bool = False,
) -> ShardedTensor:
    """A state over its live parts, cut as the table is.

    Args:
        parts: per shard here ``[local_rows, local_cols]``, or with ``rowwise`` ``[local_rows]``.
        places: the shards' places in the table.
        whole: all shards of the table.
        pg: the ranks that hold them.
        rowwise: one number per row and column shard: ``[rows]``, or ``[rows, k]`` of k.
    """
    assert pg is not None, "shards of a table belong to a group of ranks"
    size, cut = whole.size, whole.shards_metadata
    if rowwise:
        columns = sorted({shard.shard_offsets[1] for shard in cut})
        # With whole rows there is no second dimension.
        dims = 1 if len(columns) == 1 else 2

        def of_rows(shard: ShardMetadata) -> ShardMetadata:
            offsets = [shard.shard_offsets[0], columns.index(shard.shard_offsets[1])]
            sizes = [shard.shard_sizes[0], 1]
            return ShardMetadata(offsets[:dims], sizes[:dims], shard.placement)

        size = torch.Size([size[0], len(columns)][:dims])
        cut, places = [of_rows(shard) for shard in cut], [of_rows(place) for place in places]
        parts = [part if dims == 1 else part.unsqueeze(1) for part in parts]
    metadata = ShardedTensorMetadata(cut, size, TensorProperties(dtype=parts[0].dtype))
    shards = [(place, part.detach()) for part, place in zip(parts, places, strict=True)]
    return sharded_tensor(shards, metadata, pg)
