"""What estimates of time know of one kind of hardware."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from tessera.errors import refuse_unknown
from tessera.training.distributed.planner.constants import kernel_bw_lookup
from tessera.training.distributed.planner.estimator.annotations import (
    get_bwd_coefficient,
    get_fwd_coefficient,
    get_prefetch_coefficient,
)
from tessera.training.distributed.planner.estimator.coefficients import (
    STRATEGIES,
    EstimatorPerfCoefficients,
    PerfCoefficient,
    PerfCoefficientConfig,
)
from tessera.training.distributed.planner.hardware import Perf, Topology
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel

_BANDWIDTHS = (
    "hbm_mem_bw",
    "ddr_mem_bw",
    "ssd_mem_bw",
    "hbm_to_ddr_mem_bw",
    "intra_host_bw",
    "inter_host_bw",
)
_KERNELS = [kernel.value for kernel in EmbeddingComputeKernel]


class HardwarePerfConfig:
    """What differs on one kind of hardware from what a topology says; a subclass says it.

    The decorators of `tessera.training.distributed.planner.estimator.annotations` set the figures
    and mark methods that compute single parts of a shard's time.

    Attributes:
        name: of the hardware.
        hbm_mem_bw: bytes per second of device memory; also ``ddr_mem_bw`` of host memory, ``ssd_mem_bw``
            of disks, ``hbm_to_ddr_mem_bw`` between device and host memory, ``intra_host_bw`` between
            ranks of one host and ``inter_host_bw`` between hosts; None: the topology's.
        device_bw: bytes per second that lookups read and write, whatever their kernel; None: as
            `kernel_bw_lookup` derives it.
        kernel_device_bandwidths: the same of one kernel, by ``(device, kernel)``; before ``device_bw``.
        bwd_compute_multiplier: time of a backward pass of tables over that of its forward pass, and
            ``weighted_feature_bwd_compute_multiplier``, of one with weighted ids over that of others;
            None: the coefficients', else the topology's.
        supported_types: the only strategies; None: all.
        use_min_dim_for_lookup: rows narrower than 32 columns are read as if they had 32, and
            ``use_block_usage_penalty``: rows narrower than 128 columns take longer per byte; None: of
            tables that are whole or cut by columns, and not where rows are spread.
        use_bytes_for_input_read_size: ids count by their bytes; otherwise each counts 1.
        input_data_type_size: bytes of an id; None: 8.
    """

    name: str = "default"
    hbm_mem_bw: float | None = None
    ddr_mem_bw: float | None = None
    ssd_mem_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None
    device_bw: float | None = None
    kernel_device_bandwidths: Mapping[tuple[str, str], float] = {}
    bwd_compute_multiplier: float | None = None
    weighted_feature_bwd_compute_multiplier: float | None = None
    supported_types: frozenset[str] | None = None
    use_min_dim_for_lookup: bool | None = None
    use_block_usage_penalty: bool | None = None
    use_bytes_for_input_read_size: bool = True
    input_data_type_size: float | None = None

    @cached_property
    def coefficients(self) -> PerfCoefficientConfig:
        """What the class's marked methods return; a subclass may have a value of its own instead."""
        found: dict[str, EstimatorPerfCoefficients] = {}
        for kind in STRATEGIES:
            marked = self._marked_coefficients(kind)
            if marked is not None:
                found[kind] = marked
        return PerfCoefficientConfig(**found, prefetch=get_prefetch_coefficient(self))  # type: ignore[arg-type]

    def _marked_coefficients(self, sharding_type: str) -> EstimatorPerfCoefficients | None:
        forward = get_fwd_coefficient(self, sharding_type)
        backward = get_bwd_coefficient(self, sharding_type)
        if forward is None and backward is None:
            return None
        return EstimatorPerfCoefficients(fwd=forward or PerfCoefficient(), bwd=backward)

    def get_coefficients_for_sharding(
        self, sharding_type: str, compute_kernel: str | None = None
    ) -> EstimatorPerfCoefficients:
        """Return those of marked methods, else of `coefficients`, for a strategy and a kernel."""
        return self._marked_coefficients(sharding_type) or self.coefficients.get_coefficients(
            sharding_type, compute_kernel
        )

    def get_bwd_compute_multiplier(self, ctx_multiplier: float) -> float:
        """The class's own, else the coefficients', else ``ctx_multiplier``, the topology's."""
        own, given = self.bwd_compute_multiplier, self.coefficients.bwd_compute_multiplier
        return next((x for x in (own, given) if x is not None), ctx_multiplier)

    def get_weighted_feature_bwd_compute_multiplier(self, ctx_multiplier: float) -> float:
        """The class's own, else the coefficients', else ``ctx_multiplier``, the topology's."""
        own = self.weighted_feature_bwd_compute_multiplier
        given = self.coefficients.weighted_feature_bwd_compute_multiplier
        return next((x for x in (own, given) if x is not None), ctx_multiplier)

    def is_sharding_type_supported(self, sharding_type: str) -> bool:
        """Whether tables that are cut by this strategy can be estimated."""
        return self.supported_types is None or sharding_type.lower() in self.supported_types

    def validate_sharding_type(self, sharding_type: str) -> None:
        """Refuse a strategy that is not among those of the class.

        Raises:
            ValueError: it is not.
        """
        if not self.is_sharding_type_supported(sharding_type):
            refuse_unknown(
                f"sharding_type (of the hardware {self.name!r})",
                sharding_type.lower(),
                sorted(self.supported_types or ()),
            )

    def post_process_perfs(
        self,
        shard_perfs: list[Perf],
        shard_sizes: list[list[int]],
        sharding_type: str,
        uneven_sharding_perf_multiplier: float = 1.0,
    ) -> list[Perf]:
        """Change the times of a table's shards once all are known; a subclass may.

        Args:
            shard_perfs: of each shard.
            shard_sizes: rows and columns of each.
            sharding_type: the strategy.
            uneven_sharding_perf_multiplier: the topology's.

        Returns:
            The times of each shard; here as they came.
        """
        del shard_sizes, sharding_type, uneven_sharding_perf_multiplier
        return shard_perfs

    def get_device_bw(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        compute_device: str,
        compute_kernel: str,
        hbm_mem_bw: float,
        ddr_mem_bw: float,
        ssd_mem_bw: float,
        hbm_to_ddr_mem_bw: float,
        caching_ratio: float | None = None,
        prefetch_pipeline: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> float:
        """Bytes per second that lookups read and write.

        Args:
            compute_device: ``cuda`` or ``cpu``.
            compute_kernel: see `EmbeddingComputeKernel`.
            hbm_mem_bw: the topology's, for `kernel_bw_lookup`, which is asked where the class has
                nothing for the kernel.
            ddr_mem_bw: the topology's, likewise.
            ssd_mem_bw: the topology's, likewise.
            hbm_to_ddr_mem_bw: the topology's, likewise.
            caching_ratio: cached share of the rows, 0 to 1; None: `constants.UVM_CACHING_RATIO`.
            prefetch_pipeline: a cache is filled ahead, so lookups find all rows in it.

        Raises:
            ValueError: a kernel that the device does not have.
        """
        device, kernel = compute_device.lower(), compute_kernel.lower()
        refuse_unknown("compute_kernel", kernel, _KERNELS)
        if prefetch_pipeline and (device, kernel) == ("cuda", "fused_uvm_caching"):
            kernel = "fused"
        own = self.kernel_device_bandwidths.get((device, kernel), self.device_bw)
        if own is not None:
            return own
        derived = kernel_bw_lookup(
            device,
            kernel,
            hbm_mem_bw,
            ddr_mem_bw,
            hbm_to_ddr_mem_bw,
            caching_ratio,
            prefetch_pipeline,
            ssd_mem_bw,
        )
        if derived is None:
            raise ValueError(
                f"compute_kernel is {compute_kernel!r}, which {compute_device!r} does not have; give "
                "its bandwidth in kernel_device_bandwidths"
            )
        return derived

    def on(self, topology: Topology) -> Topology:
        """The topology with this hardware's figures.

        Raises:
            ValueError: a figure that is not positive.
        """
        given = {name: getattr(self, name) for name in _BANDWIDTHS}
        return topology.with_bandwidths(
            **{name: value for name, value in given.items() if value is not None}
        )
