"""The names of ``torchrec.distributed.embedding_lookup``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.inference.lookup import (
    InferGroupedEmbeddingsLookup as InferGroupedEmbeddingsLookup,
    InferGroupedLookupMixin as InferGroupedLookupMixin,
    InferGroupedPooledEmbeddingsLookup as InferGroupedPooledEmbeddingsLookup,
    MetaInferGroupedEmbeddingsLookup as MetaInferGroupedEmbeddingsLookup,
    MetaInferGroupedPooledEmbeddingsLookup as MetaInferGroupedPooledEmbeddingsLookup,
    fx_wrap_tensor_view2d as fx_wrap_tensor_view2d,
)
from tessera.training.distributed.tables.grouped_lookup import (
    CommOpGradientScaling as CommOpGradientScaling,
    GroupedEmbeddingsLookup as GroupedEmbeddingsLookup, GroupedLookup as GroupedLookup,
    GroupedPooledEmbeddingsLookup as GroupedPooledEmbeddingsLookup,
    common_output_dtype as common_output_dtype,
    embeddings_cat_empty_rank_handle as embeddings_cat_empty_rank_handle,
)
from tessera.training.distributed.tables.table_shards import (
    EmbeddingComputeKernel as EmbeddingComputeKernel,
)
