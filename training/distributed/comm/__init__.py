"""The names of ``torchrec.distributed.comm``."""

# isort: skip_file
# fmt: off
from tessera.training.distributed.comm.environment_2d import (
    intra_and_cross_node_pg_2D as intra_and_cross_node_pg_2D,
)
from tessera.training.distributed.comm.nodes import (
    get_group_rank as get_group_rank, get_local_rank as get_local_rank,
    get_local_size as get_local_size, get_node_group_size as get_node_group_size,
    get_num_groups as get_num_groups, intra_and_cross_node_pg as intra_and_cross_node_pg,
)
