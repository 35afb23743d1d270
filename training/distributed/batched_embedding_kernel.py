"""Many tables in one FBGEMM operator, updated in its backward pass.

What FBGEMM's tables do on a CPU (1.8), and what is done about it here:

* Weight decay is accepted and ignored: applied here, before the update.
* In mean pooling, gradients of per-sample weights lack the division by the bag's size: weighted
  means are summed with weights that were divided before.
* The learning rate of a batch is the one at its forward pass: `BatchedFusedEmbeddingBag.forward`
  takes it from the optimizer's groups each time.
* The operators exist behind autograd only, so they fail in inference mode: left for the call.
* An id outside the table ends in a RuntimeError that does not name it: the caller looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.training.distributed.fbgemm import import_training_tables, root_logger_untouched
from tessera.training.modules.embedding_configs import EmbeddingBagConfig
from tessera.training.optim.fused import EmbOptimType, FusedParams

FUSED_ROW_MULTIPLE = 4
"""FBGEMM's training tables take rows whose length is a multiple of this."""


class BatchedFusedEmbeddingBag:
    """Tables of one pooling in one operator.

    Not a module: its one parameter holds all tables back to back; `weights` are the views that
    models and checkpoints know.

    Args:
        tables: the tables; features are taken in the tables' order.
        mean: mean pooling instead of sum.
        is_weighted: whether ids carry weights.
        fused_params: the optimizer.

    Memory: the tables' bytes, and the optimizer's state (one number per row for row-wise
    Adagrad, as much as the tables again for Adagrad, none for SGD).
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        mean: bool,
        is_weighted: bool,
        fused_params: FusedParams,
    ) -> None:
        for table in tables:
            if table.embedding_dim % FUSED_ROW_MULTIPLE:
                raise UserError(
                    f"embedding_dim of table {table.name!r} is {table.embedding_dim}; fused tables"
                    f" take multiples of {FUSED_ROW_MULTIPLE}"
                )
        fbgemm = import_training_tables()
        self.tables = list(tables)
        self._weighted_mean = mean and is_weighted
        pooled_as_mean = mean and not is_weighted
        with root_logger_untouched():
            tbe: Any = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
                [
                    (
                        table.num_embeddings,
                        table.embedding_dim,
                        fbgemm.EmbeddingLocation.HOST,
                        fbgemm.ComputeDevice.CPU,
                    )
                    for table in tables
                ],
                feature_table_map=[
                    index for index, table in enumerate(tables) for _ in table.feature_names
                ],
                pooling_mode=fbgemm.PoolingMode.MEAN if pooled_as_mean else fbgemm.PoolingMode.SUM,
                optimizer=fbgemm.OptimType(fused_params.optimizer.value),
                learning_rate=fused_params.learning_rate,
                eps=fused_params.eps,
                bounds_check_mode=fbgemm.BoundsCheckMode.FATAL,
                device=torch.device("cpu"),
            )
        self._pushed = (fused_params.learning_rate, fused_params.eps)
        self._tbe: Any = tbe
        self.weights: list[Tensor] = tbe.split_embedding_weights()
        # Per table its states, in FBGEMM's order: none for SGD, else the sums of squares.
        self.states: list[list[Tensor]] = [[] for _ in tables]
        if fused_params.optimizer is not EmbOptimType.EXACT_SGD:
            self.states = tbe.split_optimizer_states()

    def set_hyper_parameters(self, learning_rate: float, eps: float) -> None:
        """What the next forward pass and its backward use."""
        if (learning_rate, eps) != self._pushed:
            self._tbe.set_learning_rate(learning_rate)
            self._tbe.update_hyper_parameters({"eps": eps})
            self._pushed = (learning_rate, eps)

    def forward(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, weight_decay: float
    ) -> Tensor:
        """Look up and pool; the backward pass of the result updates the tables.

        Args:
            ids: ``[N]`` int64 rows, features in the tables' order.
            offsets: ``[F * B + 1]`` int64.
            weights: ``[N]`` float32, or None where the tables are not weighted.
            weight_decay: see `FusedParams`.

        Returns:
            ``[B, sum of D over features]`` float32.

        Raises:
            RuntimeError: FBGEMM's, for an id that is not a row, and for offsets that do not fit.
        """
        if self._weighted_mean:
            assert weights is not None
            sizes = offsets[1:] - offsets[:-1]
            weights = weights / torch.repeat_interleave(sizes, sizes)
        pooled = self._pool(ids, offsets, weights)
        if weight_decay and pooled.requires_grad:
            shrink = 1.0 - self._pushed[0] * weight_decay
            pooled.register_hook(lambda _: self._decay(ids, offsets, shrink))  # type: ignore[no-untyped-call] # torch leaves it untyped
        return pooled

    def _pool(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False), torch.no_grad():
                without_grad: Tensor = self._tbe(ids, offsets, weights)
                return without_grad
        pooled: Tensor = self._tbe(ids, offsets, weights)
        return pooled

    @torch.no_grad()
    def _decay(self, ids: Tensor, offsets: Tensor, shrink: float) -> None:
        """Multiply every row that the batch touched by ``shrink``, once."""
        features = sum(table.num_features() for table in self.tables)
        batch_size = (offsets.numel() - 1) // features
        bounds = offsets[:: max(batch_size, 1)].tolist() if batch_size else [0] * (features + 1)
        first = 0
        for table, weight in zip(self.tables, self.weights, strict=True):
            last = first + table.num_features()
            rows = torch.unique(ids[bounds[first] : bounds[last]])
            # .data: autograd would take a change that it sees for an error of the caller's.
            weight.data[rows] *= shrink
            first = last
