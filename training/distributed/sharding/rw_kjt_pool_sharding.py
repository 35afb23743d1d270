"""The names of ``torchrec.distributed.sharding.rw_kjt_pool_sharding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.pools.kjt_sharding import (
    InferRwKeyedJaggedTensorPoolOutputDist as InferRwKeyedJaggedTensorPoolOutputDist,
    InferRwKeyedJaggedTensorPoolSharding as InferRwKeyedJaggedTensorPoolSharding,
    KeyedJaggedTensorPoolRwReplicatedSharding as KeyedJaggedTensorPoolRwReplicatedSharding,
    KeyedJaggedTensorPoolRwSharding as KeyedJaggedTensorPoolRwSharding,
    RwKeyedJaggedTensorPoolLookupValuesDist as RwKeyedJaggedTensorPoolLookupValuesDist,
    RwKeyedJaggedTensorPoolUpdateValuesDist as RwKeyedJaggedTensorPoolUpdateValuesDist,
)
