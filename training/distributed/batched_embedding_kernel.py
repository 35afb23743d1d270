"""The names of ``torchrec.distributed.batched_embedding_kernel``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.tables.batched_kernels import (
    BatchedDenseEmbedding as BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag as BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding as BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag as BatchedFusedEmbeddingBag,
)
