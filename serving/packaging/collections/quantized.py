"""Quantized collections, on one device or spread over several: their rows are packaged as they are.

They are what `tessera.training.inference.modules.quantize_inference_model` and
`tessera.training.inference.modules.shard_quant_model` make of the trained ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tessera.errors import UserError
from tessera.serving.packaging.collections.kinds import CollectionKind
from tessera.serving.packaging.collections.packed import POOLED, UNPOOLED
from tessera.serving.packaging.tables.taken_over import QuantizedTable
from tessera.training.distributed.inference.collection import ShardedQuantCollection
from tessera.training.distributed.inference.sharded import (
    ShardedQuantEmbeddingBagCollection,
    ShardedQuantEmbeddingCollection,
)
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig
from tessera.training.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.quant.rows import STORED_TYPES
from tessera.training.quant.stored_collection import StoredCollection


def _tables(
    collection: StoredCollection[Any] | ShardedQuantCollection[Any],
) -> list[tuple[BaseEmbeddingConfig, QuantizedTable]]:
    if collection.output_dtype() is not torch.float32:
        raise UserError(
            f"a quantized collection gives {collection.output_dtype()}, and packages look up "
            "float32; quantize it with output_dtype=torch.float32"
        )
    blocks = [block for block in collection.blocks() if len(block.rows)]
    return [
        (
            table,
            QuantizedTable(
                name=table.name,
                rows=table.num_embeddings,
                dim=table.embedding_dim,
                kind=STORED_TYPES[table.data_type],
                blocks=tuple(block for block in blocks if block.table == table.name),
            ),
        )
        for table in collection.configs
    ]


QUANTIZED: Sequence[CollectionKind] = [
    replace(kind, module=module, tables=_tables)
    for module, kind in (
        (EmbeddingBagCollection, POOLED),
        (ShardedQuantEmbeddingBagCollection, POOLED),
        (EmbeddingCollection, UNPOOLED),
        (ShardedQuantEmbeddingCollection, UNPOOLED),
    )
]
"""The quantized collections, pooled and unpooled, whole and sharded."""
