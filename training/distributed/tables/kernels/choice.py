"""Which implementation holds fused tables: FBGEMM's operator where it can, else our own."""

from __future__ import annotations

from tessera.errors import UserError, refuse_unknown
from tessera.training.distributed.tables.kernels.interfaces import FusedTables, TableGroup
from tessera.training.distributed.tables.kernels.row_sparse import RowSparseTables
from tessera.training.distributed.tables.kernels.tbe import TbeTables
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel
from tessera.training.modules.embedding_configs import DataType
from tessera.training.optim.fused import EmbOptimType, FusedParams

FBGEMM_COLUMNS_MULTIPLE = 4
"""FBGEMM's training tables take rows whose length is a multiple of this."""

_ON_CPU = frozenset(
    {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD}
)
FBGEMM_LOCATIONS = {
    EmbeddingComputeKernel.FUSED: "DEVICE",
    EmbeddingComputeKernel.FUSED_UVM: "MANAGED",
    EmbeddingComputeKernel.FUSED_UVM_CACHING: "MANAGED_CACHING",
}
"""The fused kernels, and FBGEMM's names of where their rows are."""


def fbgemm_serves(group: TableGroup, params: FusedParams) -> bool:
    """Whether FBGEMM's operator does what is asked for on the group's device."""
    if any(table.local_cols % FBGEMM_COLUMNS_MULTIPLE for table in group.tables):
        return False
    kind, device = params.optimizer, group.device
    if kind is EmbOptimType.LION or (device.type == "cpu" and kind not in _ON_CPU):
        return False
    if not params.weight_decay:
        return True
    # FBGEMM takes a weight decay here and ignores it.
    if device.type == "cpu" or kind in {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD}:
        return False
    return kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD or params.weight_decay_mode != "l2"


def build_fused_tables(
    group: TableGroup,
    *,
    params: FusedParams,
    kernel: EmbeddingComputeKernel,
    data_type: DataType,
) -> FusedTables:
    """Return the tables, filled with zeros; rows are FP32, or FP16 where FBGEMM serves.

    Raises:
        UserError: the device cannot do what is asked for.
    """
    on_cpu = group.device.type == "cpu"
    _check(params, kernel, data_type, group.device.type)
    # A vector per id: on a CPU FBGEMM's update takes 2 to 8 times as long as ours
    # (tessera.training.bench.versus_torchrec shows it).
    ours_is_faster = on_cpu and not group.pooled and data_type is DataType.FP32
    if fbgemm_serves(group, params) and not ours_is_faster:
        location = "HOST" if on_cpu else FBGEMM_LOCATIONS[kernel]
        return TbeTables(group, params=params, location=location, data_type=data_type)
    if data_type is not DataType.FP32 or kernel is not EmbeddingComputeKernel.FUSED:
        raise UserError(
            f"data_type {data_type.value}, compute_kernel {kernel.value!r}: tables whose optimizer"
            f" ({params.optimizer.value}), weight decay or row length"
            f" ({group.tables[0].local_cols}) FBGEMM does not serve on {group.device.type} are FP32 and 'fused'"
        )
    return RowSparseTables(group, params)


def _check(
    params: FusedParams, kernel: EmbeddingComputeKernel, data_type: DataType, device: str
) -> None:
    kernels = [known.value for known in FBGEMM_LOCATIONS]
    refuse_unknown("fused tables: compute_kernel", kernel.value, kernels)
    if data_type not in {DataType.FP32, DataType.FP16}:
        raise UserError(f"data_type is {data_type.value}; tables are trained as FP32 or FP16")
    refuse_unknown("fused tables: device", device, ("cpu", "cuda"))
    if device == "cuda":
        return
    if kernel is not EmbeddingComputeKernel.FUSED:
        raise UserError(f"compute_kernel is {kernel.value!r}; it needs a GPU, a CPU has 'fused'")
    for_gpus = [*params.cache_settings, *(["enforce_hbm"] if params.enforce_hbm else [])]
    if for_gpus:
        raise UserError(f"fused_params: {for_gpus[0]} is for GPUs; leave it out on a CPU")
