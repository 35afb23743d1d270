"""What a table is: its size, name, features, pooling and first values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, unique
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessera.errors import refuse_unknown


@unique
class PoolingType(Enum):
    """How the vectors of one bag become one vector."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"
    """The vectors are not pooled; tables of an unpooled collection."""


@unique
class DataType(Enum):
    """How a table's numbers are stored.

    Plain collections train FP32, FP16 and BF16; quantized ones store FP32, FP16 and INT8 to INT2.
    """

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"


DATA_TYPE_NUM_BITS = {
    DataType.FP32: 32,
    DataType.FP16: 16,
    DataType.BF16: 16,
    DataType.INT64: 64,
    DataType.INT32: 32,
    DataType.INT8: 8,
    DataType.UINT8: 8,
    DataType.INT4: 4,
    DataType.INT2: 2,
}
"""Bits of one number; stored rows of INT8 and fewer have a scale and a bias beside them."""

TRAINED_TYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}


_WHOLE_TABLES_LEAVE_UNSET = (
    "num_embeddings_post_pruning",
    "input_dim",
    "use_virtual_table",
    "virtual_table_eviction_policy",
    "enable_embedding_update",
    "stash_weights",
)


@dataclass
class BaseEmbeddingConfig:
    """One table.

    Attributes:
        num_embeddings: rows.
        embedding_dim: columns.
        name: unique among the tables of a collection.
        data_type: how the numbers are stored.
        feature_names: the features that look rows up here, one or more.
        weight_init_max: upper bound of the uniform first values; None: ``sqrt(1 / rows)``.
        weight_init_min: lower bound; None: ``-sqrt(1 / rows)``.
        init_fn: fills a new table's weights ``[rows, dim]`` in place instead of the uniform
            values.
        need_pos: taken for programs that hand it on, and not looked at, as in TorchRec.
        num_embeddings_post_pruning: rows that are left of a pruned table; None: none was taken away.
        input_dim: of a table whose ids are mapped to rows by a managed collision module.
        total_num_buckets: of a table behind a map of hashed ids; the map has its own number, and rows are
            cut evenly, so it is not looked at.
        use_virtual_table: rows are made when an id is first seen.
        virtual_table_eviction_policy: which rows of a virtual table are given up.
        enable_embedding_update: rows may be written while they are trained.
        stash_weights: rows are kept beside the trained ones.

    Tables here are whole and have a place for each row, so the last seven, but for
    ``total_num_buckets``, may be None or False only; they are there for programs that hand them on.

    Raises:
        ValueError: a size that is not positive, or one of the last seven, but for ``total_num_buckets``, is
            set.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Tensor], Tensor | None] | None = None
    need_pos: bool = False
    _: KW_ONLY
    num_embeddings_post_pruning: int | None = None
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Any = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        if self.num_embeddings_post_pruning == self.num_embeddings:
            self.num_embeddings_post_pruning = None
        for name in _WHOLE_TABLES_LEAVE_UNSET:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ValueError(
                    f"table {self.name!r}: {name} is {value}; tables are whole here and "
                    "have a place for each row, so leave it out"
                )
        for name in ("num_embeddings", "embedding_dim"):
            size = getattr(self, name)
            if size <= 0:
                raise ValueError(f"table {self.name!r}: {name} is {size}; give a positive number")

    def get_weight_init_max(self) -> float:
        """The upper bound of the first values."""
        if self.weight_init_max is None:
            return math.sqrt(1 / self.num_embeddings)
        return self.weight_init_max

    def get_weight_init_min(self) -> float:
        """The lower bound of the first values."""
        if self.weight_init_min is None:
            return -math.sqrt(1 / self.num_embeddings)
        return self.weight_init_min

    def num_features(self) -> int:
        """How many features look rows up here."""
        return len(self.feature_names)

    def init_weights(self, weights: Tensor) -> None:
        """Fill ``weights`` ``[rows, dim]`` in place with first values."""
        if self.init_fn is not None:
            self.init_fn(weights)
        else:
            weights.uniform_(self.get_weight_init_min(), self.get_weight_init_max())


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose looked-up rows are pooled per bag.

    Attributes:
        pooling: sum or mean.
    """

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling is PoolingType.NONE:
            raise ValueError(
                f"table {self.name!r}: pooling is NONE; give SUM or MEAN, or make an "
                "EmbeddingConfig for an EmbeddingCollection"
            )


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table whose looked-up rows are returned as they are, one per id."""


@dataclass
class EmbeddingTableConfig(BaseEmbeddingConfig):
    """A table of any collection, with what its collection says about it.

    Attributes:
        pooling: sum, mean, or none for unpooled collections.
        is_weighted: ids carry weights.
        has_feature_processor: the lookup puts weights on ids before it.
        embedding_names: the output's name of each of ``feature_names``.
    """

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)


class QuantConfig(NamedTuple):
    """What ``torch.ao.quantization.quantize_dynamic`` is told about a collection.

    Attributes:
        activation: makes an observer whose ``dtype`` is the lookup's output type.
        weight: makes an observer whose ``dtype`` is the stored type: ``torch.int8`` (also
            ``quint8``), ``quint4x2``, ``quint2x4``, ``float16`` or ``float32``.
        per_table_weight_dtype: stored types of single tables, by name.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None


_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT64: torch.int64,
    DataType.INT32: torch.int32,
    DataType.INT8: torch.int8,
    DataType.UINT8: torch.uint8,
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
}


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """The torch type of one stored number."""
    return _DTYPES[data_type]


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """The inverse of `data_type_to_dtype`; ``quint8`` and ``qint8`` are UINT8 and INT8 too.

    Raises:
        ValueError: no table is stored so.
    """
    names = {dtype: data_type for data_type, dtype in _DTYPES.items()}
    names |= {torch.quint8: DataType.UINT8, torch.qint8: DataType.INT8}
    refuse_unknown("table: dtype", dtype, names)
    return names[dtype]


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """``sum`` or ``mean``, as ``nn.EmbeddingBag`` spells it.

    Raises:
        ValueError: the vectors are not pooled.
    """
    if pooling_type is PoolingType.NONE:
        raise ValueError("pooling is NONE; only SUM and MEAN have a mode of nn.EmbeddingBag")
    return str(pooling_type.value).lower()
