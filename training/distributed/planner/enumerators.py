"""Every way to shard every table of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tessera.training.distributed.collections.tower_places import tower_tables
from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.plan.shard_sizes import TableToCut
from tessera.training.distributed.plan.sharded_module import ModuleSharder, outermost
from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    type_name,
)
from tessera.training.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from tessera.training.distributed.planner.utils import sharder_name
from tessera.training.distributed.sharding.registry import (
    calculate_shard_sizes_and_offsets,
    strategy_of,
)
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel
from tessera.training.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

__all__ = [
    "GUARDED_COMPUTE_KERNELS",
    "GUARDED_SHARDING_TYPES_FOR_FP_MODULES",
    "EmbeddingComputeKernel",
    "EmbeddingEnumerator",
    "EmbeddingTower",
    "EmbeddingTowerCollection",
    "calculate_shard_sizes_and_offsets",
    "get_partition_by_type",
    "shardable_modules",
    "sharder_name",
]

GUARDED_COMPUTE_KERNELS: frozenset[EmbeddingComputeKernel] = frozenset(
    {
        EmbeddingComputeKernel.KEY_VALUE,
        EmbeddingComputeKernel.SSD_VIRTUAL_TABLE,
        EmbeddingComputeKernel.DRAM_VIRTUAL_TABLE,
        EmbeddingComputeKernel.DRAM_SSD_VIRTUAL_TABLE,
    }
)
"""TorchRec's kernels that it lists only for tables whose constraints name them.  None of them is here."""

GUARDED_SHARDING_TYPES_FOR_FP_MODULES: frozenset[str] = frozenset()
"""Strategies that are listed for feature-processed collections only where constraints name them: there is none."""

# Kernels whose rows do not all lie in device memory.
_OFF_DEVICE = frozenset({"fused_uvm", "fused_uvm_caching"})


class EmbeddingEnumerator(Enumerator):
    """Lists what the sharders offer, less what the constraints forbid.

    Strategies that a topology cannot tell apart are listed once: on one host, table-row-wise is
    row-wise under another name and grid adds nothing; on one rank only table-wise and
    data-parallel are left (`ShardingStrategy.least_ranks` and ``least_hosts``).

    Args:
        topology: the ranks.
        batch_size: samples per rank and step.
        constraints: by table name.
        estimator: what shards take; None: memory and time as `shard_estimators` has them.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: list[ShardEstimator] | ShardEstimator | None = None,
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._constraints = dict(constraints or {})
        if estimator is None:
            estimator = [EmbeddingPerfEstimator(topology), EmbeddingStorageEstimator(topology)]
        self._estimators = estimator if isinstance(estimator, list) else [estimator]
        self._sharder_map: dict[str, ModuleSharder[Any]] = {}
        self._last: list[ShardingOption] | None = None

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """What `enumerate` returned last; None before it."""
        return self._last

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Every way of every table, with its memory and time.

        Raises:
            PlannerError: the constraints leave a table without a way, or name an unknown table.
        """
        options: list[ShardingOption] = []
        seen: set[str] = set()
        for path, child, sharder in shardable_modules(module, sharders):
            for name, weight in sharder.shardable_parameters(child).items():
                seen.add(name)
                ways = self._ways(path, child, sharder, name, weight)
                if not ways:
                    raise PlannerError(
                        f"table {name!r}: its constraints leave no sharding type and kernel for "
                        f"{self._topology.compute_device} on {self._topology.world_size} ranks; "
                        "allow more in ParameterConstraints",
                        PlannerErrorType.STRICT_CONSTRAINTS,
                    )
                options += ways
        unknown = sorted(set(self._constraints) - seen)
        if unknown:
            raise PlannerError(
                f"constraints name table {unknown[0]!r}; the model's tables are {sorted(seen)[:20]}"
            )
        self._sharder_map = {type_name(sharder.module_type): sharder for sharder in sharders}
        self.populate_estimates(options)
        self._last = options
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set the memory and the time of every shard, for the sharders of the last `enumerate`."""
        for estimator in self._estimators:
            estimator.estimate(sharding_options, self._sharder_map)

    def _ways(
        self,
        path: str,
        child: nn.Module,
        sharder: ModuleSharder[Any],
        name: str,
        weight: Tensor,
    ) -> list[ShardingOption]:
        constraint = self._constraints.get(name)
        wanted = constraint or ParameterConstraints()
        topology = self._topology
        home, dependency = _home_of(path, child, name)
        features, is_pooled, is_weighted = _describe(home, name)
        if wanted.is_weighted is not None:
            is_weighted = wanted.is_weighted
        _check_constraint(name, features, wanted, topology.compute_device)
        lengths = _input_lengths(name, features, wanted.pooling_factors)
        batch_size = wanted.batch_size or self._batch_size
        bags = None
        if wanted.num_poolings is not None or wanted.batch_sizes is not None:
            bags = wanted.bags_per_sample(batch_size, len(lengths))
        rows, columns = weight.shape
        table = TableToCut(
            rows=rows,
            columns=columns,
            world_size=topology.world_size,
            local_size=topology.local_world_size,
            min_partition=wanted.min_partition or constants.MIN_CW_DIM,
        )
        ways: list[ShardingOption] = []
        for kind in self._sharding_types(sharder, wanted, on_one_host=dependency is not None):
            strategy = strategy_of(kind)
            pieces = strategy.cut(table)
            table_wise_listed = any(
                way.sharding_type == ShardingType.TABLE_WISE.value for way in ways
            )
            if not strategy.replicated and len(pieces) == 1 and table_wise_listed:
                continue  # one shard: the same as table-wise
            ways += [
                ShardingOption(
                    name=name,
                    tensor=weight,
                    module=(path, child),
                    input_lengths=lengths,
                    batch_size=batch_size,
                    bags_per_sample=bags,
                    sharding_type=kind,
                    compute_kernel=kernel,
                    shards=[Shard(size, offset) for size, offset in pieces],
                    constraints=constraint,
                    is_pooled=is_pooled,
                    is_weighted=is_weighted,
                    dependency=dependency,
                )
                for kernel in self._kernels(sharder, kind, wanted)
            ]
        return ways

    def _sharding_types(
        self, sharder: ModuleSharder[Any], wanted: ParameterConstraints, *, on_one_host: bool
    ) -> list[str]:
        offered = sharder.sharding_types(self._topology.compute_device)
        if wanted.sharding_types is not None:
            return [kind for kind in offered if kind in wanted.sharding_types]
        # Table-wise first: later strategies that come to the same are dropped.
        order = sorted(offered, key=lambda kind: kind != ShardingType.TABLE_WISE.value)
        ranks, hosts = self._topology.world_size, self._topology.num_hosts
        if on_one_host:
            hosts = max(hosts, 2)  # what would come to the same on a single host is not offered
        strategies = {kind: strategy_of(kind) for kind in order}
        return [
            kind
            for kind, strategy in strategies.items()
            if ranks >= strategy.least_ranks and hosts >= strategy.least_hosts
        ]

    def _kernels(
        self, sharder: ModuleSharder[Any], kind: str, wanted: ParameterConstraints
    ) -> list[str]:
        offered = sharder.compute_kernels(kind, self._topology.compute_device)
        if wanted.compute_kernels is not None:
            offered = [kernel for kernel in offered if kernel in wanted.compute_kernels]
        if wanted.enforce_hbm:
            offered = [kernel for kernel in offered if kernel not in _OFF_DEVICE]
        return offered


def get_partition_by_type(sharding_type: str) -> str:
    """On which ranks a strategy's shards may lie: the name of a `PartitionByType`.

    Raises:
        ValueError: there is no such strategy.
    """
    return strategy_of(sharding_type).placed.value


def shardable_modules(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """Path, module and sharder of the outermost modules that a sharder takes."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    return outermost(module, lambda part: by_type.get(type(part)))


