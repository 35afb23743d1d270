"""Milliseconds of one shard, by its strategy, from what a kind of hardware says.

What a rank looks up, computes and sends is said by the strategy itself
(`tessera.training.distributed.sharding.costs`); an evaluator turns it into bytes, and coefficients and
bandwidths turn bytes into time.  Each part of the time may be computed by a marked method of the
hardware's class instead.  A strategy that a program registers is evaluated too, without a class of its
own.  The classes are named as in TorchRec's planner, whose penalties for narrow rows they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.estimator import annotations as marks
from tessera.training.distributed.planner.estimator.coefficients import PerfCoefficient
from tessera.training.distributed.planner.estimator.context import ShardPerfContext
from tessera.training.distributed.planner.estimator.hardware_config import HardwarePerfConfig
from tessera.training.distributed.planner.exchange_times import (
    Exchanged,
    Links,
    exchange_seconds,
)
from tessera.training.distributed.planner.hardware import Perf
from tessera.training.distributed.sharding.costs import Step, Traffic
from tessera.training.distributed.sharding.registry import strategy_of

_MS = 1e3
_MIN_LOOKUP_DIM = 32
_HALF_BLOCK_DIM = 64


def compute_block_usage_penalty(embedding_dim: int) -> float:
    """Time per byte of rows of so many columns, over that of rows that fill a warp's reads."""
    if embedding_dim >= constants.FULL_BLOCK_EMB_DIM:
        return 1.0
    if embedding_dim >= _HALF_BLOCK_DIM:
        return constants.HALF_BLOCK_PENALTY
    return constants.QUARTER_BLOCK_PENALTY


