"""Memory and time of shards.

The time of a step is the bytes that must move divided by the bandwidth that moves them.  Nothing is
assumed to overlap, so the sum is an upper bound, which serves to compare ways of sharding and not to
predict a step.  Each strategy says itself what must move (`tessera.training.distributed.sharding.costs`).
Backward passes send the same bytes in the opposite direction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.cache_stats import EmbeddingOffloadStats
from tessera.training.distributed.planner.exchange_times import (
    Exchanged,
    Links,
    exchange_seconds,
)
from tessera.training.distributed.planner.sharder_data import get_num_poolings
from tessera.training.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    Shard,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from tessera.training.distributed.sharding.costs import Step, Traffic
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.optim.row_updates import RULES

__all__ = [
    "EmbeddingOffloadStats",
    "EmbeddingPerfEstimator",
    "EmbeddingStorageEstimator",
    "get_num_poolings",
    "type_name",
]

_DENSE, _UVM, _UVM_CACHING = "dense", "fused_uvm", "fused_uvm_caching"

# By name without "exact_", which sharders' settings may leave out: per state of an optimizer whether
# it is one number per row, else one per weight.
_ROWWISE_STATES = {
    kind.value.removeprefix("exact_"): rule.rowwise_states for kind, rule in RULES.items()
}


def _traffic(option: ShardingOption, shard: Shard, topology: Topology) -> Traffic:
    rows = option.tensor.shape[0]
    bags = option.bags_per_sample or [1.0] * len(option.input_lengths)
    ids = [count * length for count, length in zip(bags, option.input_lengths, strict=True)]
    return strategy_of(option.sharding_type).traffic(
        Step(
            batch_size=option.batch_size,
            ranks=topology.world_size,
            ranks_per_host=topology.local_world_size,
            ids_per_sample=sum(ids),
            features=sum(bags),
            rows_share=shard.size[0] / rows if rows else 0.0,
            is_pooled=option.is_pooled,
        )
    )


def _optimizer_of(sharder: Any) -> str:
    params = getattr(sharder, "fused_params", None) or {}
    kind = params.get("optimizer", "row_wise_adagrad")
    return str(getattr(kind, "value", kind)).lower().removeprefix("exact_")


def _sharder_of(option: ShardingOption, sharder_map: dict[str, Any] | None) -> Any:
    return (sharder_map or {}).get(option.module_type_key)


def type_name(kind: type) -> str:
    """The name of a type of module in a ``sharder_map``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _id_bytes(option: ShardingOption) -> int:
    return constants.ID_BYTES + (constants.WEIGHT_BYTES if option.is_weighted else 0)


def _load_factor(option: ShardingOption) -> float:
    cache = option.constraints.cache_params if option.constraints else None
    given = cache.load_factor if cache else None
    return constants.CACHE_LOAD_FACTOR if given is None else given


class _EstimatorBySize(ShardEstimator):
    """Shards of one size share one estimate."""

    _property: ClassVar[str]

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> None:
        self._topology = topology
        self._constraints = dict(constraints or {})

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_map: dict[str, Any] | None = None
    ) -> None:
        """Set the property on every shard of every option.

        Raises:
            ValueError: lists of constraints of another number of features than the option has.
        """
        for given in sharding_options:
            option = given.with_constraints(self._constraints.get(given.name))
            sharder = _sharder_of(option, sharder_map)
            known: dict[tuple[int, ...], Any] = {}
            for shard in option.shards:
                key = tuple(shard.size)
                if key not in known:
                    known[key] = self._of(option, shard, sharder)
                setattr(shard, self._property, self._for_one(known[key]))

    @abstractmethod
    def _of(self, option: ShardingOption, shard: Shard, sharder: Any) -> Any:
        """The property of one shard."""

    @staticmethod
    def _for_one(estimate: Any) -> Any:
        """What one of the shards gets of an estimate that they share: what may be changed later is a copy."""
        return estimate


