"""Tables as ordinary parameters, all looked up by one operator of FBGEMM's.

What `DenseTables` does by plain tensor operations costs a GPU many small kernels and, in the
backward pass, a wait for the number of distinct rows.  FBGEMM's dense operator does neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tessera.training.distributed.tables.kernels.bags import Bags
from tessera.training.distributed.tables.kernels.dense import DenseTables
from tessera.training.distributed.tables.kernels.flat_parameter import FlatParameter
from tessera.training.distributed.tables.kernels.interfaces import TableGroup
from tessera.training.fbgemm import import_training_tables, root_logger_untouched

_COLUMNS_MULTIPLE = 4


class DenseTbeTables(DenseTables):
    """Holds `DenseTables` in one operator of FBGEMM's.

    Arguments as for `DenseTables`; float32 rows of a multiple of 4 numbers, at least one row a
    table (`serves`).

    Memory: the backward pass makes a gradient of all tables at once.
    """

    def __init__(self, group: TableGroup, dtype: torch.dtype) -> None:
        super().__init__(replace(group, device=torch.device("meta")), dtype)
        fbgemm = import_training_tables()
        with root_logger_untouched():
            operator: Any = fbgemm.DenseTableBatchedEmbeddingBagsCodegen(
                [(table.local_rows, table.local_cols) for table in group.tables],
                feature_table_map=group.table_of_feature,
                pooling_mode=group.pooling_mode(fbgemm),
                use_cpu=group.device.type == "cpu",
            )
        operator.weights.data.zero_()
        # In a tuple: its parameter and buffers have their names from here.
        self._operator = (operator,)
        self._hold(FlatParameter(operator.weights, operator.split_embedding_weights()))

    @staticmethod
    def serves(group: TableGroup, dtype: torch.dtype) -> bool:
        """Whether this is the better choice: on a GPU, where the operator takes the tables."""
        return (
            group.device.type == "cuda"
            and dtype == torch.float32
            and all(
                table.local_rows > 0 and table.local_cols % _COLUMNS_MULTIPLE == 0
                for table in group.tables
            )
        )

    def forward(self, bags: Bags) -> Tensor:
        """``[B, sum of D]``, or unpooled ``[N, D]``; ids must be rows."""
        if bags.offsets.numel() == 1 or bags.ids.numel() == 0:
            # The operator cannot be started on nothing.  The other ranks wait for the gradients, of
            # the tables and of what made the weights.
            bag_count = (bags.offsets.numel() - 1) // self._by_cols.features
            rows = bag_count if self._group.pooled else bags.ids.numel()
            zeros = torch.zeros(rows, self._group.out_cols, device=bags.ids.device)
            linked = zeros + self.flat[:0].sum()
            return linked if bags.weights is None else linked + bags.weights[:0].sum()
        vectors: Tensor = self._operator[0](bags.ids, bags.offsets, bags.weights)
        return vectors
