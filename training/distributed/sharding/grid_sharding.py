"""Grid: a table's columns are cut among nodes, and each node's columns by rows among its ranks.

* How ids travel: as table-row-wise, once per block of columns: a bag goes to every node that has
  one.
* Which rows are here: one block of rows of one block of columns.
* How vectors travel back: as table-row-wise; the collection puts a vector's parts side by side.
"""

from __future__ import annotations

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding


class GridPooledEmbeddingSharding(TwRwPooledEmbeddingSharding):
    """Grid sharding of pooled tables."""

    sharding_type = ShardingType.GRID_SHARD
