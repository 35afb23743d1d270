"""What an estimate of time multiplies the sizes of a lookup with.

The time of a shard's forward lookup is ``(a ids + b rows + c vectors + d height) / bandwidth``: ids
and rows read and vectors written are bytes of a step, the height is the shard's rows.  A kind of
hardware may have coefficients of its own, for instance fitted to measurements, per strategy and per
kernel.  The names and defaults are those of TorchRec's planner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.training.distributed.planner import constants

# Strategies that share the coefficients of another.
_SHARES = {"table_column_wise": "column_wise", "grid_shard": "table_row_wise"}


@dataclass(frozen=True)
class PerfCoefficient:
    """What the sizes of one pass are multiplied with.

    Attributes:
        input_read_size_multiplier: of the bytes of ids.
        lookup_size_multiplier: of the bytes of rows.
        embedding_output_multiplier: of the bytes of vectors.
        hash_size_multiplier: of the number of the shard's rows.
    """

    input_read_size_multiplier: float = 1.0
    lookup_size_multiplier: float = 1.0
    embedding_output_multiplier: float = 1.0
    hash_size_multiplier: float = 0.0

    def of(self, ids: float, rows: float, vectors: float, height: int) -> float:
        """The bytes that count, of bytes of ids, rows and vectors, and a number of rows."""
        return (
            self.input_read_size_multiplier * ids
            + self.lookup_size_multiplier * rows
            + self.embedding_output_multiplier * vectors
            + self.hash_size_multiplier * height
        )


@dataclass(frozen=True)
class EstimatorPerfCoefficients:
    """Holds those of both passes; ``bwd`` None: a backward pass takes a multiple of the forward's time."""

    fwd: PerfCoefficient = field(default_factory=PerfCoefficient)
    bwd: PerfCoefficient | None = None


@dataclass(frozen=True)
class PrefetchCoefficients:
    """Milliseconds of filling a cache ahead.

    Attributes:
        expected_num_lookups_coefficient: per id.
        expected_num_unique_lookups_coefficient: per distinct id.
        expected_size_cache_fetches_coefficient: per number (row times columns) fetched.
    """

    expected_num_lookups_coefficient: float = 0.0
    expected_num_unique_lookups_coefficient: float = 0.0
    expected_size_cache_fetches_coefficient: float = 0.0


@dataclass
class PerfCoefficientConfig:
    """Coefficients by strategy.

    Attributes:
        table_wise, row_wise, table_row_wise, data_parallel, column_wise: of these strategies;
            ``column_wise`` also of ``table_column_wise``, ``table_row_wise`` also of ``grid_shard``.
        by_kernel: of a strategy's one kernel, by ``(strategy, kernel)`` in lower case.
        default: of all others.
        bwd_compute_multiplier: time of a backward pass over that of its forward pass, where there are
            no coefficients for it; None: the topology's.
        weighted_kernel_multiplier: what the gradients of weights take, over the forward pass's time.
        weighted_feature_bwd_compute_multiplier: time of a backward pass of weighted ids over that of
            others; None: the topology's.
        prefetch: of filling caches ahead.
    """

    table_wise: EstimatorPerfCoefficients | None = None
    row_wise: EstimatorPerfCoefficients | None = None
    table_row_wise: EstimatorPerfCoefficients | None = None
    data_parallel: EstimatorPerfCoefficients | None = None
    column_wise: EstimatorPerfCoefficients | None = None
    by_kernel: dict[tuple[str, str], EstimatorPerfCoefficients] = field(default_factory=dict)
    default: EstimatorPerfCoefficients = field(default_factory=EstimatorPerfCoefficients)
    bwd_compute_multiplier: float | None = None
    weighted_kernel_multiplier: float = constants.WEIGHTED_KERNEL_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float | None = None
    prefetch: PrefetchCoefficients | None = None

    def get_coefficients(
        self, sharding_type: str, compute_kernel: str | None = None
    ) -> EstimatorPerfCoefficients:
        """Return those of the kernel, else of the strategy, else the default; case does not matter."""
        kind = sharding_type.lower()
        of_kernel = self.by_kernel.get((kind, (compute_kernel or "").lower()))
        of_type: EstimatorPerfCoefficients | None = None
        if (name := _SHARES.get(kind, kind)) in STRATEGIES:
            of_type = getattr(self, name)
        return of_kernel or of_type or self.default


STRATEGIES = ("table_wise", "row_wise", "table_row_wise", "column_wise", "data_parallel")
"""Strategies that have a field of `PerfCoefficientConfig`."""
