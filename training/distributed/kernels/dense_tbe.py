"""Tables as ordinary parameters, all looked up by one operator of FBGEMM's.

Looked up one after the other (`DenseTables`) twenty small tables cost a GPU twenty small kernels
forward, more backward, and a wait for the ids' bounds.  FBGEMM's dense operator takes them at once
but wants one flat parameter; the tables' parameters here are views of it, and the lookup is a
graph of its own whose gradient is cut into theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tessera.training.distributed.embedding_types import ShardedEmbeddingTable
from tessera.training.distributed.fbgemm import import_training_tables, root_logger_untouched
from tessera.training.distributed.kernels.bags import Bags, BoundsCheck
from tessera.training.distributed.kernels.dense import DenseTables

_COLUMNS_MULTIPLE = 4


class DenseTbeTables(DenseTables):
    """`DenseTables` in one operator.

    Arguments as for `DenseTables`; float32 rows of a multiple of 4 numbers, at least one row a
    table (`serves`).  An id that is no row reads row 0 and prints a warning once, as in fused
    tables on a GPU.

    Memory: the backward pass makes a gradient of all tables at once.
    """

    def __init__(
        self,
        tables: Sequence[ShardedEmbeddingTable],
        *,
        pooled: bool,
        mean: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(tables, pooled=pooled, mean=mean, dtype=dtype, device=torch.device("meta"))
        fbgemm = import_training_tables()
        pooling = fbgemm.PoolingMode.MEAN if mean else fbgemm.PoolingMode.SUM
        with root_logger_untouched():
            operator: Any = fbgemm.DenseTableBatchedEmbeddingBagsCodegen(
                [(table.local_rows, table.local_cols) for table in tables],
                feature_table_map=[
                    index for index, table in enumerate(tables) for _ in table.feature_names
                ],
                pooling_mode=pooling if pooled else fbgemm.PoolingMode.NONE,
                use_cpu=device.type == "cpu",
            )
        operator.weights.data.zero_()
        # In a tuple: its flat parameter is not one of this module's.
        self._held = (operator,)
        self.weights = nn.ParameterList(
            [nn.Parameter(view) for view in operator.split_embedding_weights()]
        )
        self._bounds_check = BoundsCheck(tables, "warning", device)

    @staticmethod
    def serves(
        tables: Sequence[ShardedEmbeddingTable], dtype: torch.dtype, device: torch.device
    ) -> bool:
        """Whether this is the better choice: on a GPU, where the operator takes the tables."""
        return (
            device.type == "cuda"
            and dtype == torch.float32
            and all(
                table.local_rows > 0 and table.local_cols % _COLUMNS_MULTIPLE == 0
                for table in tables
            )
        )

    def forward(self, bags: Bags) -> Tensor:
        """``[B, sum of D]``, or unpooled ``[N, D]``."""
        if bags.offsets.numel() == 1 or bags.ids.numel() == 0:
            return super().forward(bags)  # the operator cannot be started on nothing
        bags = self._bounds_check(bags)
        vectors: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call] # torch leaves it untyped
            self._held[0], bags, bags.weights, *self.weights
        )
        return vectors


class _Lookup(Function):
    """One lookup; the tables' views are arguments so that their gradients have somewhere to go."""

    @staticmethod
    def forward(
        ctx: Any, operator: Any, bags: Bags, id_weights: Tensor | None, *views: Tensor
    ) -> Tensor:
        """``views`` share the memory of the operator's flat parameter."""
        del views
        own_weights = None
        if id_weights is not None:
            own_weights = id_weights.detach().requires_grad_(ctx.needs_input_grad[2])
        with torch.enable_grad():
            vectors: Tensor = operator(bags.ids, bags.offsets, own_weights)
        ctx.graph = (operator, own_weights, vectors)
        return vectors.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """The gradient of all tables, cut into the tables'."""
        operator, own_weights, vectors = ctx.graph
        del ctx.graph
        wanted = [operator.weights]
        if own_weights is not None and own_weights.requires_grad:
            wanted.append(own_weights)
        of_tables, *of_weights = torch.autograd.grad(vectors, wanted, gradient)
        sizes = [rows * columns for rows, columns in operator.embedding_specs]
        parts = [
            part.view(shape)
            for part, shape in zip(
                of_tables.split_with_sizes(sizes), operator.embedding_specs, strict=True
            )
        ]
        return (None, None, of_weights[0] if of_weights else None, *parts)
