"""What a table is: its size, name, features, pooling and first values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, unique

from torch import Tensor


@unique
class PoolingType(Enum):
    """How the vectors of one bag become one vector."""

    SUM = "SUM"
    MEAN = "MEAN"


@unique
class DataType(Enum):
    """How a table's numbers are stored.  Training stores FP32; the rest name packaged tables."""

    FP32 = "FP32"
    FP16 = "FP16"
    INT8 = "INT8"
    INT4 = "INT4"


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

    Raises:
        ValueError: a size that is not positive.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Tensor], Tensor | None] | None = None

    def __post_init__(self) -> None:
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