def _home_of(path: str, child: nn.Module, table: str) -> tuple[nn.Module, str | None]:
    """The collection that a table is in, and its tower, all of whose tables go to one host; None: it is in none."""
    if isinstance(child, EmbeddingTower):
        return child.embedding, path
    if isinstance(child, EmbeddingTowerCollection):
        for number, tower in enumerate(child.towers):
            assert isinstance(tower, EmbeddingTower), "a collection holds towers"
            if table in tower_tables(tower.embedding):
                return tower.embedding, f"{path}.tower_{number}"
    return child, None


def _describe(child: nn.Module, table: str) -> tuple[list[str], bool, bool]:
    """The features of a table, whether it pools, and whether its ids have weights."""
    for attribute, pooled in (("embedding_bag_configs", True), ("embedding_configs", False)):
        configs = getattr(child, attribute, None)
        if callable(configs):
            for config in configs():
                if config.name == table:
                    weighted = getattr(child, "is_weighted", None)
                    return list(config.feature_names), pooled, bool(weighted and weighted())
    # A plain nn.EmbeddingBag: one feature.
    return [table], isinstance(child, nn.EmbeddingBag), False


def _check_constraint(
    table: str, features: list[str], wanted: ParameterConstraints, compute_device: str
) -> None:
    """Refuse a constraint that is of other features or devices.

    Raises:
        PlannerError: naming the table, what was given and what there is.
    """
    if wanted.feature_names is not None and sorted(wanted.feature_names) != sorted(features):
        raise PlannerError(
            f"table {table!r}: feature_names of its constraints are {wanted.feature_names}; the "
            f"table serves {features}"
        )
    if wanted.device_group not in {None, compute_device}:
        raise PlannerError(
            f"table {table!r}: device_group is {wanted.device_group!r}, but the topology's devices are "
            f"{compute_device!r}",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )


def _input_lengths(table: str, features: list[str], given: list[float]) -> list[float]:
    if len(given) == 1:
        return list(given) * max(1, len(features))
    if len(given) != len(features):
        raise PlannerError(
            f"table {table!r} has {len(features)} features and {len(given)} pooling_factors; give "
            "one for each, or one for all"
        )
    return list(given)
