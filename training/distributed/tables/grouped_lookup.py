"""The lookups of one rank and one sharding: one kernel per group of shards that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.training.distributed.comm.request import get_gradient_division
from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.tables.batched_kernels import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    DenseKernel,
    FusedKernel,
    Kernel,
)
from tessera.training.distributed.tables.interfaces import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
)
from tessera.training.distributed.tables.kernels.bags import OUTPUT_DTYPES, STORED_DTYPES
from tessera.training.distributed.tables.kernels.choice import FBGEMM_LOCATIONS
from tessera.training.distributed.tables.shard_state import load_tables, table_values
from tessera.training.distributed.tables.table_shards import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.modules.embedding_configs import DataType
from tessera.training.optim.fused import FusedParams
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


def output_dtype_of(
    kernel: EmbeddingComputeKernel, data_type: DataType, fused_params: dict[str, Any] | None
) -> torch.dtype:
    """The dtype of the vectors of tables: of fused ones the chosen one, of others the tables' own."""
    if kernel in FBGEMM_LOCATIONS:
        return OUTPUT_DTYPES[FusedParams.from_dict(fused_params or {}).output_dtype]
    return STORED_DTYPES[data_type]


def common_output_dtype(configs: Iterable[GroupedEmbeddingConfig]) -> torch.dtype:
    """A dtype for the vectors of all groups; float32 for none."""
    dtypes = [
        output_dtype_of(config.compute_kernel, config.data_type, config.fused_params)
        for config in configs
    ]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


class CommOpGradientScaling(torch.autograd.Function):
    """The same tensor; its gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, input_tensor: Tensor, scale_gradient_factor: int) -> Tensor:
        """Return ``input_tensor`` unchanged."""
        ctx.scale_gradient_factor = scale_gradient_factor
        return input_tensor.view_as(input_tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return the gradient multiplied by the factor."""
        return grad_output * ctx.scale_gradient_factor, None


def embeddings_cat_empty_rank_handle(
    embeddings: list[Tensor], dummy_embs_tensor: Tensor, dim: int = 0
) -> Tensor:
    """``embeddings`` side by side; of none of them, ``dummy_embs_tensor``."""
    if not embeddings:
        return dummy_embs_tensor
    return embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=dim)


