"""The names of ``torchrec.distributed.comm_ops``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.comm.alltoall_pooled import (
    All2AllPooledInfo as All2AllPooledInfo, All2All_Pooled_Req as All2All_Pooled_Req,
    All2All_Pooled_Wait as All2All_Pooled_Wait,
    VariableBatchAll2AllPooledInfo as VariableBatchAll2AllPooledInfo,
    Variable_Batch_All2All_Pooled_Req as Variable_Batch_All2All_Pooled_Req,
    Variable_Batch_All2All_Pooled_Wait as Variable_Batch_All2All_Pooled_Wait,
    alltoall_pooled as alltoall_pooled,
    variable_batch_alltoall_pooled as variable_batch_alltoall_pooled,
)
from tessera.training.distributed.comm.alltoall_sequence import (
    All2AllSequenceInfo as All2AllSequenceInfo, All2All_Seq_Req as All2All_Seq_Req,
    All2All_Seq_Req_Wait as All2All_Seq_Req_Wait, alltoall_sequence as alltoall_sequence,
)
from tessera.training.distributed.comm.alltoallv import (
    All2AllDenseInfo as All2AllDenseInfo, All2AllVInfo as All2AllVInfo,
    All2All_Dense_Req as All2All_Dense_Req, All2All_Dense_Wait as All2All_Dense_Wait,
    All2Allv_Req as All2Allv_Req, All2Allv_Wait as All2Allv_Wait, alltoall_dense as alltoall_dense,
    alltoallv as alltoallv,
)
from tessera.training.distributed.comm.reduce_scatter import (
    AllGatherBaseInfo as AllGatherBaseInfo, AllGatherBase_Req as AllGatherBase_Req,
    AllGatherBase_Wait as AllGatherBase_Wait, all_gather_base_pooled as all_gather_base_pooled,
    ReduceScatterBaseInfo as ReduceScatterBaseInfo, ReduceScatterBase_Req as ReduceScatterBase_Req,
    ReduceScatterBase_Wait as ReduceScatterBase_Wait, ReduceScatterInfo as ReduceScatterInfo,
    ReduceScatterVInfo as ReduceScatterVInfo, ReduceScatterV_Req as ReduceScatterV_Req,
    ReduceScatterV_Wait as ReduceScatterV_Wait, ReduceScatter_Req as ReduceScatter_Req,
    ReduceScatter_Wait as ReduceScatter_Wait,
    reduce_scatter_base_pooled as reduce_scatter_base_pooled,
    reduce_scatter_pooled as reduce_scatter_pooled,
    reduce_scatter_v_per_feature_pooled as reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled as reduce_scatter_v_pooled,
)
from tessera.training.distributed.comm.request import (
    Request as Request, get_gradient_division as get_gradient_division,
    set_gradient_division as set_gradient_division,
)
