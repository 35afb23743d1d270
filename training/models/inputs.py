"""What an architecture is built from: its features, with everything about them settled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tessera.training.modules.choices import Hashing, OutOfRange, Pooling
from tessera.training.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tessera.training.modules.embedding_modules import EmbeddingBagCollection


@dataclass(frozen=True, kw_only=True)
class SparseFeature:
    """One sparse feature with everything settled; the fields of a package's feature."""

    name: str
    group: Literal["id_list", "id_score_list"]
    table: str
    rows: int
    dim: int
    pooling: Pooling
    hashing: Hashing
    out_of_range: OutOfRange


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What the module of an architecture is given, and what its tables are made of.

    Attributes:
        dense_columns: columns of the dense values, without NaN; at least 1.
        features: the sparse features, in the order of the keys that the module is given.
        embedding_init: tables begin uniform in plus and minus this; None: ``sqrt(1 / rows)``.
        device: where the tables live; None: the CPU.
    """

    dense_columns: int
    features: tuple[SparseFeature, ...]
    embedding_init: float | None = None
    device: torch.device | str | None = None

    def collection(
        self, *, prefix: str = "", dim: int | None = None, init: float | None = None
    ) -> EmbeddingBagCollection:
        """A fresh collection with the tables of all features.

        Args:
            prefix: what the tables' names begin with; a model's collections need different ones.
            dim: columns of every table; None: each feature's own.
            init: stands for ``embedding_init`` in this collection.
        """
        bound = self.embedding_init if init is None else init
        tables: dict[str, EmbeddingBagConfig] = {}
        for feature in self.features:
            table = tables.setdefault(
                feature.table,
                EmbeddingBagConfig(
                    num_embeddings=feature.rows,
                    embedding_dim=dim or feature.dim,
                    name=prefix + feature.table,
                    pooling=PoolingType.MEAN if feature.pooling == "mean" else PoolingType.SUM,
                    weight_init_max=bound,
                    weight_init_min=None if bound is None else -bound,
                ),
            )
            table.feature_names.append(feature.name)
        return EmbeddingBagCollection(
            list(tables.values()),
            is_weighted=any(feature.group == "id_score_list" for feature in self.features),
            device=self.device,
        )