class GroupedLookup(BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]):
    """What pooled and unpooled lookups share: their kernels and their state."""

    _fused: ClassVar[type[FusedKernel]]
    _dense: ClassVar[type[DenseKernel]]

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        *,
        sharding_type: ShardingType | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grouped_configs = grouped_configs
        self._output_dtype = output_dtype or common_output_dtype(grouped_configs)
        self._pg = pg
        self._device = device or torch.device("cpu")
        self._feature_splits = [config.num_features() for config in grouped_configs]
        self._emb_modules = nn.ModuleList(
            (self._fused if config.compute_kernel in FBGEMM_LOCATIONS else self._dense)(
                config, pg=pg, device=self._device, sharding_type=sharding_type
            )
            for config in grouped_configs
        )

    def _nothing(self, shape: tuple[int, ...]) -> Tensor:
        """Return the empty output of a rank without tables."""
        return torch.empty(shape, dtype=self._output_dtype, device=self._device, requires_grad=True)

    def _by_group(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        if len(self._feature_splits) == 1:
            return [features]
        return features.split(self._feature_splits)

    def prefetch(
        self, sparse_features: KeyedJaggedTensor, forward_stream: torch.Stream | None = None
    ) -> None:
        """Bring the rows of a later batch into the caches of the kernels that have one."""
        for kernel, features in zip(self.kernels, self._by_group(sparse_features), strict=True):
            kernel.prefetch(features, cast("torch.cuda.Stream | None", forward_stream))

    @property
    def kernels(self) -> list[Kernel]:
        """Return the kernels, one per group."""
        return cast("list[Kernel]", list(self._emb_modules))

    def table_shards(self) -> Iterator[tuple[ShardedEmbeddingTable, nn.Parameter]]:
        """Each shard with its live values ``[local_rows, local_cols]``."""
        for kernel in self.kernels:
            yield from zip(kernel.tables, kernel.parameters_by_table(), strict=True)

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each shard's values by its table's name; a table with two shards here comes twice."""
        return ((table.name, values) for table, values in self.table_shards())

    def flush(self) -> None:
        """Write cached rows back to the tables; call it before they are read."""
        for kernel in self.kernels:
            kernel.flush()

    def purge(self) -> None:
        """Forget cached rows; call it after the tables were written."""
        for kernel in self.kernels:
            kernel.purge()

    def named_parameters(
        self, prefix: str = "", *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What autograd sees: ``<table>.weight`` per fused shard, one parameter per dense group."""
        del args, kwargs
        for kernel in self.kernels:
            yield from kernel.named_parameters(prefix)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: what the kernels keep beside the tables is not part of a model's state."""
        del args, kwargs
        return iter(())

    def state_dict(  # type: ignore[override] # torch has overloads for positional use
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> dict[str, Any]:
        """The tables with shards here, ``<table>.weight``: `ShardedTensor`s if there is a group."""
        destination = {} if destination is None else destination
        shards = [
            (table, values if keep_vars else values.detach())
            for table, values in self.table_shards()
        ]
        for name, value in table_values(shards, self._pg).items():
            destination[f"{prefix}{name}.weight"] = value
        return destination

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        assign: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Copy tables into the shards here; whole tables or `ShardedTensor`s alike.

        Raises:
            ValueError: a value of another shape, or ``assign``.
        """
        if assign:
            raise ValueError("assign is True; tables are filled in place, so give False")
        values = {name.removesuffix(".weight"): value for name, value in state_dict.items()}
        missing, unexpected = load_tables(list(self.table_shards()), values)
        if strict and (missing or unexpected):
            raise RuntimeError(f"missing tables: {missing}; unexpected ones: {unexpected}")
        return nn.modules.module._IncompatibleKeys(missing, unexpected)  # noqa: SLF001 - what torch's own returns


class GroupedPooledEmbeddingsLookup(GroupedLookup):
    """Looks up groups of shards and pools their vectors.

    Args:
        grouped_configs: the groups; features come in their order.
        device: where the tables live.
        pg: the group that the shards are spread over; None: they are whole tables.
        feature_processor: puts weights on the ids of the groups that say so.
        scale_weight_gradients: whether the gradients of those weights make up for the division
            by the world size that their average over the ranks will do.
        sharding_type: the sharding that this is for.
        output_dtype: of the vectors, the same on all ranks, with tables or without; None: the
            groups'.
    """

    _fused, _dense = BatchedFusedEmbeddingBag, BatchedDenseEmbeddingBag

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        pg: dist.ProcessGroup | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
        *,
        scale_weight_gradients: bool = True,
        sharding_type: ShardingType | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            grouped_configs, pg, device, sharding_type=sharding_type, output_dtype=output_dtype
        )
        # In a tuple: its parameters belong to the collection, not to this module.
        self._processors = () if feature_processor is None else (feature_processor,)
        scaled = scale_weight_gradients and get_gradient_division() and pg is not None
        self._scale_gradient_factor = dist.get_world_size(pg) if scaled else 1

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Look up the vectors of the ids and pool them by bag.

        Args:
            sparse_features: the groups' features in their order, local row numbers.

        Returns:
            ``[B, sum of columns]``; where the batch varies per feature ``[sum of bags x columns]``,
            rank by rank and feature by feature.
        """
        varies = sparse_features.variable_stride_per_key()
        if not self._emb_modules:
            # The gradient must come by here too: the other ranks wait for it.
            shape = (0,) if varies else (sparse_features.stride(), 0)
            nothing = self._nothing(shape)
            return nothing + self._zero() if self._processors else nothing
        embeddings = [
            kernel(self._processed(config, own)).to(self._output_dtype)
            for config, kernel, own in zip(
                self.grouped_configs,
                self._emb_modules,
                self._by_group(sparse_features),
                strict=True,
            )
        ]
        if varies and len(embeddings) > 1:
            return self._rank_by_rank(embeddings, sparse_features.stride_per_key_per_rank())
        return embeddings_cat_empty_rank_handle(embeddings, embeddings[0], dim=1)

    def _rank_by_rank(self, embeddings: list[Tensor], strides_FW: list[list[int]]) -> Tensor:
        """One flat tensor, of one per group: each of them has its features rank by rank."""
        first, parts_GW = 0, []
        for config, flat in zip(self.grouped_configs, embeddings, strict=True):
            own = strides_FW[first : first + config.num_features()]
            first += config.num_features()
            dims = config.embedding_dims()
            sizes = [
                sum(stride * dim for stride, dim in zip(of_rank, dims, strict=True))
                for of_rank in zip(*own, strict=True)
            ]
            parts_GW.append(flat.split_with_sizes(sizes))
        return torch.cat([part for of_rank in zip(*parts_GW, strict=True) for part in of_rank])

    def _processed(
        self, config: GroupedEmbeddingConfig, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        if not config.has_feature_processor or not self._processors:
            return features
        processed: KeyedJaggedTensor = self._processors[0](features)
        weights = processed.weights() + self._zero()
        if self._scale_gradient_factor != 1 and weights.requires_grad:
            weights = CommOpGradientScaling.apply(  # type: ignore[no-untyped-call] # torch leaves it untyped
                weights, self._scale_gradient_factor
            )
        return processed.with_fields(
            processed.values(), weights, processed.lengths_or_none(), processed.offsets_or_none()
        )

    def _zero(self) -> Tensor:
        """A zero that depends on every parameter of the processor.

        Those of features that are not looked up here must get a gradient too: the ranks average
        all of them.
        """
        zeros = [
            parameter.flatten()[:0].sum()
            for processor in self._processors
            for parameter in processor.parameters()
        ]
        return torch.stack(zeros).sum() if zeros else torch.zeros((), device=self._device)


class GroupedEmbeddingsLookup(GroupedLookup):
    """Looks up groups of shards and returns one vector per id.

    Args:
        grouped_configs: the groups; features come in their order.
        pg: the group that the shards are spread over; None: they are whole tables.
        device: where the tables live.
        sharding_type: the sharding that this is for.
        output_dtype: of the vectors, the same on all ranks, with tables or without; None: the
            groups'.
    """

    _fused, _dense = BatchedFusedEmbedding, BatchedDenseEmbedding

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Look up the vectors of the ids.

        Args:
            sparse_features: the groups' features in their order, local row numbers.

        Returns:
            ``[N * D]``: the vectors one after the other, flat.
        """
        if not self._emb_modules:
            return self._nothing((0,))
        embeddings = [
            kernel(features).reshape(-1).to(self._output_dtype)
            for kernel, features in zip(
                self._emb_modules, self._by_group(sparse_features), strict=True
            )
        ]
        return embeddings_cat_empty_rank_handle(embeddings, embeddings[0], dim=0)
