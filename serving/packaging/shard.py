"""Say which device holds which rows.

One device holds everything for now; a plan of several shards changes this file and the lookup
modules that are built from it, not the package's inputs or outputs.
"""

from __future__ import annotations

from tessera.serving.manifest import Placement, ShardingPlan
from tessera.serving.packaging.quantize import StoredTables


def plan_one_device(tables: StoredTables, *, device: str = "cpu") -> ShardingPlan:
    """Every table whole on ``device``."""
    return ShardingPlan(
        num_shards=1,
        placements=tuple(
            Placement(
                table=table.info.name,
                shard=0,
                device=device,
                row_begin=0,
                row_end=table.info.rows,
            )
            for table in tables.tables
        ),
    )