class EmbeddingPerfEstimator(_EstimatorBySize):
    """Milliseconds of a step per shard (``perf``), from bandwidths and bytes.

    Args:
        topology: bandwidths.
        constraints: by table, in the place of those that the options have.
    """

    _property = "perf"

    def _of(self, option: ShardingOption, shard: Shard, _sharder: Any) -> Perf:
        topology = self._topology
        traffic = _traffic(option, shard, topology)
        element = option.tensor.element_size()
        columns = shard.size[1]
        id_bytes = _id_bytes(option)
        moved = traffic.ids * (columns * element + id_bytes)
        written = traffic.vectors * columns * constants.OUTPUT_BYTES
        device_bw = (
            topology.hbm_mem_bw if topology.compute_device == "cuda" else topology.ddr_mem_bw
        )
        forward = moved / self._row_bandwidth(option) + written / device_bw
        backward = forward * topology.bwd_compute_multiplier
        if option.is_weighted:
            backward *= topology.weighted_feature_bwd_compute_multiplier
        if option.compute_kernel == _DENSE:
            # A gradient of every row is written, and every row goes through the optimizer.
            table = shard.size[0] * columns * constants.OUTPUT_BYTES
            backward += constants.DENSE_PASSES * table / device_bw
        prefetch = 0.0
        if option.compute_kernel == _UVM_CACHING:
            misses = 1.0 - _hit_rate(option)
            prefetch = traffic.ids * misses * columns * element / topology.hbm_to_ddr_mem_bw
        fwd_comms, bwd_comms = self._comms(option, shard, traffic)
        return Perf(
            fwd_compute=forward * 1e3,
            fwd_comms=fwd_comms * 1e3,
            bwd_compute=backward * 1e3,
            bwd_comms=bwd_comms * 1e3,
            prefetch_compute=prefetch * 1e3,
        )

    def _row_bandwidth(self, option: ShardingOption) -> float:
        topology = self._topology
        if topology.compute_device == "cpu":
            return topology.ddr_mem_bw
        if option.compute_kernel == _UVM:
            return topology.hbm_to_ddr_mem_bw
        if option.compute_kernel == _UVM_CACHING:
            hits = _hit_rate(option)
            return 1.0 / (hits / topology.hbm_mem_bw + (1 - hits) / topology.hbm_to_ddr_mem_bw)
        return topology.hbm_mem_bw

    def _comms(self, option: ShardingOption, shard: Shard, traffic: Traffic) -> tuple[float, float]:
        """Seconds of the forward and of the backward pass."""
        topology = self._topology
        local = topology.local_world_size
        vector_bytes = shard.size[1] * constants.OUTPUT_BYTES
        ids, forward, backward = exchange_seconds(
            traffic,
            Links(topology.comms_bandwidths, topology.world_size, local, local),
            Exchanged(
                id_bytes=_id_bytes(option),
                vector_bytes=vector_bytes,
                gradient_bytes=vector_bytes,
                summed_bytes=vector_bytes,
                summed_gradient_bytes=vector_bytes,
                table_bytes=shard.size[0] * shard.size[1] * option.tensor.element_size(),
                is_summed=option.is_pooled and shard.size[0] < option.tensor.shape[0],
            ),
        )
        return ids + forward, backward


def _hit_rate(option: ShardingOption) -> float:
    """Share of the lookups that a cache has: as its statistics say, else what any stream of ids has."""
    load = _load_factor(option)
    cache = option.constraints.cache_params if option.constraints else None
    if cache is not None and cache.stats is not None:
        return 1.0 - cache.stats.expected_miss_rate(load)
    return constants.CACHE_HIT_RATE_FLOOR + (1 - constants.CACHE_HIT_RATE_FLOOR) * load


class EmbeddingStorageEstimator(_EstimatorBySize):
    """Bytes per shard (``storage``): rows, optimizer state, ids and vectors of a step.

    ``fused_params`` of the sharder say which optimizer; a dense kernel keeps a gradient of the
    whole shard and two numbers per weight for its optimizer (as Adam does).

    Args:
        topology: where ids and vectors lie (device memory on ``cuda``).
        constraints: by table, in the place of those that the options have.
    """

    _property = "storage"

    @staticmethod
    def _for_one(estimate: Storage) -> Storage:
        return Storage(estimate.hbm, estimate.ddr, estimate.ssd)

    def _of(self, option: ShardingOption, shard: Shard, sharder: Any) -> Storage:
        traffic = _traffic(option, shard, self._topology)
        rows, columns = shard.size
        element = option.tensor.element_size()
        weights = rows * columns * element
        if option.compute_kernel == _DENSE:
            table = weights + 3 * rows * columns * 4
        else:
            rowwise = _ROWWISE_STATES.get(_optimizer_of(sharder), ())
            table = weights + 4 * sum(rows * (1 if each else columns) for each in rowwise)
        id_bytes = _id_bytes(option)
        # Ids as they come and as they are sorted for the update; vectors and their gradients.
        step = 2 * traffic.ids * id_bytes
        step += 2 * traffic.vectors * columns * constants.OUTPUT_BYTES
        if self._topology.compute_device == "cpu":
            return Storage(0, int(table + step))
        if option.compute_kernel == _UVM:
            return Storage(int(step), table)
        if option.compute_kernel == _UVM_CACHING:
            return Storage(int(step + _load_factor(option) * table), table)
        return Storage(int(table + step), 0)
