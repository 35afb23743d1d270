"""Tables in FBGEMM's training operator, which updates them in its backward pass.

What the operator does of itself (1.6 to 1.8), and what is done about it here:

* Weight decay of SGD and Adagrad, and any on a CPU, is ignored: such tables are not built here
  (`tessera.training.distributed.tables.kernels.choice`).
* In mean pooling, gradients of per-sample weights lack the division by the bag's size: the
  caller gives sum pooling weights that were divided before.
* The learning rate of a batch is the one at its forward pass: hyper-parameters come with each
  call.
* Steps of Adam and LAMB are counted by forward passes, those without gradients included: the
  count is held here and put in place before each call.
* The operators exist behind autograd only, so they fail in inference mode: left for the call.
* LAMB and LARS-SGD on a GPU divide by norms that are zero for a row whose gradient is exactly
  zero, and make the row not-a-number; the same optimizers on a CPU are ours and do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.training.distributed.tables.kernels.row_blocks import TableShape
from tessera.training.fbgemm import import_training_tables, root_logger_untouched
from tessera.training.modules.embedding_configs import DataType
from tessera.training.optim.fused import FusedParams
from tessera.training.optim.row_updates import RULES, EmbOptimType, HyperParameters

_IGNORE_DECAY = frozenset({EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD})


class TbeTables:
    """Holds tables in one operator of FBGEMM's.

    Args:
        tables: the tables; features come in their order.
        params: optimizer and storage.
        pooled: pooled bags, else one vector per id.
        mean: mean pooling instead of sum; without per-id weights.
        location: FBGEMM's name of the memory: HOST, DEVICE, MANAGED or MANAGED_CACHING.
        data_type: FP32 or FP16.
        device: where lookups are computed.

    Attributes:
        weights: per table ``[local_rows, local_cols]``; views.
        states: per table its optimizer states, views.
        step: int64 scalar on the CPU, forward passes with gradients so far.
    """

    def __init__(
        self,
        tables: Sequence[TableShape],
        *,
        params: FusedParams,
        pooled: bool,
        mean: bool,
        location: str,
        data_type: DataType,
        device: torch.device,
    ) -> None:
        fbgemm = import_training_tables()
        self._rule = RULES[params.optimizer]
        self._cpu = device.type == "cpu"
        compute = fbgemm.ComputeDevice.CPU if self._cpu else fbgemm.ComputeDevice.CUDA
        place = fbgemm.EmbeddingLocation[location]
        self._caches = location == "MANAGED_CACHING"
        hyper = params.hyper_parameters
        pooling = fbgemm.PoolingMode.MEAN if mean else fbgemm.PoolingMode.SUM
        bounds_check = params.bounds_check_mode or ("fatal" if self._cpu else "warning")
        with root_logger_untouched():
            self._tbe: Any = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
                # FBGEMM's operators want a row in every table, also in a shard that has none.
                [(max(table.local_rows, 1), table.local_cols, place, compute) for table in tables],
                feature_table_map=[
                    index for index, table in enumerate(tables) for _ in range(table.num_features())
                ],
                pooling_mode=pooling if pooled else fbgemm.PoolingMode.NONE,
                optimizer=fbgemm.OptimType(params.optimizer.value),
                weights_precision=fbgemm.SparseType(data_type.value.lower()),
                # A CPU's operators give float32, or fail; the caller casts.
                output_dtype=fbgemm.SparseType("fp32" if self._cpu else params.output_dtype),
                bounds_check_mode=fbgemm.BoundsCheckMode[bounds_check.upper()],
                gradient_clipping=params.clip_to is not None,
                max_gradient=1.0 if params.clip_to is None else params.clip_to,
                learning_rate=hyper.lr,
                eps=hyper.eps,
                weight_decay=hyper.weight_decay,
                weight_decay_mode=(
                    fbgemm.WeightDecayMode.L2 if hyper.l2 else fbgemm.WeightDecayMode.DECOUPLE
                ),
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                momentum=hyper.momentum,
                eta=hyper.eta,
                # Rows in host memory are pinned there and read over the bus; pages do not move.
                uvm_host_mapped=True,
                device=device,
                **_storage(fbgemm, params),
            )
        self._hyper = hyper
        self._ignores_decay = self._cpu or params.optimizer in _IGNORE_DECAY
        self._out_cols = sum(table.num_features() * table.local_cols for table in tables)
        if not pooled:
            self._out_cols = tables[0].local_cols
        self.step = torch.zeros((), dtype=torch.int64)
        rows = [table.local_rows for table in tables]
        self.weights: list[Tensor] = [
            weight[:count]
            for weight, count in zip(self._tbe.split_embedding_weights(), rows, strict=True)
        ]
        self.states: list[list[Tensor]] = [[] for _ in tables]
        if self._rule.rowwise_states:
            self.states = [
                [state[:count] for state in states]
                for states, count in zip(self._tbe.split_optimizer_states(), rows, strict=True)
            ]

    def look_up(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, hyper: HyperParameters
    ) -> Tensor:
        """Look up; the backward pass of the result updates the tables.

        Args:
            ids: ``[N]`` int64 rows, features in the tables' order.
            offsets: ``[F * B + 1]`` int64.
            weights: ``[N]`` float32, factors of the ids' vectors; sum pooling only.
            hyper: of this batch.

        Returns:
            ``[B, sum of D]``, or unpooled ``[N, D]``; on a GPU in ``output_dtype``.

        Raises:
            RuntimeError: FBGEMM's, for an id that is not a row, and for offsets that do not fit.
        """
        if self._too_few_bags(offsets):
            self._count_step()
            empty = torch.zeros(0, self._out_cols, device=ids.device)
            empty.requires_grad_(torch.is_grad_enabled())
            # The gradient must pass by what made the weights: other ranks wait for it.
            return empty if weights is None else empty + weights[:0].sum()
        if hyper is not self._hyper:
            self._push(hyper)
        if self._rule.counts_steps:
            self._put_step()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False), torch.no_grad():
                without_grad: Tensor = self._tbe(ids, offsets, weights)
                return without_grad
        self._count_step()
        vectors: Tensor = self._tbe(ids, offsets, weights)
        return vectors

    def _too_few_bags(self, offsets: Tensor) -> bool:
        """FBGEMM's GPU operators need a bag."""
        return offsets.numel() == 1 and not self._cpu

    def _count_step(self) -> None:
        # A step without bags here is a step: the shards of a table count alike on all ranks.
        if torch.is_grad_enabled() and self._rule.counts_steps:
            self.step += 1

    def _push(self, hyper: HyperParameters) -> None:
        if hyper.weight_decay and self._ignores_decay:
            raise ValueError(
                f"weight_decay is {hyper.weight_decay}, but these tables were built without; give "
                "it in fused_params"
            )
        self._tbe.set_learning_rate(hyper.lr)
        self._tbe.optimizer_args = self._tbe.optimizer_args._replace(
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            momentum=hyper.momentum,
            eta=hyper.eta,
        )
        self._hyper = hyper

    def _put_step(self) -> None:
        step = int(self.step)
        self._tbe.iter_cpu.fill_(step)
        if step == 0:
            # FBGEMM takes a zero there for "see the copy on the device".
            self._tbe.iter.zero_()

    def flush(self) -> None:
        """Write cached rows back, so that `weights` are what was trained."""
        self._tbe.flush()

    def purge(self) -> None:
        """Forget cached rows: `weights` were changed from outside."""
        self._tbe.reset_cache_states()

    def prefetch(
        self,
        ids: Tensor,
        offsets: Tensor,
        forward_stream: torch.cuda.streams.Stream | None,
    ) -> None:
        """Bring rows into the cache ahead of their lookup (``fused_uvm_caching``)."""
        # One prefetch for each lookup that FBGEMM sees: it takes up what was prefetched in turn.
        if self._caches and not self._too_few_bags(offsets):
            self._tbe.prefetch(ids, offsets, forward_stream)


def _storage(fbgemm: Any, params: FusedParams) -> dict[str, Any]:
    """The settings that were given, as FBGEMM's constructor takes them."""
    given = {
        "stochastic_rounding": params.stochastic_rounding,
        "enforce_hbm": params.enforce_hbm,
        "cache_load_factor": params.cache_load_factor,
        "cache_reserved_memory": params.cache_reserved_memory,
        "cache_algorithm": (
            None
            if params.cache_algorithm is None
            else fbgemm.CacheAlgorithm[params.cache_algorithm.upper()]
        ),
        "cache_precision": (
            None if params.cache_precision is None else fbgemm.SparseType(params.cache_precision)
        ),
        "prefetch_pipeline": params.prefetch_pipeline,
    }
    return {name: value for name, value in given.items() if value is not None}
