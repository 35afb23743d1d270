"""Collectives with gradients: each is started at once and awaited when its result is needed.

`transport` moves flat tensors, `request` makes a collective a step of autograd, and the other
files say how each collective's tensors are laid out.
"""

from tessera.training.distributed.comm_ops.all_gather import (
    AllGatherBase_Req,
    AllGatherBase_Wait,
    AllGatherBaseInfo,
    all_gather_base_pooled,
)
from tessera.training.distributed.comm_ops.alltoallv import (
    All2All_Dense_Req,
    All2All_Dense_Wait,
    All2AllDenseInfo,
    All2Allv_Req,
    All2Allv_Wait,
    All2AllVInfo,
    alltoall_dense,
    alltoallv,
)
from tessera.training.distributed.comm_ops.pooled import (
    All2All_Pooled_Req,
    All2All_Pooled_Wait,
    All2AllPooledInfo,
    Variable_Batch_All2All_Pooled_Req,
    Variable_Batch_All2All_Pooled_Wait,
    VariableBatchAll2AllPooledInfo,
    alltoall_pooled,
    variable_batch_alltoall_pooled,
)
from tessera.training.distributed.comm_ops.reduce_scatter import (
    ReduceScatter_Req,
    ReduceScatter_Wait,
    ReduceScatterBase_Req,
    ReduceScatterBase_Wait,
    ReduceScatterBaseInfo,
    ReduceScatterInfo,
    ReduceScatterV_Req,
    ReduceScatterV_Wait,
    ReduceScatterVInfo,
    reduce_scatter_base_pooled,
    reduce_scatter_pooled,
    reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled,
)
from tessera.training.distributed.comm_ops.request import (
    Request,
    get_gradient_division,
    set_gradient_division,
)
from tessera.training.distributed.comm_ops.sequence import (
    All2All_Seq_Req,
    All2All_Seq_Req_Wait,
    All2AllSequenceInfo,
    alltoall_sequence,
)

__all__ = [
    "All2AllDenseInfo",
    "All2AllPooledInfo",
    "All2AllSequenceInfo",
    "All2AllVInfo",
    "All2All_Dense_Req",
    "All2All_Dense_Wait",
    "All2All_Pooled_Req",
    "All2All_Pooled_Wait",
    "All2All_Seq_Req",
    "All2All_Seq_Req_Wait",
    "All2Allv_Req",
    "All2Allv_Wait",
    "AllGatherBaseInfo",
    "AllGatherBase_Req",
    "AllGatherBase_Wait",
    "ReduceScatterBaseInfo",
    "ReduceScatterBase_Req",
    "ReduceScatterBase_Wait",
    "ReduceScatterInfo",
    "ReduceScatterVInfo",
    "ReduceScatterV_Req",
    "ReduceScatterV_Wait",
    "ReduceScatter_Req",
    "ReduceScatter_Wait",
    "Request",
    "VariableBatchAll2AllPooledInfo",
    "Variable_Batch_All2All_Pooled_Req",
    "Variable_Batch_All2All_Pooled_Wait",
    "all_gather_base_pooled",
    "alltoall_dense",
    "alltoall_pooled",
    "alltoall_sequence",
    "alltoallv",
    "get_gradient_division",
    "reduce_scatter_base_pooled",
    "reduce_scatter_pooled",
    "reduce_scatter_v_per_feature_pooled",
    "reduce_scatter_v_pooled",
    "set_gradient_division",
    "variable_batch_alltoall_pooled",
]
