"""Quantized lookups of a sharded collection: the tables of one device, and of all of them.

Legend: ``W`` devices, ``B`` samples, ``N`` ids, ``D`` columns.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from tessera.training.distributed.comm.environment import rank_device
from tessera.training.distributed.tables.interfaces import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
)
from tessera.training.distributed.tables.table_shards import GroupedEmbeddingConfig
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.quant.lookup import QuantizedRows, RowsOf
from tessera.training.quant.rows import DEFAULT_ROW_ALIGNMENT
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

OUTPUT_DTYPE, ROW_ALIGNMENT = "output_dtype", "row_alignment"
"""What ``fused_params`` of a quantized lookup may hold."""


class _MetaInferLookup(BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]):
    """The tables of one device in one operator.

    Args:
        grouped_configs: the shards that the device holds.
        device: where; None: the CPU.
        feature_processor: puts weights on the ids before they are looked up.
        fused_params: ``output_dtype`` (a torch dtype, float32 by default) and ``row_alignment``
            (bytes).

    Raises:
        ValueError: a setting that is not known.
    """

    _pooled: ClassVar[bool]

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._feature_processor = feature_processor
        settings = dict(fused_params or {})
        self._output_dtype = settings.pop(OUTPUT_DTYPE, torch.float32)
        row_alignment = settings.pop(ROW_ALIGNMENT, DEFAULT_ROW_ALIGNMENT)
        if settings:
            raise ValueError(
                f"fused_params holds {min(settings)!r}; quantized lookups know "
                f"{OUTPUT_DTYPE} and {ROW_ALIGNMENT}"
            )
        self.grouped_configs = grouped_configs
        self._is_weighted = any(config.is_weighted for config in grouped_configs)
        shards = [table for config in grouped_configs for table in config.embedding_tables]
        self.rows = QuantizedRows(
            [
                RowsOf(t.name, t.local_rows, t.local_cols, t.data_type, t.num_features())
                for t in shards
            ],
            pooled=self._pooled,
            output_dtype=self._output_dtype,
            device=device or torch.device("cpu"),
            row_alignment=row_alignment,
        )
        self._empty = not shards

    def get_tbes_to_register(self) -> dict[QuantizedRows, list[GroupedEmbeddingConfig]]:
        """The one operator of this device, and the shards that it serves."""
        return {} if self._empty else {self.rows: self.grouped_configs}

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Look up this device's features, in its shards' order; ids are its rows, or -1 for none.

        Vectors are ``[B, sum of local columns]`` pooled, ``[N, local columns]`` not pooled.
        """
        if self._empty:
            lengths = sparse_features.lengths()
            return lengths.new_zeros((0, 0), dtype=self._output_dtype)
        if self._feature_processor is not None:
            sparse_features = self._feature_processor(sparse_features)
        ids, offsets = self.rows.checked(
            sparse_features.values().long(), sparse_features.offsets().long()
        )
        weights = sparse_features.weights() if self._is_weighted else None
        return self.rows.forward(ids, offsets, weights)


class MetaInferGroupedPooledEmbeddingsLookup(_MetaInferLookup):
    """The pooled lookups of one device."""

    _pooled = True


class MetaInferGroupedEmbeddingsLookup(_MetaInferLookup):
    """The unpooled lookups of one device; its arguments are the pooled one's."""

    _pooled = False

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(grouped_configs, device, fused_params=fused_params)


class InferGroupedLookupMixin(BaseEmbeddingLookup[KJTList, list[Tensor]]):
    """The lookups of all devices, each over its shards; see `_MetaInferLookup`.

    Their tables are buffers of the sharded collection, not of this module: its state is empty.
    """

    _of_one_device: ClassVar[
        type[MetaInferGroupedPooledEmbeddingsLookup | MetaInferGroupedEmbeddingsLookup]
    ]

    def __init__(
        self,
        grouped_configs_per_rank: list[list[GroupedEmbeddingConfig]],
        world_size: int,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._embedding_lookups_per_rank = nn.ModuleList(
            self._of_one_device(
                grouped_configs_per_rank[rank], _device(device, rank), fused_params=fused_params
            )
            for rank in range(world_size)
        )

    def lookups(self) -> list[_MetaInferLookup]:
        """One per device."""
        return cast("list[_MetaInferLookup]", list(self._embedding_lookups_per_rank))

    def get_tbes_to_register(self) -> dict[QuantizedRows, list[GroupedEmbeddingConfig]]:
        """The operators of all devices, and the shards that each serves."""
        of_devices = [lookup.get_tbes_to_register() for lookup in self.lookups()]
        return {rows: configs for own in of_devices for rows, configs in own.items()}

    def forward(self, sparse_features: KJTList) -> list[Tensor]:
        """Look up each device's features there; see `_MetaInferLookup.forward`."""
        return [
            lookup(sparse_features[rank])
            for rank, lookup in enumerate(self._embedding_lookups_per_rank)
        ]


class InferGroupedPooledEmbeddingsLookup(InferGroupedLookupMixin):
    """The pooled lookups of all devices."""

    _of_one_device = MetaInferGroupedPooledEmbeddingsLookup


class InferGroupedEmbeddingsLookup(InferGroupedLookupMixin):
    """The unpooled lookups of all devices."""

    _of_one_device = MetaInferGroupedEmbeddingsLookup


def _device(device: torch.device | None, rank: int) -> torch.device:
    kind = "cpu" if device is None else device.type
    return torch.device("meta") if kind == "meta" else rank_device(kind, rank)


def fx_wrap_tensor_view2d(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """``x`` as ``[dim0, dim1]``, one step of a traced graph where the sizes are traced."""
    return x.view(dim0, dim1)


torch.fx.wrap("fx_wrap_tensor_view2d")
