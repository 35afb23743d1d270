"""Deciding where every table goes: which way of sharding, on which ranks.

    topology = Topology(world_size=8, compute_device="cuda")
    planner = EmbeddingShardingPlanner(topology=topology, constraints={...})
    plan = planner.collective_plan(model, sharders, pg)

`types` says how the parts work together; `shard_estimators` what the times and bytes are made of;
`stats.report_text` and `picture.save_picture` show what was decided; `plan_io` keeps plans in
files; `measure` fills in a machine's own bandwidths.
"""

from tessera.training.distributed.planner.enumerators import EmbeddingEnumerator
from tessera.training.distributed.planner.measure import measure_bandwidths
from tessera.training.distributed.planner.picture import save_picture
from tessera.training.distributed.planner.plan_io import load_plan, save_plan
from tessera.training.distributed.planner.planners import EmbeddingShardingPlanner
from tessera.training.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)

__all__ = [
    "EmbeddingEnumerator",
    "EmbeddingShardingPlanner",
    "ParameterConstraints",
    "PlannerError",
    "PlannerErrorType",
    "ShardingOption",
    "Topology",
    "load_plan",
    "measure_bandwidths",
    "save_picture",
    "save_plan",
]