class EmbeddingShardingPerfEvaluator:
    """Times of the shards of one strategy.

    Args:
        sharding_type: the strategy.
        is_inference: there is no backward pass, so its parts are 0.

    Raises:
        ValueError: the strategy is not registered.
    """

    # Whether narrow rows cost more, where the hardware does not say.
    _narrow_rows_cost_more = False

    def __init__(self, sharding_type: str, *, is_inference: bool = False) -> None:
        self.sharding_type = sharding_type
        self._strategy = strategy_of(sharding_type)
        self._is_inference = is_inference

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        """Over how many ranks the rows of a table are spread, and so its ids."""
        table, shard = ctx.hash_size_for_clamping, ctx.hash_size
        return max(1, round(table / shard)) if table and shard else 1

    def get_prefetch_divisor(self, ctx: ShardPerfContext) -> int:
        """Over how many ranks the misses of a table's cache are spread."""
        return self.get_batch_inputs_divisor(ctx)

    def get_batch_inputs(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Ids of a rank's batch that the shard's rank looks up."""
        del config
        return ctx.batch_inputs / self.get_batch_inputs_divisor(ctx)

    def use_min_dim_for_lookup(self, config: HardwarePerfConfig) -> bool:
        """Whether rows narrower than 32 columns are read as if they had 32."""
        own = config.use_min_dim_for_lookup
        return self._narrow_rows_cost_more if own is None else own

    def use_block_usage_penalty(self, config: HardwarePerfConfig) -> bool:
        """Whether rows narrower than 128 columns take longer per byte."""
        own = config.use_block_usage_penalty
        return self._narrow_rows_cost_more if own is None else own

    def compute_perf(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> Perf:
        """All parts of a shard's time."""
        return Perf(
            fwd_compute=self.compute_fwd_comp(ctx, config),
            fwd_comms=self.compute_fwd_comms(ctx, config),
            bwd_compute=self.compute_bwd_comp(ctx, config),
            bwd_comms=self.compute_bwd_comms(ctx, config),
            input_dist_comms=self.compute_input_dist_comms(ctx, config),
            prefetch_compute=self.compute_prefetch_comp(ctx, config),
        )

    def compute_fwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Milliseconds of the lookup."""
        own = marks.get_forward_compute(config, ctx.sharding_type)
        return self._forward(ctx, config) if own is None else float(own(ctx))

    def _forward(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        coefficients = config.get_coefficients_for_sharding(ctx.sharding_type, ctx.compute_kernel)
        penalty = 1.0
        if self.use_block_usage_penalty(config):
            penalty = compute_block_usage_penalty(ctx.emb_dim)
        return self._lookup(ctx, config, coefficients.fwd, is_fwd=True) * penalty

    def _lookup(
        self,
        ctx: ShardPerfContext,
        config: HardwarePerfConfig,
        coefficient: PerfCoefficient,
        *,
        is_fwd: bool,
    ) -> float:
        """Milliseconds of the bytes of one pass."""
        traffic = self._traffic(ctx)
        ids = traffic.ids * (2 if ctx.is_weighted else 1)
        if config.use_bytes_for_input_read_size:
            ids *= ctx.input_data_type_size
        columns = ctx.emb_dim
        if is_fwd and self.use_min_dim_for_lookup(config):
            columns = max(columns, _MIN_LOOKUP_DIM)
        rows = traffic.ids * columns * ctx.table_data_type_size
        write = marks.get_output_write_size(config, ctx.sharding_type)
        if write is not None:
            vectors = float(write(ctx, is_fwd=is_fwd))
        else:
            vectors = traffic.vectors * ctx.emb_dim * self._number_bytes(ctx, is_fwd=is_fwd)
        return coefficient.of(ids, rows, vectors, ctx.hash_size) / ctx.device_bw * _MS

    def _number_bytes(self, ctx: ShardPerfContext, *, is_fwd: bool) -> float:
        """Bytes of a number that a lookup writes, or of its gradient that is read."""
        if self._strategy.replicated:
            return ctx.output_data_type_size
        if self._is_summed(ctx):
            return ctx.fwd_sr_comm_data_type_size if is_fwd else ctx.bwd_sr_comm_data_type_size
        return ctx.fwd_a2a_comm_data_type_size if is_fwd else ctx.bwd_a2a_comm_data_type_size

    def _is_summed(self, ctx: ShardPerfContext) -> bool:
        return ctx.is_pooled and self.get_batch_inputs_divisor(ctx) > 1

    def compute_bwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Milliseconds of the backward pass of the lookup, with the optimizer's step."""
        if self._is_inference:
            return 0.0
        own = marks.get_backward_compute(config, ctx.sharding_type)
        if own is not None:
            return float(own(ctx))
        forward = self._forward(ctx, config)
        given = config.get_coefficients_for_sharding(ctx.sharding_type, ctx.compute_kernel).bwd
        if given is not None:
            backward = self._lookup(ctx, config, given, is_fwd=False)
        else:
            backward = forward * config.get_bwd_compute_multiplier(ctx.bwd_compute_multiplier)
        if ctx.is_weighted:
            backward *= config.get_weighted_feature_bwd_compute_multiplier(
                ctx.weighted_feature_bwd_compute_multiplier
            )
            backward += forward * config.coefficients.weighted_kernel_multiplier
        if self._strategy.replicated:
            # A gradient of every row is written, and every row goes through the optimizer.
            table = ctx.hash_size * ctx.emb_dim * ctx.table_data_type_size
            backward += constants.DENSE_PASSES * table / ctx.device_bw * _MS
        return backward

    def compute_prefetch_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Milliseconds of filling a cache; 0 where there is none, or nothing is known of its ids.

        Raises:
            ValueError: the context asks for `PrefetchCoefficients`, and the hardware has none.
        """
        own = marks.get_prefetch_compute(config)
        if own is not None:
            return float(own(ctx))
        distinct, missed = ctx.cache_stats_expected_lookups, ctx.expected_miss_rate
        if (
            not ctx.is_uvm_caching
            or ctx.caching_ratio is None
            or distinct is None
            or missed is None
        ):
            return 0.0
        looked_up = float(math.ceil(ctx.batch_inputs * ctx.world_size))
        fitted = ctx.use_linear_regression_prefetch_estimate
        if fitted:
            distinct = min(distinct, looked_up, ctx.hash_size_for_clamping)
        fetched = missed * (
            looked_up if ctx.use_batch_inputs_for_expected_cache_fetches else distinct
        )
        ranks = self.get_prefetch_divisor(ctx)
        if not fitted:
            row = ctx.emb_dim * ctx.table_data_type_size
            return fetched / ranks * row / ctx.hbm_to_ddr_mem_bw * _MS
        coefficients = config.coefficients.prefetch
        if coefficients is None:
            raise ValueError(
                f"use_linear_regression_prefetch_estimate is True and the hardware {config.name!r} has "
                "no PrefetchCoefficients; mark a method with @prefetch_coefficient()"
            )
        weighted = 2 if ctx.is_weighted else 1
        return (
            coefficients.expected_num_lookups_coefficient * looked_up * weighted
            + coefficients.expected_num_unique_lookups_coefficient * distinct
            + coefficients.expected_size_cache_fetches_coefficient * fetched * ctx.emb_dim
        ) / ranks

    def compute_input_dist_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Milliseconds of ids on their way."""
        own = marks.get_input_dist_comms(config, ctx.sharding_type)
        return self._comms(ctx)[0] * _MS if own is None else float(own(ctx))

    def compute_fwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Milliseconds of vectors on their way."""
        own = marks.get_fwd_comms(config, ctx.sharding_type)
        return self._comms(ctx)[1] * _MS if own is None else float(own(ctx))

    def compute_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Milliseconds of gradients on their way."""
        if self._is_inference:
            return 0.0
        own = marks.get_bwd_comms(config, ctx.sharding_type)
        return self._comms(ctx)[2] * _MS if own is None else float(own(ctx))

    def _traffic(self, ctx: ShardPerfContext) -> Traffic:
        return self._strategy.traffic(
            Step(
                batch_size=1,
                ranks=ctx.world_size,
                ranks_per_host=ctx.intra_group_size,
                ids_per_sample=ctx.batch_inputs,
                features=ctx.batch_outputs,
                rows_share=1 / self.get_batch_inputs_divisor(ctx),
                is_pooled=ctx.is_pooled,
            )
        )

    def _comms(self, ctx: ShardPerfContext) -> tuple[float, float, float]:
        """Seconds of ids, vectors and gradients."""
        columns = ctx.emb_dim
        return exchange_seconds(
            self._traffic(ctx),
            Links(ctx.comms_bandwidths, ctx.world_size, ctx.local_world_size, ctx.intra_group_size),
            Exchanged(
                id_bytes=ctx.input_data_type_size * (2 if ctx.is_weighted else 1),
                vector_bytes=columns * ctx.fwd_a2a_comm_data_type_size,
                gradient_bytes=columns * ctx.bwd_a2a_comm_data_type_size,
                summed_bytes=columns * ctx.fwd_sr_comm_data_type_size,
                summed_gradient_bytes=columns * ctx.bwd_sr_comm_data_type_size,
                table_bytes=ctx.hash_size * columns * ctx.table_data_type_size,
                is_summed=self._is_summed(ctx),
            ),
        )


class TableWiseEvaluator(EmbeddingShardingPerfEvaluator):
    """Whole tables, or all their rows in some columns: narrow rows cost more."""

    _narrow_rows_cost_more = True

    def __init__(self, sharding_type: str = "table_wise", *, is_inference: bool = False) -> None:
        super().__init__(sharding_type, is_inference=is_inference)


class ColumnWiseEvaluator(TableWiseEvaluator):
    """Columns of tables on several ranks."""

    def __init__(self, sharding_type: str = "column_wise", *, is_inference: bool = False) -> None:
        super().__init__(sharding_type, is_inference=is_inference)


class TableColumnWiseEvaluator(TableWiseEvaluator):
    """Columns of tables on the ranks of one host."""

    def __init__(
        self, sharding_type: str = "table_column_wise", *, is_inference: bool = False
    ) -> None:
        super().__init__(sharding_type, is_inference=is_inference)


class RowWiseEvaluator(EmbeddingShardingPerfEvaluator):
    """Rows on all ranks."""

    def __init__(self, sharding_type: str = "row_wise", *, is_inference: bool = False) -> None:
        super().__init__(sharding_type, is_inference=is_inference)

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        """Return the number of all ranks."""
        return ctx.world_size


class TableRowWiseEvaluator(EmbeddingShardingPerfEvaluator):
    """Rows on the ranks of a host."""

    def __init__(
        self, sharding_type: str = "table_row_wise", *, is_inference: bool = False
    ) -> None:
        super().__init__(sharding_type, is_inference=is_inference)

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        """Return the number of ranks of a host's group."""
        return ctx.intra_group_size


class GridShardEvaluator(TableRowWiseEvaluator):
    """Columns on hosts, the rows of each on the host's ranks."""

    def __init__(self, sharding_type: str = "grid_shard", *, is_inference: bool = False) -> None:
        super().__init__(sharding_type, is_inference=is_inference)


class DataParallelEvaluator(EmbeddingShardingPerfEvaluator):
    """A whole copy on every rank."""

    def __init__(self, sharding_type: str = "data_parallel", *, is_inference: bool = False) -> None:
        super().__init__(sharding_type, is_inference=is_inference)


_CLASSES: tuple[Callable[..., EmbeddingShardingPerfEvaluator], ...] = (
    TableWiseEvaluator,
    RowWiseEvaluator,
    TableRowWiseEvaluator,
    ColumnWiseEvaluator,
    DataParallelEvaluator,
    TableColumnWiseEvaluator,
    GridShardEvaluator,
)


def _by_strategy(*, is_inference: bool) -> dict[str, EmbeddingShardingPerfEvaluator]:
    made = [make(is_inference=is_inference) for make in _CLASSES]
    return {evaluator.sharding_type: evaluator for evaluator in made}


TRAINING_EVALUATORS = _by_strategy(is_inference=False)
"""Evaluators by strategy; a program may put one of its own in the place of another."""
INFERENCE_EVALUATORS = _by_strategy(is_inference=True)
"""The same without a backward pass."""


def get_embedding_perf_sharding_evaluator(
    sharding_type: str,
    is_inference: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
) -> EmbeddingShardingPerfEvaluator:
    """The evaluator of a strategy; one without a class of its own has the general one.

    Args:
        sharding_type: the strategy.
        is_inference: there is no backward pass.

    Raises:
        ValueError: the strategy is not registered.
    """
    known = (INFERENCE_EVALUATORS if is_inference else TRAINING_EVALUATORS).get(sharding_type)
    return known or EmbeddingShardingPerfEvaluator(sharding_type, is_inference=is_inference)
