"""Tables of which a rank holds shards, as checkpoints see them.

With a process group a table is a ``ShardedTensor`` whose local shards are the live memory, also
on a rank that holds none of it; without one it is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard

from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable

LocalShard = tuple[ShardedEmbeddingTable, Tensor]


def sharded_tensor(
    shards: Sequence[tuple[ShardMetadata, Tensor]],
    metadata: ShardedTensorMetadata,
    pg: dist.ProcessGroup,
) -> ShardedTensor:
    """A table from the shards here, without asking the other ranks.

    A plan names devices as it was told; the shards' own places name the device that they are on.
    """
    devices = {tuple(place.shard_offsets): values.device for place, values in shards}

    def of_device(place: ShardMetadata) -> ShardMetadata:
        device = devices.get(tuple(place.shard_offsets))
        if device is None or place.placement is None:
            return place
        where = f"rank:{place.placement.rank()}/{device}"
        return ShardMetadata(list(place.shard_offsets), list(place.shard_sizes), where)

    whole = ShardedTensorMetadata(
        shards_metadata=[of_device(place) for place in metadata.shards_metadata],
        size=metadata.size,
        tensor_properties=metadata.tensor_properties,
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001 - the only way that asks no other rank
        [Shard(values, of_device(place)) for place, values in shards], whole, process_group=pg
    )


def table_values(
    shards: Iterable[LocalShard],
    pg: dist.ProcessGroup | None,
    elsewhere: Mapping[str, ShardedTensorMetadata] | None = None,
) -> dict[str, Any]:
    """Return the value of each table by its name; ``elsewhere`` names those with no shard here."""
    by_name: dict[str, list[LocalShard]] = {}
    for table, values in shards:
        by_name.setdefault(table.name, []).append((table, values))
    found: dict[str, Any] = {}
    for name, own in by_name.items():
        whole = own[0][0].global_metadata
        if pg is None or whole is None:
            found[name] = own[0][1]
            continue
        places = []
        for table, values in own:
            assert table.local_metadata is not None
            places.append((table.local_metadata, values))
        found[name] = sharded_tensor(places, whole, pg)
    for name, metadata in (elsewhere or {}).items():
        if pg is not None and name not in found:
            found[name] = sharded_tensor([], metadata, pg)
    return found


@torch.no_grad()
def load_tables(
    shards: Sequence[LocalShard], values: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Copy tables, whole ones or ``ShardedTensor``s with the same shards here, into the shards.

    Returns:
        Names that ``values`` lacks, and names that no shard here is of.

    Raises:
        ValueError: a value of another shape or other shards.
    """
    names = {table.name for table, _ in shards}
    for table, target in shards:
        if table.name in values:
            # .data: autograd would take a change that it sees for an error of the caller's.
            target.data.copy_(_part(table, values[table.name]))
    missing = sorted(names - set(values))
    return missing, sorted(set(values) - names)


def _part(table: ShardedEmbeddingTable, value: Any) -> Tensor:
    place = table.local_metadata
    if isinstance(value, ShardedTensor):
        wanted = (place.shard_offsets, place.shard_sizes) if place is not None else (None, None)
        for shard in value.local_shards():
            if (shard.metadata.shard_offsets, shard.metadata.shard_sizes) == wanted:
                return shard.tensor
        raise ValueError(
            f"table {table.name!r}: the state has no shard at {wanted[0]} of size {wanted[1]} on this "
            "rank; load a state of another plan with tessera.training.distributed.checkpoint"
        )
    if list(value.shape) != [table.num_embeddings, table.embedding_dim]:
        raise ValueError(
            f"table {table.name!r}: the state has shape {tuple(value.shape)}; expected "
            f"({table.num_embeddings}, {table.embedding_dim})"
        )
    return shard_of(value, place)


def shard_of(whole: Tensor, place: ShardMetadata | None) -> Tensor:
    """The part of a table ``[rows, columns]`` that a shard is; all of it where ``place`` is None."""
    if place is None:
        return whole
    (row, column), (rows, columns) = place.shard_offsets, place.shard_sizes
    return whole[row : row + rows, column : column + columns]
