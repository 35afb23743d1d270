"""The tables of a sharded collection, pooled or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

from tessera.training.distributed.tables.batched_kernels import Kernel
from tessera.training.distributed.tables.grouped_lookup import GroupedLookup
from tessera.training.distributed.tables.shard_state import shard_of
from tessera.training.distributed.tables.table_module import ShardedTable
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable


class ShardedTables:
    """The tables of a collection: their shards here, by table.

    Args:
        names: of all tables, in the collection's order.
        lookups: of this rank.
        shards: of all ranks.
        pg: the ranks that tables are spread over; None: all tables are whole here.
        replicas: the ranks that hold copies of those that are not spread; None: the same.
    """

    def __init__(
        self,
        names: Sequence[str],
        lookups: Sequence[GroupedLookup],
        shards: Sequence[ShardedEmbeddingTable],
        pg: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._lookups, self._replicas = list(lookups), replicas or pg
        here: dict[str, list[tuple[ShardedEmbeddingTable, nn.Parameter]]] = {}
        for lookup in lookups:
            for table, values in lookup.table_shards():
                here.setdefault(table.name, []).append((table, values))
        metadata: dict[str, ShardedTensorMetadata | None] = {
            shard.name: shard.global_metadata for shard in shards
        }
        self.modules = {
            name: ShardedTable(name, here.get(name, []), None if pg is None else metadata[name], pg)
            for name in names
        }

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Copy each rank's shards from whole tables, or give them new values.

        Values are new without ``parameters`` and for tables on the ``meta`` device; replicas get
        the first rank's.
        """
        for name, table in self.modules.items():
            source = None if parameters is None else parameters[name]
            for shard, values in table.shards:
                if source is None or source.is_meta:
                    shard.init_weights(values)
                else:
                    # .data: autograd would take a change that it sees for an error.
                    values.data.copy_(shard_of(source, shard.local_metadata))
                if self._replicas is not None and shard.local_metadata is None:
                    dist.broadcast(values.data, group=self._replicas, group_src=0)
        self.purge()

    def kernels(self) -> list[Kernel]:
        """The kernels that hold the shards of this rank."""
        return [kernel for lookup in self._lookups for kernel in lookup.kernels]

    def flush(self) -> None:
        """Write cached rows back to the tables; call it before they are read."""
        for lookup in self._lookups:
            lookup.flush()

    def purge(self) -> None:
        """Forget cached rows; call it after the tables were written."""
        for lookup in self._lookups:
            lookup.purge()


def keep_caches_in_step(module: nn.Module, tables: Callable[[], ShardedTables]) -> None:
    """Let reading and writing the state of ``module``, which holds the tables, see to caches."""
    module.register_state_dict_pre_hook(lambda *_: tables().flush())  # type: ignore[no-untyped-call] # torch leaves it untyped
    module.register_load_state_dict_post_hook(lambda *_: tables().purge())  # type: ignore[no-untyped-call] # torch leaves it untyped
