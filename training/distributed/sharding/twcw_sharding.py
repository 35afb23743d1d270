"""Table-column-wise: blocks of a table's columns live on the ranks of one node.

* How ids travel, which rows are here, how vectors travel back: as column-wise; the plan keeps
  a table's blocks on ranks that are near one another.
"""

from __future__ import annotations

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding


class TwCwPooledEmbeddingSharding(CwPooledEmbeddingSharding):
    """Table-column-wise sharding of pooled tables."""

    sharding_type = ShardingType.TABLE_COLUMN_WISE
