"""The tables of a quantized collection, and the names under which they are buffers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from tessera.errors import UserError
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection as FloatBags
from tessera.training.modules.embedding_modules import EmbeddingCollection as FloatCollection
from tessera.training.modules.tables import check_features, check_tables
from tessera.training.quant.lookup import QuantizedRows, RowsOf, StoredPart, ids_are_rows
from tessera.training.quant.rows import store_quantized, store_rows, stored_data_type
from tessera.training.sparse import selection
from tessera.training.sparse.checks import check_id_dtype
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

QuantizedWeights = dict[str, tuple[Tensor, Tensor | None]]
"""Numbers and scales of each table, as `tessera.training.quant.rows.quantize_rows` gives them."""


Config = TypeVar("Config", bound=BaseEmbeddingConfig)


class StoredCollection(nn.Module, Generic[Config]):
    """Base of the quantized collections; its arguments are theirs.

    Attributes:
        configs: ``tables``.
        holder: the name of the sub-module that holds the tables' buffers.
        pooled: whether the vectors of a bag are added up.
        weighted: whether ids' vectors are multiplied by the ids' weights.
        rows: what is stored.

    Raises:
        ValueError: the tables do not make a collection, or are not stored so.
    """

    holder: ClassVar[str]
    pooled: ClassVar[bool]

    def __init__(
        self,
        tables: Sequence[Config],
        *,
        weighted: bool,
        output_dtype: torch.dtype,
        device: torch.device | str,
        weights: QuantizedWeights | None,
        row_alignment: int,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self.configs = list(tables)
        self.weighted = weighted
        self._feature_names = [name for table in tables for name in table.feature_names]
        self.rows = QuantizedRows(
            [
                RowsOf(t.name, t.num_embeddings, t.embedding_dim, t.data_type, len(t.feature_names))
                for t in tables
            ],
            pooled=self.pooled,
            output_dtype=output_dtype,
            device=device,
            row_alignment=row_alignment,
        )
        self.add_module(self.holder, nn.ModuleDict({table.name: nn.Module() for table in tables}))
        self._name_buffers()
        if weights is not None:
            for part, rows in zip(self.rows.parts(), self.rows.tables(), strict=True):
                store_quantized(*weights[part.name], rows)

    @classmethod
    def from_float(
        cls,
        module: FloatBags | FloatCollection,
        use_precomputed_fake_quant: bool = False,  # noqa: FBT001, FBT002 - torch calls it so
    ) -> Self:
        """Quantize a trained collection as its ``qconfig`` says; tables have no fake quantization.

        Raises:
            UserError: there is no ``qconfig``, or a type that is not stored.
        """
        del use_precomputed_fake_quant
        # torch.ao.quantization.quantize_dynamic has put it there, a QuantConfig or torch's own.
        qconfig: Any = getattr(module, "qconfig", None)
        if qconfig is None:
            raise UserError(
                f"{type(module).__name__} has no qconfig; quantize it with "
                "torch.ao.quantization.quantize_dynamic, or give it one (QuantConfig)"
            )
        single = getattr(qconfig, "per_table_weight_dtype", None) or {}
        dtype = qconfig.weight().dtype
        tables: Sequence[BaseEmbeddingConfig] = (
            module.embedding_bag_configs()
            if isinstance(module, FloatBags)
            else module.embedding_configs()
        )
        stored = [
            replace(table, data_type=stored_data_type(single.get(table.name, dtype)))
            for table in tables
        ]
        quantized: Self = cls._like(module, stored, qconfig.activation().dtype)
        quantized.store(
            {
                table.name: module.get_parameter(f"{cls.holder}.{table.name}.weight")
                for table in tables
            }
        )
        return quantized

    @classmethod
    @abstractmethod
    def _like(cls, module: Any, tables: list[Any], output_dtype: torch.dtype) -> Any:
        """A collection of ``tables``, in all else as the trained ``module``; its rows are zeros."""

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    def _name_buffers(self) -> None:
        tables = self.get_submodule(self.holder)
        for part, rows in zip(self.rows.parts(), self.rows.tables(), strict=True):
            tables.get_submodule(part.name).register_buffer("weight", rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        # All tables are one tensor: it is moved once, and the buffers become its parts again.
        self.rows.apply(fn)
        self._name_buffers()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._name_buffers()
        return self

    def store(self, weights: dict[str, Tensor]) -> None:
        """Quantize each table's float weights ``[rows, dim]`` into its buffer."""
        for part, rows in zip(self.rows.parts(), self.rows.tables(), strict=True):
            if not weights[part.name].is_meta and not rows.is_meta:
                store_rows(weights[part.name], part.data_type, rows)

    def blocks(self) -> list[StoredPart]:
        """What is stored, each table whole."""
        return [
            StoredPart(table=part.name, device=0, row=0, column=0, columns=part.dim, rows=rows)
            for part, rows in zip(self.rows.parts(), self.rows.tables(), strict=True)
        ]

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return self.rows.device

    def output_dtype(self) -> torch.dtype:
        """The type of the looked-up vectors."""
        return self.rows.output_dtype

    def looked_up(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
        """The tables' features in their order, and what the operator gives for them.

        Ids on the CPU that are not rows raise an error; elsewhere, and in a traced graph, row 0
        takes their place.  -1 is not an id, and has no vector.
        """
        if isinstance(features, KeyedJaggedTensor):
            refuse_varying(features)
        own = selection.select_features(features, self._feature_names)
        ids, offsets = own.values().long(), own.offsets().long()
        if isinstance(ids, Tensor) and ids.device.type == "cpu":
            refuse_wrong_ids(own, self.rows.row_counts, self.configs)
        else:
            ids, offsets = self.rows.checked(ids, offsets)
        return own, self.rows.forward(ids, offsets, own.weights() if self.weighted else None)


def refuse_wrong_ids(
    own: KeyedJaggedTensor, row_counts: Tensor, tables: Sequence[BaseEmbeddingConfig]
) -> None:
    """Refuse ids on the CPU that are not rows; -1 is not an id, and has no vector.

    Raises:
        IndexError: naming feature, id and table.
        ValueError: the values are not int32 or int64.
    """
    check_id_dtype(own.values())
    own.check_fields()
    if not ids_are_rows(row_counts, own.values().long(), own.offsets().long()):
        # Look again, slowly, and say what.
        check_features(own, tables)
        raise ValueError("the features' offsets do not fit their values")


def refuse_varying(features: KeyedJaggedTensor) -> None:
    """Raise a ValueError for a batch that varies per key: lookups take ``B`` bags of each."""
    if features.variable_stride_per_key():
        raise ValueError(
            f"the features have different numbers of bags, {features.stride_per_key()}; quantized "
            "lookups take as many of each"
        )
