"""How one type of module is spread in 2D parallelism, where it differs from the rest of the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.plan.sharded_module import ShardedModule


@dataclass
class DMPCollectionConfig:
    """Gives the modules of one type a plan and sharding groups of their own.

    Attributes:
        module: the type of plain module; subclasses are not meant.
        plan: where the tables of those modules go, for one sharding group.
        sharding_group_size: ranks per sharding group.
        node_group_size: see `tessera.training.distributed.comm.environment_2d.ShardingEnv2D`.
        use_inter_host_allreduce: the same.

    Raises:
        ValueError: ``module`` is a type of sharded module.
    """

    module: type[nn.Module]
    plan: ShardingPlan
    sharding_group_size: int
    node_group_size: int | None = None
    use_inter_host_allreduce: bool = False

    def __post_init__(self) -> None:
        if issubclass(self.module, ShardedModule):
            raise ValueError(  # noqa: TRY004 - a type that is given as a value
                f"module is {self.module.__name__}, a sharded module; give the type of the plain one"
            )
