"""What the caller of a planner says of single tables."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from tessera.training.distributed.plan.plan_types import (
    BoundsCheckMode,
    CacheParams,
    KeyValueParams,
)
from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.hardware import positive
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.modules.embedding_configs import DataType


@dataclass
class ParameterConstraints:
    """What the caller knows or wants of one table.

    Attributes:
        sharding_types: the only ones to consider; None: all that the sharder offers.
        compute_kernels: the only ones to consider; None: all that the sharder offers.
        min_partition: fewest columns of a column shard; None: `constants.MIN_CW_DIM`.
        pooling_factors: ids per bag, one per feature of the table (or one for all).
        batch_size: samples per rank and step of this table's features; None: the planner's.
        is_weighted: ids carry weights; None: as the module says.
        cache_params: cache of ``fused_uvm_caching``.
        enforce_hbm: only kernels whose rows lie in device memory.
        stochastic_rounding: of fp16 tables' updates.
        bounds_check_mode: what an id outside the table does.
        num_poolings: bags of each feature in a sample, one per feature; None: one of each.
        batch_sizes: samples per rank and step, one per feature; instead of ``batch_size``.
        feature_names: the features that the lists are of; None: the table's.  Others are refused when
            the model is planned.
        output_dtype: the type of the looked-up vectors, for the plan.
        device_group: the kind of device that the table must be on, ``cuda`` or ``cpu``; None: the
            topology's.
        key_value_params: passed on to the plan, which is refused with them when it is followed.

    Raises:
        ValueError: an unknown strategy, or a number that is not positive.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [constants.POOLING_FACTOR])
    _: KW_ONLY
    batch_size: int | None = None
    is_weighted: bool | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    feature_names: list[str] | None = None
    output_dtype: DataType | None = None
    device_group: str | None = None
    key_value_params: KeyValueParams | None = None

    def bags_per_sample(self, batch_size: int, features: int) -> list[float]:
        """Bags of each of ``features`` features, over ``batch_size``.

        Raises:
            ValueError: ``num_poolings`` or ``batch_sizes`` are of another number of features.
        """
        poolings = [1.0] * features if self.num_poolings is None else self.num_poolings
        sizes = [batch_size] * features if self.batch_sizes is None else self.batch_sizes
        for name, given in (("num_poolings", poolings), ("batch_sizes", sizes)):
            if len(given) != features:
                raise ValueError(
                    f"{name} has {len(given)} entries for {features} features; give one for each"
                )
        return [count * size / batch_size for count, size in zip(poolings, sizes, strict=True)]

    def ids_per_step(self, batch_size: int) -> float:
        """Ids of all features of the table on a rank, from ``batch_size`` samples."""
        factors = self.pooling_factors
        given = self.batch_sizes or self.num_poolings or factors
        if len(factors) == 1:
            factors = factors * len(given)
        bags = self.bags_per_sample(batch_size, len(factors))
        return batch_size * sum(count * factor for count, factor in zip(bags, factors, strict=True))

    def __post_init__(self) -> None:
        if self.sharding_types is not None:
            self.sharding_types = [
                strategy_of(kind, "an entry of sharding_types").name for kind in self.sharding_types
            ]
        if self.min_partition is not None:
            positive("min_partition", self.min_partition)
        if self.batch_size is not None:
            positive("batch_size", self.batch_size)
        for name, numbers in (
            ("batch_sizes", self.batch_sizes),
            ("num_poolings", self.num_poolings),
        ):
            for number in numbers or []:
                positive(name, number)
        for factor in self.pooling_factors:
            if factor < 0:
                raise ValueError(f"pooling_factors has {factor}; give 0 or more ids per bag")
