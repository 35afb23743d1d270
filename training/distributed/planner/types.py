"""The data and the interfaces of a planner: hardware, shards, options, constraints, parts.

The way of a plan: an `Enumerator` lists every way of sharding every table, with the memory and the
time that each shard takes (`ShardEstimator`); a `Proposer` picks one way per table; a
`Partitioner` puts the shards on ranks; a `PerfModel` rates the result; the planner keeps the best.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum, unique
from typing import Any

from torch import Tensor, nn

from tessera.errors import UserError, refuse_unknown
from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.planner.bandwidths import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    GeneralizedCommsBandwidth,
)
from tessera.training.distributed.planner.constraints import ParameterConstraints
from tessera.training.distributed.planner.hardware import DeviceHardware, Perf, Storage, Topology
from tessera.training.distributed.sharding.registry import PartitionByType, strategy_of

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
    "ShardingOption",
    "ShardingPlanner",
    "Stats",
    "Storage",
    "StorageReservation",
    "Topology",
    "hash_sha256_str",
    "hash_sha256_to_int",
]


@dataclass(slots=True)
class Shard:
    """A rectangle of a table.

    Attributes:
        size: ``[rows, columns]``.
        offset: ``[first row, first column]``.
        storage: the memory that it takes on its rank; None before it is estimated.
        perf: the time that it takes there per step.
        rank: where it lies; None before partitioning.
    """

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    @property
    def used(self) -> Storage:
        """The memory that it takes, once an estimator has set it."""
        assert self.storage is not None, "an estimator of storage has seen this shard"
        return self.storage

    @property
    def time(self) -> Perf:
        """The time that it takes, once an estimator has set it."""
        assert self.perf is not None, "an estimator of time has seen this shard"
        return self.perf

    @property
    def place(self) -> int:
        """The rank that it lies on, once a partitioner has put it there."""
        assert self.rank is not None, "a partitioner has placed this shard"
        return self.rank


_PLACES = [kind.value for kind in PartitionByType]


@dataclass(eq=False)
class ShardingOption:
    """One way to shard one table.

    Attributes:
        name: the table.
        tensor: its weight (may be on the ``meta`` device); only its shape and type are read.
        module: path of the module in the model, and the module.
        input_lengths: ids per bag, one per feature.
        batch_size: samples per rank and step.
        sharding_type: the strategy's name.
        compute_kernel: see `EmbeddingComputeKernel`.
        shards: the rectangles that the table is cut into.
        constraints: what the caller said of this table; None: nothing.
        is_pooled: bags are pooled; otherwise every id gives a vector.
        is_weighted: ids carry weights.
        bags_per_sample: bags of each feature in a sample; None: one of each.
        partition_by: on which ranks a partitioner may put the shards, a `PartitionByType` or its name;
            None: as the strategy says.
    """

    name: str
    tensor: Tensor
    module: tuple[str, nn.Module]
    input_lengths: list[float]
    batch_size: int
    sharding_type: str
    compute_kernel: str
    shards: list[Shard]
    constraints: ParameterConstraints | None = None
    is_pooled: bool = True
    is_weighted: bool = False
    _: KW_ONLY
    bags_per_sample: list[float] | None = None
    partition_by: Any = None

    def __post_init__(self) -> None:
        if self.partition_by is None:
            self.partition_by = strategy_of(self.sharding_type).placed
        refuse_unknown(
            "partition_by", str(getattr(self.partition_by, "value", self.partition_by)), _PLACES
        )
        self.partition_by = PartitionByType(self.partition_by)

    @property
    def fqn(self) -> str:
        """Module path and table name."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def path(self) -> str:
        """The path of the module in the model."""
        return self.module[0]

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @property
    def total_storage(self) -> Storage:
        """The memory that all pieces take together."""
        hbm = ddr = ssd = 0
        for shard in self.shards:
            hbm += shard.used.hbm
            ddr += shard.used.ddr
            ssd += shard.used.ssd
        return Storage(hbm, ddr, ssd)

    @property
    def total_perf(self) -> float:
        """Milliseconds of all shards, added up."""
        total = 0.0
        for shard in self.shards:
            total += shard.time.total
        return total

    def storage_hash(self) -> int:
        """A number that says which way of which table it is, the same in every process.

        Of the table's full name, the strategy, the kernel and the shards' rectangles.
        """
        shards = [(list(shard.offset), list(shard.size)) for shard in self.shards]
        return hash_sha256_to_int([self.fqn, self.sharding_type, self.compute_kernel, shards])

    def placed(self, ranks: Sequence[int]) -> ShardingOption:
        """A copy whose shards lie on ``ranks``."""
        shards = [
            Shard(shard.size, shard.offset, shard.storage, shard.perf, rank)
            for shard, rank in zip(self.shards, ranks, strict=True)
        ]
        return replace(self, shards=shards)


def per_rank(
    options: Iterable[ShardingOption], ranks: int, value: Callable[[Shard], float]
) -> list[float]:
    """Sums of a value of the shards, by the rank that they were placed on."""
    totals = [0.0] * ranks
    for option in options:
        for shard in option.shards:
            totals[shard.place] += value(shard)
    return totals


def hash_sha256_str(hashable_list: list[Any]) -> str:
    """The SHA-256 of a list's text, in hexadecimal."""
    return hashlib.sha256(str(hashable_list).encode()).hexdigest()


def hash_sha256_to_int(hashable_list: list[Any]) -> int:
    """The SHA-256 of a list's text as a number."""
    return int(hash_sha256_str(hashable_list), 16)


@unique
class PlannerErrorType(Enum):
    """Why a plan could not be made."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    INVALID_INPUT = "invalid_input"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"


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
