"""Ways to shard tables: the shards that they cut a table into, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from tessera.errors import refuse_unknown
from tessera.training.distributed.planner.constraints import ParameterConstraints
from tessera.training.distributed.planner.context_hash import hash_sha256_to_int
from tessera.training.distributed.planner.hardware import Perf, Storage
from tessera.training.distributed.sharding.registry import PartitionByType, strategy_of
from tessera.training.modules.embedding_modules import EmbeddingCollectionInterface
from tessera.training.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection


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


def _of_constraints(name: str, text: str) -> Any:
    """An attribute of an option that is kept among its constraints."""

    def get(option: ShardingOption) -> Any:
        return getattr(option.constraints, name) if option.constraints else None

    def set_it(option: ShardingOption, value: Any) -> None:
        option.constraints = replace(option.constraints or ParameterConstraints(), **{name: value})

    return property(get, set_it, doc=text)


@dataclass(eq=False, init=False)
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
        partition_by: on which ranks a partitioner may put the shards, a `PartitionByType` or its name.
        dependency: options of the same one are put on one host, as the tables of a tower must be; None: the
            table goes where it likes.

    Args:
        is_pooled: None: as ``module`` does.
        partition_by: None: as the strategy says.
        **of_constraints: fields of `ParameterConstraints`, such as ``cache_params``, ``enforce_hbm`` or
            ``output_dtype``; they are attributes of the option too, which may be set.
    """

    name: str
    tensor: Tensor
    module: tuple[str, nn.Module]
    input_lengths: list[float]
    batch_size: int
    sharding_type: str
    compute_kernel: str
    shards: list[Shard]
    constraints: ParameterConstraints | None
    is_pooled: bool
    is_weighted: bool
    bags_per_sample: list[float] | None
    partition_by: Any
    dependency: str | None

    cache_params = _of_constraints("cache_params", "The cache of a ``fused_uvm_caching`` table.")
    enforce_hbm = _of_constraints("enforce_hbm", "Whether all rows must lie in device memory.")
    stochastic_rounding = _of_constraints("stochastic_rounding", "Of 16-bit tables' updates.")
    bounds_check_mode = _of_constraints("bounds_check_mode", "What ids outside the table do.")
    feature_names = _of_constraints("feature_names", "The features that constraints are of.")
    output_dtype = _of_constraints("output_dtype", "The type of the looked-up vectors.")
    key_value_params = _of_constraints("key_value_params", "Of a table in a store.")
    num_poolings = _of_constraints("num_poolings", "Bags of each feature in a sample.")

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        name: str,
        tensor: Tensor,
        module: tuple[str, nn.Module],
        input_lengths: list[float],
        batch_size: int,
        sharding_type: str,
        compute_kernel: str,
        shards: list[Shard],
        *,
        constraints: ParameterConstraints | None = None,
        is_pooled: bool | None = None,
        is_weighted: bool = False,
        bags_per_sample: list[float] | None = None,
        partition_by: Any = None,
        dependency: str | None = None,
        **of_constraints: Any,
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.module = module
        self.input_lengths = input_lengths
        self.batch_size = batch_size
        self.sharding_type = sharding_type
        self.compute_kernel = compute_kernel
        self.shards = shards
        given = {key: value for key, value in of_constraints.items() if value is not None}
        if given:
            constraints = replace(constraints or ParameterConstraints(), **given)
        self.constraints = constraints
        self.is_pooled = self.module_pooled(module[1], name) if is_pooled is None else is_pooled
        self.is_weighted = is_weighted
        if bags_per_sample is None and "num_poolings" in given and constraints is not None:
            bags_per_sample = constraints.bags_per_sample(batch_size, len(input_lengths))
        self.bags_per_sample = bags_per_sample
        if partition_by is None:
            partition_by = strategy_of(sharding_type).placed
        self.partition_by = partition_by
        self.dependency = dependency

    @staticmethod
    def module_pooled(module: nn.Module, sharding_option_name: str) -> bool:
        """Whether ``module`` pools the bags of the table ``sharding_option_name``."""
        unpooled = (EmbeddingCollectionInterface, ManagedCollisionEmbeddingCollection)
        if isinstance(module, unpooled):
            return False
        return not any(
            sharding_option_name in path.split(".")
            for part in module.modules()
            if isinstance(part, unpooled)
            for path, _ in part.named_parameters()
        )

    @property
    def place_by(self) -> PartitionByType:
        """On which ranks a partitioner may put the shards.

        Raises:
            ValueError: ``partition_by`` is none of the known ways.
        """
        name = str(getattr(self.partition_by, "value", self.partition_by))
        refuse_unknown(f"table {self.name!r}: partition_by", name, _PLACES)
        return PartitionByType(name)

    @property
    def cache_load_factor(self) -> float | None:
        """The cached share of the rows, 0 to 1; None: it was not said."""
        cache = self.cache_params
        return None if cache is None else cache.load_factor

    @property
    def module_type_key(self) -> str:
        """The name of the module's type in the ``sharder_map`` that estimators are given."""
        kind = type(self.module[1])
        return f"{kind.__module__}.{kind.__qualname__}"

    @property
    def num_inputs(self) -> int:
        """Number of features."""
        return len(self.input_lengths)

    def get_shards_assignment(self) -> list[int | None]:
        """The rank of each shard; None before partitioning."""
        return [shard.rank for shard in self.shards]

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

    def with_constraints(self, constraints: ParameterConstraints | None) -> ShardingOption:
        """The option with other constraints of its table and with the same shards; None: the option itself.

        Its ``input_lengths`` stay as they are.

        Raises:
            ValueError: lists of the constraints are of another number of features.
        """
        if constraints is None:
            return self
        features = len(self.input_lengths)
        batch_size = constraints.batch_size or self.batch_size
        weighted = constraints.is_weighted
        return replace(
            self,
            constraints=constraints,
            batch_size=batch_size,
            bags_per_sample=constraints.bags_per_sample(batch_size, features),
            is_weighted=self.is_weighted if weighted is None else weighted,
        )

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
