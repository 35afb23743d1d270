"""Managed collisions: ids of any size get rows of their own, as many as a table has.

A table has far fewer rows than a feature has ids.  Hashing gives several ids one row; a managed collision
module keeps a map instead, sorted ids and their rows, and decides while it trains which ids are worth
a row (`tessera.training.modules.mc_evictions`).  An id that has none gets the last row of the table,
which all such ids share.

`ManagedCollisionModule` is the interface of such a module of one table (`tessera.training.modules.mc_base`),
`MCHManagedCollisionModule` one that searches a sorted map (`tessera.training.modules.mc_sorted_map`),
`ManagedCollisionCollection` those of several tables.
`tessera.training.modules.mc_embedding_modules` puts one before the tables.  docs/managed_collisions.md
tells when to use which.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig
from tessera.training.modules.mc_base import Features, ManagedCollisionModule
from tessera.training.modules.mc_evictions import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHEvictionPolicyMetadataInfo,
)
from tessera.training.modules.mc_sorted_map import MCHManagedCollisionModule
from tessera.training.modules.mc_thresholds import (
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from tessera.training.modules.tables import flat_names
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "DistanceLFU_EvictionPolicy",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "MCHEvictionPolicy",
    "MCHEvictionPolicyMetadataInfo",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionModule",
    "apply_mc_method_to_jt_dict",
    "average_threshold_filter",
    "dynamic_threshold_filter",
    "probabilistic_threshold_filter",
]


def apply_mc_method_to_jt_dict(
    mc_module: nn.Module, method: str, features_dict: Features
) -> Features:
    """Call a method of a managed collision module by its name, such as ``profile``."""
    features: Features = getattr(mc_module, method)(features_dict)
    return features


class ManagedCollisionCollection(nn.Module):
    """The managed collision modules of several tables: ids of all their features in, rows out.

    A feature of two tables has its rows twice, by the map of each; its name is among the output's keys
    as often.

    Args:
        managed_collision_modules: by table name, for each of the tables.
        embedding_configs: the tables.
        need_preprocess: whether ids are preprocessed here; False: they were before.

    Raises:
        UserError: a table without a module or a module without a table, or another number of rows than
            the table's.
    """

    def __init__(
        self,
        managed_collision_modules: dict[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> None:
        super().__init__()
        _check_modules(managed_collision_modules, embedding_configs)
        self._managed_collision_modules = nn.ModuleDict(managed_collision_modules)
        self._embedding_configs = list(embedding_configs)
        self.need_preprocess = need_preprocess
        self._table_features = [
            (table.name, list(table.feature_names)) for table in embedding_configs
        ]
        self._features, self._by_place = flat_names([names for _, names in self._table_features])

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """The settings of every table, in the collection's order."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """What `ManagedCollisionModule.buckets` gives, by table."""
        return {name: module.buckets() for name, module in self._modules_by_table().items()}

    def _modules_by_table(self) -> dict[str, ManagedCollisionModule]:
        return dict(self._managed_collision_modules.items())  # type: ignore[arg-type] # checked above

    def forward(
        self,
        features: KeyedJaggedTensor,
        mutate_miss_lengths: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> KeyedJaggedTensor:
        """The row of each id, in the same bags.

        Args:
            features: at least the features of all tables; others are left out.
            mutate_miss_lengths: whether a module may leave out ids that have no row of their own.

        Returns:
            The features in the tables' order, int64.

        Raises:
            KeyError: a feature is missing.
        """
        features = selection.select_features(features, self._features)
        bags = selection.bags_of(features, self._features, self._by_place)
        rows: list[Tensor] = []
        for table, names in self._table_features:
            module = self._managed_collision_modules[table]
            own = {name: bags[len(rows) + place] for place, name in enumerate(names)}
            if self.need_preprocess:
                remapped = module(own, mutate_miss_lengths)
            else:
                assert isinstance(module, ManagedCollisionModule)
                remapped = module.profile_and_remap(own, mutate_miss_lengths)
            rows += [remapped[name].values() for name in names]
        return features.with_values(torch.cat(rows))

    def evict(self) -> dict[str, Tensor | None]:
        """By table what `ManagedCollisionModule.evict` gives."""
        return {name: module.evict() for name, module in self._modules_by_table().items()}

    def open_slots(self) -> dict[str, Tensor]:
        """By table what `ManagedCollisionModule.open_slots` gives."""
        return {name: module.open_slots() for name, module in self._modules_by_table().items()}


def _check_modules(
    modules: dict[str, ManagedCollisionModule], tables: Sequence[BaseEmbeddingConfig]
) -> None:
    names = [table.name for table in tables]
    if different := sorted({*names} ^ {*modules}):
        where = "embedding_configs" if different[0] in modules else "managed_collision_modules"
        raise UserError(f"table {different[0]!r} is missing in {where}; give each table one module")
    for table in tables:
        rows = modules[table.name].output_size()
        if rows != table.num_embeddings:
            raise UserError(
                f"the managed collision module of table {table.name!r} maps to {rows} rows, the table "
                f"has {table.num_embeddings}; give it zch_size={table.num_embeddings}"
            )
