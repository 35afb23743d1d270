"""What an architecture is built from: its features, with everything about them settled."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from tessera.errors import UserError
from tessera.training.modules.choices import FeatureSide, Hashing, OutOfRange, Pooling
from tessera.training.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

ONE_LABEL = ("label",)
"""The labels of a model that is not told what it predicts."""


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
        labels: the names of what the module predicts, in the order of its logits.
        embedding_init: tables begin uniform in plus and minus this; None: ``sqrt(1 / rows)``.
        device: where the tables live; None: the CPU.
        dense_names: the dense values' names, in the order of their columns; where there are twice as
            many columns, the second half says which values are missing.
        sides: by dense value and sparse feature, whose properties the columns are that it is made of.
    """

    dense_columns: int
    features: tuple[SparseFeature, ...]
    labels: tuple[str, ...] = ONE_LABEL
    embedding_init: float | None = None
    device: torch.device | str | None = None
    dense_names: tuple[str, ...] = ()
    sides: Mapping[str, tuple[FeatureSide | None, ...]] = field(default_factory=dict)

    def feature(self, name: str, setting: str) -> SparseFeature:
        """The sparse feature ``name``, which the config's key ``setting`` gives.

        Raises:
            UserError: there is no such feature; the message says the nearest name.
        """
        for feature in self.features:
            if feature.name == name:
                return feature
        names = [feature.name for feature in self.features]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"{setting} names {name!r}, which is not a sparse feature of the data; give one of"
            f" {', '.join(names)}{hint}"
        )

    def collection(
        self,
        *,
        prefix: str = "",
        dim: int | None = None,
        init: float | None = None,
        without: Collection[str] = (),
        own_weights: bool = False,
    ) -> EmbeddingBagCollection:
        """A fresh pooled collection with the tables of all features, or of all but some.

        Args:
            prefix: what the tables' names begin with; a model's collections need different ones.
            dim: columns of every table; None: each feature's own.
            init: stands for ``embedding_init`` in this collection.
            without: names of features that are left out; at least one must be left.
            own_weights: whether each feature has a table of its own, also where several name the same one
                (their names then end with the feature's), and all bags are summed.
        """
        features = [feature for feature in self.features if feature.name not in without]
        bound = self.embedding_init if init is None else init
        uses = Counter(feature.table for feature in features)
        tables: dict[str, EmbeddingBagConfig] = {}
        for feature in features:
            name = prefix + feature.table
            if own_weights and uses[feature.table] > 1:
                name += "_of_" + feature.name.replace(".", "_")
            mean = feature.pooling == "mean" and not own_weights
            table = tables.setdefault(
                name,
                EmbeddingBagConfig(
                    num_embeddings=feature.rows,
                    embedding_dim=dim or feature.dim,
                    name=name,
                    pooling=PoolingType.MEAN if mean else PoolingType.SUM,
                    weight_init_max=bound,
                    weight_init_min=None if bound is None else -bound,
                ),
            )
            table.feature_names.append(feature.name)
        return EmbeddingBagCollection(
            list(tables.values()),
            is_weighted=any(feature.group == "id_score_list" for feature in features),
            device=self.device,
        )

    def unpooled(self, features: Collection[str]) -> EmbeddingCollection:
        """A fresh collection that gives one vector per id of these features.

        Args:
            features: their names; the tables that they look up must have equally many columns.
        """
        bound = self.embedding_init
        tables: dict[str, EmbeddingConfig] = {}
        for feature in self.features:
            if feature.name in features:
                table = tables.setdefault(
                    feature.table,
                    EmbeddingConfig(
                        num_embeddings=feature.rows,
                        embedding_dim=feature.dim,
                        name=feature.table,
                        weight_init_max=bound,
                        weight_init_min=None if bound is None else -bound,
                    ),
                )
                table.feature_names.append(feature.name)
        return EmbeddingCollection(list(tables.values()), device=self.device)
