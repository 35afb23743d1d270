"""The names of ``torchrec.distributed.tensor_pool``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.pools.inference import (
    LocalShardPool as LocalShardPool,
    ShardedInferenceTensorPool as ShardedInferenceTensorPool,
)
from tessera.training.distributed.pools.tensor_pool import (
    ShardedTensorPool as ShardedTensorPool,
    TensorPoolAwaitable as TensorPoolAwaitable,
    TensorPoolSharder as TensorPoolSharder,
)
