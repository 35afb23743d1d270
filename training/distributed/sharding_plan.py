"""The names of ``torchrec.distributed.sharding_plan``.

Generated from the table in training/torchrec_paths.py; change it there.
"""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.planner.generators import (
    ParameterShardingGenerator as ParameterShardingGenerator, apply_to_all as apply_to_all,
    balanced_table_wise_plan as balanced_table_wise_plan, column_wise as column_wise,
    construct_module_sharding_plan as construct_module_sharding_plan,
    data_parallel as data_parallel, get_default_sharders as get_default_sharders,
    get_module_to_default_sharders as get_module_to_default_sharders,
    get_sharding_constructor_from_type as get_sharding_constructor_from_type,
    grid_shard as grid_shard, placement as placement, row_wise as row_wise,
    table_column_wise as table_column_wise, table_row_wise as table_row_wise,
    table_wise as table_wise,
)
