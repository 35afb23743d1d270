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

PCIE_BW = 55e9
"""Host memory to device: what unified memory and its cache move rows with."""

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
