"""The names of ``torchrec.distributed.sharding.rw_tensor_pool_sharding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.pools.tensor_sharding import (
    InferRwTensorPoolOutputDist as InferRwTensorPoolOutputDist,
    InferRwTensorPoolSharding as InferRwTensorPoolSharding,
    RwTensorPoolValuesDist as RwTensorPoolValuesDist,
    TensorPoolRwSharding as TensorPoolRwSharding,
)
