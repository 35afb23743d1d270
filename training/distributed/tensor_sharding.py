"""The names of ``torchrec.distributed.tensor_sharding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.pools.interfaces import (
    InferObjectPoolSharding as InferObjectPoolSharding,
    ObjectPoolReplicatedRwShardingContext as ObjectPoolReplicatedRwShardingContext,
    ObjectPoolRwShardingContext as ObjectPoolRwShardingContext,
    ObjectPoolSharding as ObjectPoolSharding,
    ObjectPoolShardingContext as ObjectPoolShardingContext,
    RwShardingContext as RwShardingContext,
    TensorPoolRwShardingContext as TensorPoolRwShardingContext,
)
