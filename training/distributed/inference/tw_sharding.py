"""Table-wise inference: each table whole on one device.

Ids: each device gets the features of its tables.  Rows: all.  Vectors: those of all devices are
put side by side.  It is the column-wise case of one block that has all columns.
"""

from __future__ import annotations

from tessera.training.distributed.inference.cw_sharding import InferCwEmbeddingSharding


class InferTwEmbeddingSharding(InferCwEmbeddingSharding):
    """Table-wise sharding of quantized tables: column-wise with one block of all columns."""
