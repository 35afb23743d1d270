"""Words of a plan: how each table is cut, computed and placed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec, ShardingSpec

from tessera.training.modules.embedding_configs import DataType


class ShardingType(Enum):
    """The strategies that TorchRec names; `registry` knows all that there are.

    Wherever a plan or a constraint takes one of these values, it takes any registered name.
    """

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class ParameterStorage(Enum):
    """Names the kinds of memory that a planner counts."""

    HBM = "hbm"
    DDR = "ddr"


@unique
class ComputeKernel(Enum):
    """The kernel of modules that know only one; tables have `EmbeddingComputeKernel`."""

    DEFAULT = "default"


@unique
class CacheAlgorithm(Enum):
    """Says which row leaves a full cache."""

    LRU = 0
    LFU = 1


class CacheStatistics(ABC):
    """What is known of the ids of a table, to tell how often a cache of its rows has them."""

    @property
    @abstractmethod
    def expected_lookups(self) -> float:
        """Distinct ids of a step, of all ranks together."""

    @abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Share of the lookups that a cache does not hold, 0 to 1.

        Args:
            clf: cached share of the rows, 0 to 1.
        """

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """How hard the ids are to cache, whatever the cache's size: 0 is easy, 1 hard."""


@dataclass(unsafe_hash=True)
class CacheParams:
    """The HBM cache of a ``fused_uvm_caching`` table; None: FBGEMM's default.

    Attributes:
        algorithm: which row leaves a full cache.
        load_factor: cached share of the rows, 0 to 1.
        reserved_memory: bytes of HBM that the cache must leave free.
        precision: of the cached rows.
        prefetch_pipeline: whether a pipeline fills the cache ahead.
        stats: of the table's ids, for the planner's estimates.
    """

    algorithm: CacheAlgorithm | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: DataType | None = None
    prefetch_pipeline: bool | None = None
    stats: CacheStatistics | None = None


@dataclass(unsafe_hash=True)
class KeyValueParams:
    """How TorchRec stores a table on a disk or in a key-value store, which is not done here.

    Plans and constraints of its programs may hold one; a plan with one is refused when it is followed.
    The fields are TorchRec's: the directory, buffers and caches of a disk, the hosts of a server.
    """

    ssd_storage_directory: str | None = None
    ssd_rocksdb_write_buffer_size: int | None = None
    ssd_rocksdb_shards: int | None = None
    gather_ssd_cache_stats: bool | None = None
    stats_reporter_config: Any = None
    use_passed_in_path: bool = True
    l2_cache_size: int | None = None
    max_l1_cache_size: int | None = None
    enable_async_update: bool | None = None
    bulk_init_chunk_size: int | None = None
    lazy_bulk_init_enabled: bool | None = None
    enable_raw_embedding_streaming: bool | None = None
    res_store_shards: int | None = None
    kvzch_tbe_config: Any = None
    load_ckpt_without_opt: bool = False
    ps_hosts: tuple[tuple[str, int], ...] | None = None
    ps_client_thread_num: int | None = None
    ps_max_key_per_request: int | None = None
    ps_max_local_index_length: int | None = None


@unique
class BoundsCheckMode(Enum):
    """What a lookup does with an id that is not a row of its table."""

    FATAL = 0  # raises an error (on a GPU at a later synchronization)
    WARNING = 1  # takes row 0 and prints a warning once
    IGNORE = 2  # takes row 0
    NONE = 3  # does not look: the result is undefined


@dataclass
class ParameterSharding:
    """How one table is cut and where its shards live.

    Attributes:
        sharding_type: name of a strategy; those of `ShardingType` are always there.
        compute_kernel: see `EmbeddingComputeKernel`.
        ranks: the rank of each shard.  Table-wise: the one rank; column-wise: one per column
            shard; table-row-wise: the first rank of the node; row-wise and data-parallel: not
            needed.
        sharding_spec: offsets, sizes and placement of each shard.
        cache_params: the cache of a ``fused_uvm_caching`` table.
        enforce_hbm: a ``fused_uvm_caching`` table keeps its optimizer's state in HBM.
        stochastic_rounding: of 16-bit tables' updates.
        bounds_check_mode: what is done with ids outside the table.
        output_dtype: of the looked-up vectors.
        key_value_params: of a table on a disk or in a store; refused when the plan is followed.
    """

    sharding_type: str = ShardingType.TABLE_WISE.value
    compute_kernel: str = "fused"
    ranks: list[int] | None = None
    sharding_spec: ShardingSpec | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    output_dtype: DataType | None = None
    key_value_params: KeyValueParams | None = None


class ModuleShardingPlan:
    """Says how one module is sharded."""


@unique
class ObjectPoolShardingType(Enum):
    """How a pool is cut over ranks; see `tessera.training.distributed.pools`."""

    ROW_WISE = "row_wise"
    REPLICATED_ROW_WISE = "replicated_row_wise"


@dataclass
class ObjectPoolShardingPlan(ModuleShardingPlan):
    """Says how a pool is sharded.

    Attributes:
        sharding_type: how it is cut.
        inference: whether one process holds the rows of all devices.
        memory_capacity_per_rank: for inference, the devices' memories in any unit: each gets rows in proportion;
            None: equal blocks.
    """

    sharding_type: ObjectPoolShardingType
    inference: bool = False
    memory_capacity_per_rank: list[int] | None = None


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding], ModuleShardingPlan):
    """How the tables of one module are sharded, by table name."""

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("table", "sharding type", "compute kernel", "ranks")]
        rows += [
            (name, where.sharding_type, where.compute_kernel, str(where.ranks))
            for name, where in self.items()
        ]
        shards: list[tuple[str, ...]] = [("table", "shard offsets", "shard sizes", "placement")]
        shards += [
            (name, str(shard.shard_offsets), str(shard.shard_sizes), str(shard.placement))
            for name, where in self.items()
            if isinstance(where.sharding_spec, EnumerableShardingSpec)
            for shard in where.sharding_spec.shards
        ]
        text = _columns(rows)
        return text if len(shards) == 1 else f"{text}\n\n{_columns(shards)}"


def _columns(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join(lines)


@dataclass
class ShardingPlan:
    """How every sharded module of a model is sharded.

    Attributes:
        plan: by module path (``""`` for the model itself).  A module that the plan leaves out
            is left as it is.
    """

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A plan written by hand may hold plain dicts.
        self.plan = {
            path: tables
            if isinstance(tables, ModuleShardingPlan)
            else EmbeddingModuleShardingPlan(tables)
            for path, tables in self.plan.items()
        }

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """How the module at ``module_path`` is sharded, None if it is not."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        return "\n\n".join(f"module: {path}\n\n{plan!s}" for path, plan in self.plan.items())
