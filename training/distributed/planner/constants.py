"""What hardware does, as the planner assumes it where a `Topology` is not told otherwise.

Bandwidths are bytes per second, capacities bytes.  "H200" figures were measured on one NVIDIA
H200 (``docs/benchmarks-kernels.md``) or are its data sheet's; "CPU" figures are one socket's share
of an ordinary server and are meant to be replaced by the caller's own:
`tessera.training.distributed.planner.measure.measure_cpu` gives those of this machine.
"""

from __future__ import annotations

from tessera.training.distributed.plan import shard_sizes

MIN_CW_DIM = shard_sizes.MIN_CW_DIM
"""Columns below which a column shard is not cut further."""

GIB = 1024**3

H200_HBM_CAP = 139 * GIB
"""What a process can allocate of an H200's memory."""

H200_HBM_MEM_BW = 4.2e12
"""Reads and writes of device memory together: measured copy, 4.25e12."""

HBM_MEM_BW = H200_HBM_MEM_BW
"""TorchRec's name of it; bytes per second here."""

PCIE_BW = 55e9
"""Host memory to device: what unified memory and its cache move rows with."""

HBM_TO_DDR_MEM_BW = PCIE_BW
"""TorchRec's name of it."""

SSD_MEM_BW = 1e8
"""Random rows of a solid-state disk behind a key-value store, for estimators of such kernels."""

DDR_CAP = 128 * GIB
DDR_MEM_BW = 50e9
"""Host memory, random rows: well below the data sheet's streaming figure."""

NVLINK_BW = 300e9
"""Per GPU and direction in an all-to-all among the GPUs of one host."""

INTER_HOST_BW = 25e9
"""Per GPU and direction between hosts: a 200 Gbit/s card for each."""

CPU_INTRA_HOST_BW = 2e9
"""Between processes of one host over gloo."""

CPU_INTER_HOST_BW = 1e9

BATCH_SIZE = 512
"""Samples per rank and step, where the planner is not told."""

POOLING_FACTOR = 1.0
"""Ids per bag, where the constraints do not say."""

ID_BYTES = 8
BIGINT_DTYPE = ID_BYTES
"""TorchRec's name of it."""
WEIGHT_BYTES = 4
OUTPUT_BYTES = 4

BWD_COMPUTE_MULTIPLIER = 2.0
"""A fused backward pass reads the gradients and reads and writes the rows: about two forwards."""

WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER = 1.0
"""Time of a backward pass of weighted ids over that of ids without weights."""

WEIGHTED_KERNEL_MULTIPLIER = 1.1
"""What the gradients of weights take, over the forward pass's time."""

FULL_BLOCK_EMB_DIM = 128
"""Columns that a warp of FBGEMM's kernels reads at once: 32 threads of 4 numbers each."""

HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY = 1.15, 1.75
"""Time per byte of rows of 64 to 127 columns and of narrower ones, over that of whole warps; TorchRec's."""

DEFAULT_PERF_ESTIMATOR = "default_estimator"
"""The name of the hardware that has the topology's own figures."""

DENSE_PASSES = 8
"""Tables' worth of bytes that a dense kernel's step moves beside the lookups: zeros, gradient, and
Adam's reads and writes."""

CACHE_LOAD_FACTOR = 0.2
"""Rows of a ``fused_uvm_caching`` table that lie in device memory, where it is not told."""

UVM_CACHING_RATIO = CACHE_LOAD_FACTOR
"""TorchRec's name of it."""

CACHE_HIT_RATE_FLOOR = 0.5
"""Lookups that a cache of any size is assumed to serve: ids of real features repeat."""

COLLECTIVE_LATENCY_MS = 0.001
"""A table's share of what a collective costs before its first byte: one carries many tables."""

WAY_MS_ON_CPU = 2.0
"""What a module's step on ranks of CPUs takes for each way in which it cuts tables, however little they hold: every way
has exchanges and lookups of its own.  Measured with two ranks, gloo and four tables of 1,000 rows, 16 samples a rank: the fastest
of 150 steps took 2.2 ms table-wise, 4.6 with column-wise tables beside, 3.6 with row-wise ones, 5.2 with all three (Intel Xeon,
2026-11-27).  Column-wise tables had a sharding of their own then; table-wise ones serve them with theirs since, and these steps take 5
and 11% more than table-wise ones alone where they took 41 and 90% more (the fastest of 400, twice in turns, 2026-12-01)."""

WAY_MS_ON_GPU = 0.5
"""What a module's step on several GPUs is taken to need for each way in which it cuts tables, however little they hold:
a way's lookup, exchanges and backward pass are some hundred calls of the host, for which a GPU with little to do waits.
In a trace of one of two ranks that share an H200 (2,048 samples a rank, 26 tables in three ways, bf16, 2026-12-01) the calls of a way took
2 to 3 ms of the host; the step took 19.7 ms, and 10.5 without the profiler.  With one way the step takes 5.9 ms.  The host's time counts only
as far as the GPU waits for it, so less than half of what remains without the profiler is taken.  Of two plans, one with fewer ways is preferred if its estimate is worse by less
than this for each way that it saves."""

_UVM_SHARE = 0.1
"""A GPU that reads single rows from host memory reaches this share of the bus's bandwidth."""


def kernel_bw_lookup(  # noqa: PLR0917 - the signature TorchRec users know
    compute_device: str,
    compute_kernel: str,
    hbm_mem_bw: float,
    ddr_mem_bw: float,
    hbm_to_ddr_mem_bw: float,
    caching_ratio: float | None = None,
    prefetch_pipeline: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ssd_mem_bw: float = SSD_MEM_BW,
) -> float | None:
    """The bandwidth that the lookups of a kernel reach; the rules are TorchRec's.

    Args:
        compute_device: ``cuda``, ``mtia`` or ``cpu``.
        compute_kernel: see `EmbeddingComputeKernel`.
        hbm_mem_bw: of device memory; all bandwidths are in one unit.
        ddr_mem_bw: of host memory.
        hbm_to_ddr_mem_bw: of the bus between them.
        caching_ratio: cached share of the rows, 0 to 1; None: `UVM_CACHING_RATIO`.
        prefetch_pipeline: the cache is filled ahead, so lookups find all rows in it.
        ssd_mem_bw: of disks.

    Returns:
        The bandwidth in the unit of those given; None: the device does not have the kernel.
    """
    cached = UVM_CACHING_RATIO if caching_ratio is None else caching_ratio
    own = ddr_mem_bw if compute_device == "cpu" else hbm_mem_bw
    if compute_device not in {"cpu", "cuda", "mtia"}:
        return None
    of_any = {"dense": 0.5 * own, "fused": own, "quant": own}
    if compute_kernel in of_any or compute_device != "cuda":
        return of_any.get(compute_kernel)
    if compute_kernel == "fused_uvm_caching" and prefetch_pipeline:
        return own
    behind_cache = (cached * hbm_mem_bw + (1 - cached) * hbm_to_ddr_mem_bw) * _UVM_SHARE
    return {
        "fused_triton": own,
        "fused_uvm": hbm_to_ddr_mem_bw * _UVM_SHARE,
        "fused_uvm_caching": behind_cache,
        "quant_uvm": hbm_to_ddr_mem_bw * _UVM_SHARE,
        "quant_uvm_caching": behind_cache,
        "key_value": ssd_mem_bw,
        "ssd_virtual_table": hbm_to_ddr_mem_bw,
        "dram_virtual_table": hbm_to_ddr_mem_bw,
        "dram_ssd_virtual_table": hbm_to_ddr_mem_bw,
    }.get(compute_kernel)
