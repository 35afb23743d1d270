"""The data and the interfaces of a planner: hardware, shards, options, constraints, parts.

The way of a plan: an `Enumerator` lists every way of sharding every table, with the memory and the
time that each shard takes (`ShardEstimator`); a `Proposer` picks one way per table; a
`Partitioner` puts the shards on ranks; a `PerfModel` rates the result; the planner keeps the best.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from torch import nn

from tessera.errors import UserError
from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.planner.bandwidths import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    GeneralizedCommsBandwidth,
)
from tessera.training.distributed.planner.constraints import ParameterConstraints
from tessera.training.distributed.planner.context_hash import (
    hash_planner_context_inputs,
    hash_planner_context_inputs_str,
    hash_sha256_str,
    hash_sha256_to_int,
)
from tessera.training.distributed.planner.hardware import DeviceHardware, Perf, Storage, Topology
from tessera.training.distributed.planner.options import Shard, ShardingOption, per_rank
from tessera.training.distributed.planner.sharder_data import SharderData, SharderDataMap
from tessera.training.distributed.sharding.registry import PartitionByType

__all__ = [
    "BasicCommsBandwidths",
    "CollectiveType",
    "CustomTopologyData",
    "DeviceHardware",
    "Enumerator",
    "GeneralizedCommsBandwidth",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PlanLoader",
    "PlanReport",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "SharderData",
    "SharderDataMap",
    "ShardingOption",
    "ShardingPlanner",
    "Stats",
    "Storage",
    "StorageReservation",
    "Topology",
    "hash_planner_context_inputs",
    "hash_planner_context_inputs_str",
    "hash_sha256_str",
    "hash_sha256_to_int",
    "per_rank",
]


@unique
class PlannerErrorType(Enum):
    """Why a plan could not be made."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    INVALID_INPUT = "invalid_input"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"


class PlannerError(UserError):
    """A plan could not be made.

    Attributes:
        error_type: why.
    """

    def __init__(
        self, message: str, error_type: PlannerErrorType = PlannerErrorType.INVALID_INPUT
    ) -> None:
        super().__init__(message)
        self.error_type = error_type


class ShardEstimator(ABC):
    """Estimates one property of shards."""

    @abstractmethod
    def estimate(
        self, sharding_options: list[ShardingOption], sharder_map: dict[str, Any] | None = None
    ) -> None:
        """Set the property on every shard of every option."""


class Enumerator(ABC):
    """Lists the ways to shard the tables of a model."""

    @abstractmethod
    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Every way of every table of ``module`` that a sharder takes."""

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate options that were changed since they were listed.

        Raises:
            NotImplementedError: an enumerator of a program's own that has no such method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot estimate options that were changed"
        )


class PlanLoader(ABC):
    """Brings a plan that was made before; a planner that is given one does not search.

    See `tessera.training.distributed.planner.plan_loaders.PlanFile` for one that reads a file.
    """

    @abstractmethod
    def load(self) -> dict[int, ShardingOption] | None:
        """Placed options by `ShardingOption.storage_hash`; None: there is no plan, so make one."""

    @abstractmethod
    def plan_context_hash(self) -> str | None:
        """What the planner's ``hash_planner_context_inputs_str`` was for that plan; None: not known."""


class StorageReservation(ABC):
    """Reserves memory for what is not tables."""

    @abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """The topology with what is left for tables."""


class PerfModel(ABC):
    """Rates a plan: the base of performance models."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """The rating of a plan of placed options; lower is better."""


class Partitioner(ABC):
    """Places shards on ranks."""

    @abstractmethod
    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Copies of the options whose shards have ranks.

        Raises:
            PlannerError: they do not fit.
        """


class Proposer(ABC):
    """Picks one option per table, again and again, learning from how the last one did."""

    @abstractmethod
    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Begin a search among these options."""

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """One option per table; None: nothing more to try."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,  # noqa: FBT001 - the signature TorchRec users know
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """How the last proposal did."""


class Stats(ABC):
    """Reports a plan."""

    @abstractmethod
    def log(self, sharding_plan: ShardingPlan, report: PlanReport) -> None:
        """Report a finished plan."""


@dataclass(kw_only=True)
class PlanReport:
    """What a planner knows of its plan besides the placements.

    Attributes:
        topology: the hardware as given.
        left_for_tables: the same with the reservation taken off.
        best: the options chosen, with their ranks.
        num_options: ways that were enumerated.
        num_proposals: combinations that were tried; ``num_plans`` of them fitted.
        perf_rating: of the best.
        run_time_s: what planning took.
    """

    topology: Topology
    left_for_tables: Topology
    best: list[ShardingOption]
    num_options: int
    num_proposals: int
    num_plans: int
    perf_rating: float
    run_time_s: float


class ShardingPlanner(ABC):
    """Makes plans: the base of planners."""

    @abstractmethod
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        """Where every table of ``module`` goes."""

    @abstractmethod
    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: Any = None,
    ) -> ShardingPlan:
        """The same, made on rank 0 and sent to all ranks of ``pg``."""
