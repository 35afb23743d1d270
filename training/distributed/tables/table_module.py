"""The table of a collection, as its rank sees it: the module that carries its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

from tessera.training.distributed.tables.shard_state import load_tables, table_values
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable


class ShardedTable(nn.Module):
    """Holds the parameters of a table's shards here; its state is the whole table's.

    The first shard is the parameter ``weight``, further ones ``weight_1`` and so on; a rank
    without a shard has none.  In state dicts there is one ``weight`` on every rank: a
    ``ShardedTensor``, or a plain tensor where the table is not spread over ranks.

    Args:
        name: of the table.
        shards: of this rank, with their live values.
        metadata: all shards of the table; None: it is whole here.
        pg: the ranks.

    Attributes:
        shards: the shards of this rank with their live values.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[tuple[ShardedEmbeddingTable, nn.Parameter]],
        metadata: ShardedTensorMetadata | None,
        pg: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self._name, self.shards = name, list(shards)
        self._metadata, self._pg = metadata, pg
        for place, (_, parameter) in enumerate(shards):
            self.register_parameter(f"weight_{place}" if place else "weight", parameter)

    def value(self, *, keep_vars: bool = False) -> Any:
        """Return the table as state dicts have it."""
        own: list[tuple[ShardedEmbeddingTable, Tensor]] = [
            (table, values if keep_vars and self._metadata is None else values.detach())
            for table, values in self.shards
        ]
        everywhere = {} if self._metadata is None else {self._name: self._metadata}
        return table_values(own, self._pg, everywhere).get(self._name)

    def load(self, value: Any) -> None:
        """Copy a table into the shards here.

        Raises:
            ValueError: another shape, or a ``ShardedTensor`` with other shards.
        """
        load_tables(self.shards, {self._name: value})

    def _save_to_state_dict(
        self,
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,  # noqa: FBT001 - torch's signature
    ) -> None:
        value = self.value(keep_vars=keep_vars)
        if value is not None:
            destination[f"{prefix}weight"] = value

    def _load_from_state_dict(  # noqa: PLR0917 - torch's signature
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,  # noqa: FBT001 - torch's signature
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        del local_metadata
        key = f"{prefix}weight"
        if key not in state_dict:
            missing_keys.append(key)
            return
        try:
            self.load(state_dict[key])
        except ValueError as error:
            error_msgs.append(str(error))
        if strict:
            unexpected_keys.extend(
                name for name in state_dict if name.startswith(prefix) and name != key
            )
