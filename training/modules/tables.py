"""What all collections of tables share: names, checks of tables and ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.modules.embedding_configs import (
    TRAINED_TYPES,
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from tessera.training.sparse.checks import check_id_dtype, values_are_unknown
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Out = TypeVar("Out")


class EmbeddingBagCollectionInterface(ABC, nn.Module):
    """Pooled lookups of several tables: a keyed jagged tensor in, a keyed tensor out."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool."""

    @abstractmethod
    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The settings of every table, in the collection's order."""

    @abstractmethod
    def is_weighted(self) -> bool:
        """Whether ids carry weights."""


class _TablesAlike(ABC):
    """What follows from the tables of an unpooled collection."""

    @abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The settings of every table, in the collection's order."""

    def embedding_dim(self) -> int:
        """Columns of every table."""
        return self.embedding_configs()[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """The output's names of each table's features."""
        return get_embedding_names_by_table(self.embedding_configs())


class EmbeddingCollectionInterface(_TablesAlike, nn.Module):
    """Unpooled lookups of several tables: one vector per id, by feature."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up."""

    @abstractmethod
    def need_indices(self) -> bool:
        """Whether the output carries the ids, as weights."""


class DescribesPooled:
    """What a pooled collection says of itself: plain, sharded or quantized.

    Attributes:
        configs: the settings of every table, in the collection's order.
        weighted: whether ids carry weights.
    """

    if TYPE_CHECKING:  # TorchScript would read them, and cannot while they are postponed
        configs: list[EmbeddingBagConfig]
        weighted: bool

    # TorchRec's fields, which programs read; TorchScript compiles the methods instead.
    __jit_unused_properties__: ClassVar[list[str]] = [
        "device",
        "_embedding_bag_configs",
        "_is_weighted",
        "_lengths_per_embedding",
    ]

    @property
    def _embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.configs

    @property
    def _is_weighted(self) -> bool:
        return self.weighted

    @property
    def _lengths_per_embedding(self) -> list[int]:
        return [table.embedding_dim for table in self.configs for _ in table.feature_names]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The settings of every table, in the collection's order."""
        return self.configs

    def embedding_names(self) -> list[str]:
        """The output's keys, in order."""
        return embedding_names(self.configs)

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self.weighted


class DescribesUnpooled(_TablesAlike):
    """What an unpooled collection says of itself: plain, sharded or quantized.

    Attributes:
        configs: the settings of every table, in the collection's order.
    """

    if TYPE_CHECKING:  # as in `DescribesPooled`
        configs: list[EmbeddingConfig]
        _need_indices: bool

    # As in `DescribesPooled`.
    __jit_unused_properties__: ClassVar[list[str]] = [
        "device",
        "_embedding_configs",
        "_embedding_dim",
    ]

    @property
    def _embedding_configs(self) -> list[EmbeddingConfig]:
        return self.configs

    @property
    def _embedding_dim(self) -> int:
        return self.embedding_dim()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The settings of every table, in the collection's order."""
        return self.configs

    def need_indices(self) -> bool:
        """Whether the output carries the ids, as weights."""
        return self._need_indices


def get_embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """The output's names of each table's features.

    A feature's vector is called like the feature; a feature that several tables serve has one
    vector from each, called ``feature@table``.
    """
    served = [feature for table in tables for feature in table.feature_names]
    shared = {feature for feature in served if served.count(feature) > 1}
    return [
        [
            f"{feature}@{table.name}" if feature in shared else feature
            for feature in table.feature_names
        ]
        for table in tables
    ]


def embedding_names(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    """The names of `get_embedding_names_by_table` in one list, tables in order."""
    return [name for names in get_embedding_names_by_table(tables) for name in names]


def flat_names(names_by_table: Sequence[Sequence[str]]) -> tuple[list[str], bool]:
    """The features of all tables in order, and whether one stands there twice."""
    flat = [name for names in names_by_table for name in names]
    return flat, len(set(flat)) < len(flat)


def check_tables(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Check the tables of one collection.

    Raises:
        UserError: a name is missing or given twice, or a table serves no feature.
    """
    seen: set[str] = set()
    for table in tables:
        if not table.name or "." in table.name:
            raise UserError(
                f"table name {table.name!r}: give a name without a dot (it becomes a part of the "
                "parameter's name)"
            )
        if hasattr(nn.ModuleDict(), table.name):
            raise UserError(
                f"table name {table.name!r} is a word that torch's modules use themselves; give "
                "another, such as one that ends in _table"
            )
        if table.name in seen:
            raise UserError(f"two tables are called {table.name!r}; names are unique")
        seen.add(table.name)
        if not table.feature_names:
            raise UserError(f"table {table.name!r} has no feature_names; give at least one")
        if len(set(table.feature_names)) != len(table.feature_names):
            raise UserError(f"table {table.name!r} lists a feature twice: {table.feature_names}")


def common_dim(tables: Sequence[BaseEmbeddingConfig]) -> int:
    """The number of columns that all tables of an unpooled collection have.

    Raises:
        UserError: they differ, or there is no table.
    """
    dims = {table.embedding_dim for table in tables}
    if len(dims) != 1:
        raise UserError(
            f"the tables' embedding_dim are {sorted(dims)}; all tables of an "
            "EmbeddingCollection have the same (make one collection for each)"
        )
    return dims.pop()


def trained_dtype(table: BaseEmbeddingConfig) -> torch.dtype:
    """The type of a trained table's numbers.

    Raises:
        UserError: a type that only quantized collections store.
    """
    if table.data_type not in TRAINED_TYPES:
        names = ", ".join(kind.value for kind in TRAINED_TYPES)
        raise UserError(
            f"table {table.name!r}: data_type is {table.data_type.value}; tables are trained as "
            f"{names}, and quantized to something else afterwards"
        )
    return TRAINED_TYPES[table.data_type]


def check_ids(feature: str, table: BaseEmbeddingConfig, ids: Tensor) -> None:
    """Refuse ids that are not rows of ``table``.  One pass over ``ids`` ``[N]``.

    Raises:
        IndexError: naming feature, id, table and its rows.
    """
    if ids.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or highest >= table.num_embeddings:
        raise IndexError(
            f"feature {feature!r} has id {lowest if lowest < 0 else highest}, but table "
            f"{table.name!r} has rows 0 to {table.num_embeddings - 1}; hash or clamp ids first "
            "(tessera.training.modules.hashing)"
        )


def check_features(features: KeyedJaggedTensor, tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Refuse ids on the CPU that are not rows of the tables that serve them.

    Traced features and features on an accelerator pass: their values cannot be looked at, or
    not without a wait.  Of features that are exported or compiled, only the names are looked at.

    Raises:
        IndexError: an id is not a row of its table.
        KeyError: a feature is missing.
        ValueError: the values are not int32 or int64.
    """
    check_feature_names(features, tables)
    values = features.values()
    if not isinstance(values, Tensor) or values.device.type != "cpu" or values_are_unknown():
        return
    places, bounds = features.index_per_key(), features.offset_per_key()
    for table in tables:
        for key in table.feature_names:
            place = places[key]
            check_ids(key, table, values[bounds[place] : bounds[place + 1]])


def looked_up(
    look_up: Callable[[KeyedJaggedTensor], Out],
    features: KeyedJaggedTensor,
    tables: Sequence[BaseEmbeddingConfig],
) -> Out:
    """What ``look_up`` gives; where torch refuses an id on the CPU, the ids are looked at again to name it.

    Raises:
        IndexError: an id is not a row of its table.
        KeyError: a feature is missing.
        ValueError: the values are not int32 or int64.
    """
    check_feature_names(features, tables)
    if values_are_unknown(features, features.values()):
        return look_up(features)
    try:
        return look_up(features)
    except (IndexError, RuntimeError):
        check_features(features, tables)
        raise


def check_feature_names(features: KeyedJaggedTensor, tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Refuse features of which some are missing or have no ids, for lookups that check the ids themselves.

    Raises:
        KeyError: a feature is missing.
        ValueError: the values are not int32 or int64.
    """
    values = features.values()
    if not isinstance(values, Tensor):
        return
    check_id_dtype(values)
    features.check_fields()
    places = features.index_per_key()
    missing = [key for table in tables for key in table.feature_names if key not in places]
    if missing:
        raise KeyError(f"feature {missing[0]!r} is missing; the input has {features.keys()}")
