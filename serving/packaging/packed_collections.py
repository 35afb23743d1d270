"""Collections over stored rows: what stands in a packaged module where its tables stood.

They take and give what the float32 collections do, in Python as well as while ``torch.fx`` traces
them, and call the lookup operator on buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tessera.serving.package.schema import FeatureSpec, Hashing, OutOfRange
from tessera.serving.packaging.find import FoundCollection, FoundTable
from tessera.serving.packaging.lookups.backends import LookupBackend
from tessera.serving.packaging.tables.quantize import StoredTables
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


@dataclass(frozen=True, kw_only=True)
class IdTreatment:
    """How a feature's ids become rows in the lookup; see `FeatureSpec`."""

    hashing: Hashing = "none"
    out_of_range: OutOfRange = "clamp"


Treatments = Mapping[str, IdTreatment]
"""By feature; a feature that is not there has rows for ids already."""


def packed_collection(
    found: FoundCollection, stored: StoredTables, treatments: Treatments, backend: LookupBackend
) -> nn.Module:
    """What stands in for one collection."""
    if isinstance(found.module, EmbeddingBagCollection):
        return PackedEmbeddingBagCollection(found, stored, treatments, backend)
    return PackedEmbeddingCollection(found, stored, treatments, backend)


def _specs(found: FoundCollection, treatments: Treatments) -> list[tuple[str, FeatureSpec]]:
    """Feature and lookup of every vector of a collection's output, in the output's order."""
    served = [feature for table in found.tables for feature in table.features]

    def name(feature: str, table: FoundTable, own: str) -> str:
        del table
        return feature if served.count(feature) == 1 else f"{feature}@{own}"

    if isinstance(found.module, EmbeddingBagCollection):
        configs = [config.name for config in found.module.embedding_bag_configs()]
    else:
        configs = [config.name for config in found.module.embedding_configs()]
    specs = []
    for table, own in zip(found.tables, configs, strict=True):
        for feature in table.features:
            treatment = treatments.get(feature, IdTreatment())
            spec = FeatureSpec(
                name=name(feature, table, own),
                group="id_list",
                table=table.stored,
                rows=table.rows,
                dim=table.dim,
                pooling=table.pooling,
                hashing=treatment.hashing,
                out_of_range=treatment.out_of_range,
            )
            specs.append((feature, spec))
    return specs


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
        assert isinstance(found.module, EmbeddingBagCollection)
        self._weighted = found.module.is_weighted()
        self._specs = _specs(found, treatments)
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
                name = f"lookup_{len(self._calls)}_{number}"
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
        assert isinstance(found.module, EmbeddingCollection)
        self._need_indices = found.module.need_indices()
        self._features = []
        for number, (feature, spec) in enumerate(_specs(found, treatments)):
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
