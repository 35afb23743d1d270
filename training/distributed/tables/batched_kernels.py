"""The lookups of one rank: a group of shards, fused with their optimizer or dense.

All four classes take a `GroupedEmbeddingConfig` and a `KeyedJaggedTensor` with exactly its
features, in its order, whose ids are rows of the shards.  Legend: F features, B samples, S_f
samples of feature f, W ranks that the samples come from, N ids, D columns.

Pooled: ``[B, sum of D]``.  Where the batch varies per feature, the output is flat: for each of
the W ranks, for each feature, its ``[S_fr, D]`` vectors.  Unpooled: ``[N, D]``.

A mean divides by the number of ids, per-id weights or not.

The fused ones update the rows of a batch in the backward pass.  What FBGEMM's operators serve is
theirs (`tessera.training.distributed.tables.kernels.tbe`), the rest is ours
(`tessera.training.distributed.tables.kernels.row_sparse`).  Tables hold zeros until they are filled:
`split_embedding_weights` gives the live memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.tables.delta_tracker import TouchedRows
from tessera.training.distributed.tables.kernels import bags as kernel_bags
from tessera.training.distributed.tables.kernels.choice import build_fused_tables
from tessera.training.distributed.tables.kernels.dense import DenseTables
from tessera.training.distributed.tables.kernels.dense_tbe import DenseTbeTables
from tessera.training.distributed.tables.kernels.interfaces import TableGroup
from tessera.training.distributed.tables.kernels.optimizer_state import kernel_optimizer
from tessera.training.distributed.tables.kernels.tbe import TbeTables
from tessera.training.distributed.tables.table_shards import (
    GroupedEmbeddingConfig,
)
from tessera.training.modules.embedding_configs import PoolingType
from tessera.training.optim.fused import FusedOptimizer, FusedOptimizerModule, FusedParams
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class Kernel(ABC, nn.Module):
    """Base of the fused and the dense kernels.

    Attributes:
        config: the settings of the shards of the group.
        tables: the shards in the order of their features.
        touched: the rows that were trained since `track`; None: it was not called.
        observers: called after every lookup with the kernel, the features and the looked-up vectors.
    """

    _pooled = True
    # Not registered: state dicts and parameters of a model name tables, not kernels.
    _weights: Sequence[nn.Parameter]
    _bounds_check: kernel_bags.BoundsCheck | None
    _in_fbgemm: TbeTables | None = None  # may have a cache of rows
    _whole_steps = False  # whether a step changes every row
    touched: TouchedRows | None = None

    def __init__(self, config: GroupedEmbeddingConfig, device: torch.device | None) -> None:
        super().__init__()
        self.config = config
        self.tables = config.embedding_tables
        self.observers: list[Callable[[Kernel, KeyedJaggedTensor, Tensor], None]] = []
        device = device or torch.device("cpu")
        self._is_weighted = config.is_weighted or config.has_feature_processor
        mean = self._pooled and config.pooling is PoolingType.MEAN
        self._weighted_mean = mean and self._is_weighted
        self._group = TableGroup(
            tables=self.tables,
            pooled=self._pooled,
            mean=mean and not self._is_weighted,
            device=device,
        )
        lengths = [table.local_cols for table in self.tables]
        if not self._pooled and len(set(lengths)) > 1:
            raise ValueError(
                f"tables {config.table_names()} have different row lengths {lengths}; unpooled ones "
                "of one group have the same"
            )

    def split_embedding_weights(self) -> list[Tensor]:
        """Per shard its live ``[local_rows, local_cols]``."""
        return [weight.detach() for weight in self.parameters_by_table()]

    def named_split_embedding_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same with the tables' names; a name comes once per shard of its table here."""
        return ((name, weight.detach()) for name, weight in self.named_parameters_by_table())

    def parameters_by_table(self) -> Sequence[nn.Parameter]:
        """Return the parameter of each shard.

        Of fused tables it is marked as updated in the backward pass, of dense ones it has its
        gradient when a backward pass is over.
        """
        return self._weights

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the tables' names; a name comes once per shard of its table here."""
        for table, weight in zip(self.tables, self.parameters_by_table(), strict=True):
            yield table.name, weight

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer sees, with the tables' names."""
        yield from self.named_parameters_by_table()

    def named_parameters(
        self, prefix: str = "", *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Called ``<table>.weight``; of dense tables the one that has the gradient of all."""
        del args, kwargs
        dot = "." if prefix else ""
        for name, weight in self._named_parameters():
            yield f"{prefix}{dot}{name}.weight", weight

    def states_by_table(self) -> list[list[Tensor]]:
        """Per shard the live tensors of its fused optimizer, but for the number of steps.

        Dense tables have none.
        """
        return [[] for _ in self.tables]

    def optimizer_states(self) -> list[Tensor]:
        """Return the live tensors of the fused optimizer of all shards."""
        return [state for states in self.states_by_table() for state in states]

    def init_parameters(self) -> None:
        """Give every shard first values: its table's ``init_fn``, or uniform ones in its range."""
        with torch.no_grad():
            for table, weight in zip(self.tables, self.split_embedding_weights(), strict=True):
                table.init_weights(weight)

    def flush(self) -> None:
        """Write cached rows back to the tables; call it before they are read."""
        if self._in_fbgemm is not None:
            self._in_fbgemm.flush()

    def purge(self) -> None:
        """Forget cached rows; call it after tables were written from outside."""
        if self._in_fbgemm is not None:
            self._in_fbgemm.purge()

    def prefetch(
        self,
        features: KeyedJaggedTensor,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Bring the rows of a later batch into the cache, where the tables have one."""
        if self._in_fbgemm is not None:
            self._in_fbgemm.prefetch(self._bags(features), forward_stream)

    def _bags(self, features: KeyedJaggedTensor) -> kernel_bags.Bags:
        return kernel_bags.bags_of(
            features, weighted=self._is_weighted, weighted_mean=self._weighted_mean
        )

    def track(self) -> None:
        """Begin to take note of the rows that are trained."""
        self.touched = TouchedRows(self.tables, self._group.device, whole=self._whole_steps)

    @abstractmethod
    def _look_up(self, bags: kernel_bags.Bags) -> Tensor:
        """``[B, sum of D]`` pooled, ``[N, D]`` not pooled."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Look up the vectors of a batch; see the description of the module.

        On a GPU an id that is not a row is treated as ``bounds_check_mode`` says; in dense tables it
        reads row 0, and a warning is printed once.

        Raises:
            IndexError: on a CPU, an id is not a row of its shard.
            ValueError: the collection is weighted and the features are not.
        """
        bags = self._bags(features)
        try:
            if self._bounds_check is not None:
                bags = self._bounds_check(bags)
            vectors = self._look_up(bags)
        except RuntimeError:
            # Something was refused: look again, slowly, and say what.
            kernel_bags.name_bad_id(self.tables, bags)
            raise
        if self.touched is not None and torch.is_grad_enabled():
            self.touched.note(bags)
        for observer in self.observers:
            observer(self, features, vectors)
        if bags.strides is None or not self._pooled:
            return vectors
        return kernel_bags.unpadded(vectors, bags.strides, self.config.embedding_dims())


class FusedKernel(Kernel, FusedOptimizerModule):
    """Base of the kernels whose backward pass updates the tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: torch.distributed.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, device)
        if sharding_type is ShardingType.DATA_PARALLEL:
            raise ValueError(
                f"tables {config.table_names()} are data parallel and fused; replicas that each "
                "update themselves drift apart: give them the compute kernel 'dense'"
            )
        params = FusedParams.from_dict(config.fused_params or {})
        self._hyper = params.hyper_parameters
        self._output_dtype = kernel_bags.OUTPUT_DTYPES[params.output_dtype]
        self._tables = build_fused_tables(
            self._group, params=params, kernel=config.compute_kernel, data_type=config.data_type
        )
        if isinstance(self._tables, TbeTables):
            self._in_fbgemm = self._tables
        # FBGEMM's operator checks by itself.
        self._bounds_check = (
            None
            if self._in_fbgemm is not None
            else kernel_bags.BoundsCheck(self.tables, params.bounds_check_mode, self._group.device)
        )
        self._weights = [nn.Parameter(weight) for weight in self._tables.weights]
        self._optimizer = kernel_optimizer(
            self.tables,
            weights=self._weights,
            states=self._tables.states,
            step=self._tables.step,
            params=params,
            pg=pg,
        )

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that works in the backward pass; entries are ``<table>.weight``."""
        return self._optimizer

    @property
    def steps(self) -> Tensor:
        """How many steps the optimizer has done, a live int64 number; 0 where it does not count."""
        return self._tables.step

    def states_by_table(self) -> list[list[Tensor]]:
        """Per shard the live tensors of its optimizer, but for the number of steps."""
        return self._tables.states

    def _look_up(self, bags: kernel_bags.Bags) -> Tensor:
        hyper = self._hyper.read(self._optimizer.param_groups[0])
        if hyper is not self._hyper:  # setting an attribute of a module takes its time
            self._hyper = hyper
        vectors = self._tables.look_up(bags, self._hyper)
        return vectors if vectors.dtype is self._output_dtype else vectors.to(self._output_dtype)


class BatchedFusedEmbeddingBag(FusedKernel):
    """Pooled lookups of a group of shards, fused with the optimizer.

    Args:
        config: the shards; ``fused_params`` are those of `FusedParams`.
        pg: the ranks that hold the tables' other shards; None: tables are whole.
        device: CPU (None) or a CUDA device.
        sharding_type: how the tables are cut; anything but data parallel.

    Raises:
        UserError: the device cannot do what is asked for.
        ValueError: a fused parameter makes no sense.
    """


class BatchedFusedEmbedding(FusedKernel):
    """Unpooled lookups of a group of shards, fused with the optimizer.

    Arguments as for `BatchedFusedEmbeddingBag`; all shards have the same row length.
    """

    _pooled = False


class DenseKernel(Kernel):
    """Tables as ordinary parameters, with gradients."""

    _whole_steps = True

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: torch.distributed.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        del pg
        super().__init__(config, device)
        self.sharding_type = sharding_type
        dtype = kernel_bags.STORED_DTYPES[config.data_type]
        in_one = DenseTbeTables.serves(self._group, dtype)
        self._dense = (DenseTbeTables if in_one else DenseTables)(self._group, dtype)
        self._weights = self._dense.weights
        self._bounds_check = kernel_bags.BoundsCheck(self.tables, None, self._group.device)

    def extra_repr(self) -> str:
        """Say in the module's print how the tables are cut."""
        return "" if self.sharding_type is None else f"sharding_type={self.sharding_type.value}"

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        # The one parameter that has the gradient of all.
        yield "/".join(table.name for table in self.tables), self._dense.flat

    def _look_up(self, bags: kernel_bags.Bags) -> Tensor:
        vectors: Tensor = self._dense(bags)
        return vectors


class BatchedDenseEmbeddingBag(DenseKernel):
    """Pooled lookups of a group of shards that an ordinary optimizer trains.

    Args:
        config: the shards.
        pg: taken for symmetry with the fused kernels; gradients are summed by who wraps this.
        device: CPU (None) or a CUDA device.
        sharding_type: how the tables are cut; shown in the module's print.
    """


class BatchedDenseEmbedding(DenseKernel):
    """Unpooled lookups of a group of shards that an ordinary optimizer trains.

    Arguments as for `BatchedDenseEmbeddingBag`; all shards have the same row length.
    """

    _pooled = False
