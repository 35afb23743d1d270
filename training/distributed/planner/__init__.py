"""Deciding where every table goes: which way of sharding, on which ranks; see `planners`."""

# isort: skip_file
# fmt: off
from typing import TYPE_CHECKING

from tessera.training.lazy_names import lazy_names

if TYPE_CHECKING:
    from tessera.training.distributed.planner.constraints import (
        ParameterConstraints as ParameterConstraints,
    )
    from tessera.training.distributed.planner.enumerators import (
        EmbeddingEnumerator as EmbeddingEnumerator,
    )
    from tessera.training.distributed.planner.hardware import Topology as Topology
    from tessera.training.distributed.planner.measure import (
        measure_bandwidths as measure_bandwidths,
    )
    from tessera.training.distributed.planner.options import ShardingOption as ShardingOption
    from tessera.training.distributed.planner.picture import save_picture as save_picture
    from tessera.training.distributed.planner.plan_io import (
        load_plan as load_plan, save_plan as save_plan,
    )
    from tessera.training.distributed.planner.planners import (
        EmbeddingShardingPlanner as EmbeddingShardingPlanner,
    )
    from tessera.training.distributed.planner.types import (
        PlannerError as PlannerError, PlannerErrorType as PlannerErrorType,
    )

__all__, __getattr__, __dir__ = lazy_names(__name__)
