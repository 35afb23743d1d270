"""Collections over stored rows, pooled and unpooled.

They take and give what the float32 collections do, in Python as well as while ``torch.fx`` traces
them, and call the lookup operator on buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.collections.kinds import CollectionKind, FoundCollection, Treatments
from tessera.serving.packaging.lookups.backends import LookupBackend
from tessera.serving.packaging.tables.stored import StoredTables
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.tables import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class PackedEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` over stored rows.

    All features that one table each serves are looked up in one call; a feature that several
    tables serve takes part in as many calls.  Features that it does not know may be among its
    input's keys.
    """

    def __init__(
        self,
        found: FoundCollection,
        stored: StoredTables,
        treatments: Treatments,
        backend: LookupBackend,
    ) -> None:
        super().__init__()
        self._weighted = cast("EmbeddingBagCollectionInterface", found.module).is_weighted()
        self._specs = found.lookups(treatments)
        self._stored = stored
        self._backend = backend
        # The operator's plan depends on the order of the ids, which the first call tells.
        self._calls: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """See `EmbeddingBagCollection.forward`; ids outside a table take its nearest row."""
        weights = features.weights() if self._weighted else None
        parts = []
        dims = {spec.name: spec.dim for _, spec in self._specs}
        for lookup, names in self._calls_for(tuple(features.keys())):
            pooled = self.get_submodule(lookup)(features.values(), features.lengths(), weights)
            parts.append(KeyedTensor(names, [dims[name] for name in names], pooled))
        if len(parts) == 1:
            return parts[0]
        names = [spec.name for _, spec in self._specs]
        (values,) = KeyedTensor.regroup(parts, [names])
        return KeyedTensor(names, [dims[name] for name in names], values)

    def _calls_for(self, keys: tuple[str, ...]) -> list[tuple[str, list[str]]]:
        """For ids in the order of ``keys``: each call's submodule and the names it gives."""
        if keys not in self._calls:
            calls = []
            for number, specs in enumerate(_rounds(self._specs, keys)):
                names = [spec.name for _, spec in self._specs if spec in specs]
                lookup = self._backend.lookup(self._stored, specs, names)
                name = (
                    "lookup"
                    if number == len(self._calls) == 0
                    else f"lookup_{len(self._calls)}_{number}"
                )
                self.add_module(name, lookup)
                calls.append((name, names))
            self._calls[keys] = calls
        return self._calls[keys]


def _rounds(
    specs: Sequence[tuple[str, FeatureSpec]], keys: tuple[str, ...]
) -> list[list[FeatureSpec | None]]:
    """The lookups, spread over calls in which each key occurs once.

    Raises:
        KeyError: a feature is not among the keys.
    """
    by_key: dict[str, list[FeatureSpec]] = {key: [] for key in keys}
    for feature, spec in specs:
        if feature not in by_key:
            raise KeyError(f"feature {feature!r} is missing; the input has {list(keys)}")
        by_key[feature].append(spec)
    count = max(len(own) for own in by_key.values())
    return [
        [by_key[key][number] if number < len(by_key[key]) else None for key in keys]
        for number in range(count)
    ]


class PackedEmbeddingCollection(nn.Module):
    """An `EmbeddingCollection` over stored rows: one call per vector of its output."""

    def __init__(
        self,
        found: FoundCollection,
        stored: StoredTables,
        treatments: Treatments,
        backend: LookupBackend,
    ) -> None:
        super().__init__()
        self._need_indices = cast("EmbeddingCollectionInterface", found.module).need_indices()
        self._features = []
        for number, (feature, spec) in enumerate(found.lookups(treatments)):
            self._features.append((feature, spec.name, f"lookup_{number}"))
            self.add_module(f"lookup_{number}", backend.lookup_rows(stored, [spec]))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """See `EmbeddingCollection.forward`; ids outside a table take its nearest row."""
        found = {}
        for feature, name, lookup in self._features:
            bags = features[feature]
            found[name] = JaggedTensor(
                values=self.get_submodule(lookup)(bags.values(), bags.lengths()),
                lengths=bags.lengths(),
                offsets=bags.offsets(),
                weights=bags.values() if self._need_indices else None,
            )
        return found


def _tables(
    collection: EmbeddingBagCollection | EmbeddingCollection,
) -> list[tuple[BaseEmbeddingConfig, Tensor]]:
    configs: Sequence[BaseEmbeddingConfig]
    if isinstance(collection, EmbeddingBagCollection):
        configs, holder = collection.embedding_bag_configs(), collection.embedding_bags
    else:
        configs, holder = collection.embedding_configs(), collection.embeddings
    return [(config, cast("Tensor", holder[config.name].weight)) for config in configs]


POOLED = CollectionKind(
    module=EmbeddingBagCollection, tables=_tables, packed=PackedEmbeddingBagCollection
)
UNPOOLED = CollectionKind(
    module=EmbeddingCollection,
    tables=_tables,
    packed=PackedEmbeddingCollection,
    # Its output may hold the ids themselves.
    only_looks_up=lambda module: not module.need_indices(),
)
