"""The names of ``torchrec.distributed.sharding_plan``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.planner.generators import (
    apply_to_all as apply_to_all, balanced_table_wise_plan as balanced_table_wise_plan,
    construct_module_sharding_plan as construct_module_sharding_plan,
    get_default_sharders as get_default_sharders,
    get_module_to_default_sharders as get_module_to_default_sharders,
    get_sharding_constructor_from_type as get_sharding_constructor_from_type,
)
from tessera.training.distributed.sharding.by_hand import (
    ParameterShardingGenerator as ParameterShardingGenerator, placement as placement,
)
from tessera.training.distributed.sharding.registry import (
    calculate_shard_sizes_and_offsets as calculate_shard_sizes_and_offsets,
)
from tessera.training.distributed.sharding.strategies.column_wise import column_wise as column_wise
from tessera.training.distributed.sharding.strategies.data_parallel import (
    data_parallel as data_parallel,
)
from tessera.training.distributed.sharding.strategies.grid_shard import grid_shard as grid_shard
from tessera.training.distributed.sharding.strategies.row_wise import row_wise as row_wise
from tessera.training.distributed.sharding.strategies.table_column_wise import (
    table_column_wise as table_column_wise,
)
from tessera.training.distributed.sharding.strategies.table_row_wise import (
    table_row_wise as table_row_wise,
)
from tessera.training.distributed.sharding.strategies.table_wise import table_wise as table_wise
from tessera.training.distributed.collections.feature_processed import (
    FeatureProcessedEmbeddingBagCollectionSharder as FeatureProcessedEmbeddingBagCollectionSharder,
)
from tessera.training.distributed.collections.pooled import (
    EmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder,
)
from tessera.training.distributed.collections.unpooled import (
    EmbeddingCollectionSharder as EmbeddingCollectionSharder,
)
