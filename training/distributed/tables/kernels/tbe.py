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

from typing import Any

import torch
from torch import Tensor

from tessera.training.distributed.tables.kernels.bags import Bags
from tessera.training.distributed.tables.kernels.interfaces import FusedTables, TableGroup
from tessera.training.fbgemm import import_training_tables, root_logger_untouched
from tessera.training.modules.embedding_configs import DataType
from tessera.training.optim.fused import FusedParams
from tessera.training.optim.row_updates import RULES, EmbOptimType, HyperParameters

_IGNORE_DECAY = frozenset({EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD})


class TbeTables(FusedTables):
    """Holds tables in one operator of FBGEMM's; counts forward passes with gradients as steps.

    ``location`` is FBGEMM's name of the memory: HOST, DEVICE, MANAGED or MANAGED_CACHING.
    """

    def __init__(
        self, group: TableGroup, *, params: FusedParams, location: str, data_type: DataType
    ) -> None:
        tables, device = group.tables, group.device
        fbgemm = import_training_tables()
        self._rule = RULES[params.optimizer]
        self._cpu = device.type == "cpu"
        compute = fbgemm.ComputeDevice.CPU if self._cpu else fbgemm.ComputeDevice.CUDA
        place = fbgemm.EmbeddingLocation[location]
        self._caches = location == "MANAGED_CACHING"
        hyper = params.hyper_parameters
        bounds_check = params.bounds_check_mode or ("fatal" if self._cpu else "warning")
        with root_logger_untouched():
            self._tbe: Any = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
                # FBGEMM's operators want a row in every table, also in a shard that has none.
                [(max(table.local_rows, 1), table.local_cols, place, compute) for table in tables],
                feature_table_map=group.table_of_feature,
                pooling_mode=group.pooling_mode(fbgemm),
                optimizer=fbgemm.OptimType(params.optimizer.value),
                weights_precision=fbgemm.SparseType(data_type.value.lower()),
                # A CPU's operators give float32, or fail; the caller casts.
                output_dtype=fbgemm.SparseType("fp32" if self._cpu else params.output_dtype),
                bounds_check_mode=fbgemm.BoundsCheckMode[bounds_check.upper()],
                gradient_clipping=params.clip_to is not None,
                max_gradient=1.0 if params.clip_to is None else params.clip_to,
                learning_rate=hyper.lr,
                **_numbers(hyper),
                weight_decay_mode=(
                    fbgemm.WeightDecayMode.L2 if hyper.l2 else fbgemm.WeightDecayMode.DECOUPLE
                ),
                # Rows in host memory are pinned there and read over the bus; pages do not move.
                uvm_host_mapped=True,
                device=device,
                **_storage(fbgemm, params),
            )
        self._hyper = hyper
        self._ignores_decay = self._cpu or params.optimizer in _IGNORE_DECAY
        self._out_cols = group.out_cols
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

    def look_up(self, bags: Bags, hyper: HyperParameters) -> Tensor:
        """See `FusedTables`; on a GPU in ``output_dtype``.

        Raises:
            RuntimeError: FBGEMM's, for an id that is not a row, and for offsets that do not fit.
        """
        ids, offsets, weights = bags.ids, bags.offsets, bags.weights
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
        self._tbe.optimizer_args = self._tbe.optimizer_args._replace(**_numbers(hyper))
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

    def prefetch(self, bags: Bags, forward_stream: torch.cuda.Stream | None) -> None:
        """Bring rows into the cache ahead of their lookup (``fused_uvm_caching``)."""
        # One prefetch for each lookup that FBGEMM sees: it takes up what was prefetched in turn.
        if self._caches and not self._too_few_bags(bags.offsets):
            self._tbe.prefetch(bags.ids, bags.offsets, forward_stream)


def _numbers(hyper: HyperParameters) -> dict[str, float]:
    names = ("eps", "weight_decay", "beta1", "beta2", "momentum", "eta")
    return {name: getattr(hyper, name) for name in names}


def _storage(fbgemm: Any, params: FusedParams) -> dict[str, Any]:
    """The settings that were given, as FBGEMM's constructor takes them."""
    made = {
        "stochastic_rounding": bool,
        "enforce_hbm": bool,
        "cache_load_factor": float,
        "cache_reserved_memory": float,
        "cache_algorithm": lambda name: fbgemm.CacheAlgorithm[name.upper()],
        "cache_precision": fbgemm.SparseType,
        "prefetch_pipeline": bool,
    }
    given = {name: getattr(params, name) for name in made}
    return {name: made[name](value) for name, value in given.items() if value is not None}
