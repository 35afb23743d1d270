"""The names of ``torchrec.distributed.model_parallel``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.model.data_parallel import (
    DataParallelWrapper as DataParallelWrapper,
    DefaultDataParallelWrapper as DefaultDataParallelWrapper,
)
from tessera.training.distributed.model.model_parallel import (
    DistributedModelParallel as DistributedModelParallel, get_module as get_module,
    get_unwrapped_module as get_unwrapped_module,
)
from tessera.training.distributed.model.replicated import DMPCollection as DMPCollection
from tessera.training.distributed.plan.sharded_module import ShardedModule as ShardedModule
from tessera.training.distributed.planner.generators import (
    get_default_sharders as get_default_sharders,
)
