"""Words of sharding: environment, plan, sharder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ShardingEnv:
    """Who takes part.

    Attributes:
        world_size: number of ranks.
        rank: this process's place among them.
        process_group: ``torch.distributed``'s group, None for a single process.

    Raises:
        ValueError: a rank outside the world.
    """

    world_size: int
    rank: int
    process_group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank} in a world of {self.world_size}; give 0 to world_size - 1"
            )

    @classmethod
    def from_process_group(cls, pg: Any) -> ShardingEnv:
        """From an initialized ``torch.distributed`` group."""
        return cls(
            torch.distributed.get_world_size(pg), torch.distributed.get_rank(pg), process_group=pg
        )

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """Without a group."""
        return cls(world_size, rank)


@dataclass
class ParameterSharding:
    """Where one table lives.

    Attributes:
        sharding_type: how it is cut; ``table_wise`` keeps it whole.
        compute_kernel: ``fused``: the optimizer works in the backward pass.
        ranks: the ranks that hold a part.
    """

    sharding_type: str = "table_wise"
    compute_kernel: str = "fused"
    ranks: list[int] = field(default_factory=lambda: [0])


EmbeddingModuleShardingPlan = dict[str, ParameterSharding]


@dataclass
class ShardingPlan:
    """Where every table of a model lives.

    Attributes:
        plan: module path (``""`` for the model itself) to table name to placement.  A collection
            that the plan leaves out is left as it is.
    """

    plan: dict[str, EmbeddingModuleShardingPlan]

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """The placements of one module's tables."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        lines = [
            f"{path or '(model)'}.{table}: {where.sharding_type}, {where.compute_kernel}, "
            f"ranks {where.ranks}"
            for path, tables in self.plan.items()
            for table, where in tables.items()
        ]
        return "\n".join(lines)


class ModuleSharder(ABC):
    """Turns a module of one type into its sharded form."""

    @property
    @abstractmethod
    def module_type(self) -> type[nn.Module]:
        """The type that this sharder takes."""

    @abstractmethod
    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that a plan places, by table name."""

    @abstractmethod
    def shard(
        self,
        module: nn.Module,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> nn.Module:
        """The sharded form of ``module``, with its weights."""


def check_one_rank(env: ShardingEnv, params: EmbeddingModuleShardingPlan) -> None:
    """Refuse what one rank cannot do.

    Raises:
        ValueError: more than one rank, or a placement that one rank cannot have.
    """
    if env.world_size > 1:
        raise ValueError(
            f"world_size is {env.world_size}; tables are trained on one rank, so start one process"
        )
    for table, where in params.items():
        if where.ranks != [0] or where.sharding_type != "table_wise":
            raise ValueError(
                f"table {table!r}: the plan says {where.sharding_type} on ranks {where.ranks}; "
                "with one rank it is table_wise on [0]"
            )
        if where.compute_kernel != "fused":
            raise ValueError(
                f"table {table!r}: compute_kernel is {where.compute_kernel!r}; give 'fused', or "
                "leave its collection out of the plan to train it with an optimizer of yours"
            )
