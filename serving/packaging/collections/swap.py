"""A copy of a module that looks up stored rows where its tables stood."""

from __future__ import annotations

import copy
from collections.abc import Collection

from torch import nn

from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.collections.find import FoundTables
from tessera.serving.packaging.collections.hashing import KeepIds, find_hashers, hash_specs
from tessera.serving.packaging.collections.kinds import IdTreatment, Treatments
from tessera.serving.packaging.collections.positions import packed_positions
from tessera.serving.packaging.dense_steps import joined_stages
from tessera.serving.packaging.lookups.backends import LookupBackend
from tessera.serving.packaging.tables.stored import StoredTables


def with_stored_tables(
    module: nn.Module,
    found: FoundTables,
    tables: StoredTables,
    schema: InputSchema,
    backend: LookupBackend,
    *,
    left_out: Collection[str] = (),
) -> nn.Module:
    """A copy of ``module`` in evaluation mode over stored tables; the float tables are not copied.

    Args:
        module: left as it is.
        found: its tables.
        tables: the same, stored.
        schema: how the raw ids of features become rows that no hasher of the module takes.
        backend: whose operators.
        left_out: the names of the module's hashers whose work the lookups do.
    """
    hashers = find_hashers(module)
    by_module = hash_specs(hasher for path, hasher in hashers.items() if path not in left_out)
    by_lookup = hash_specs(hashers[path] for path in left_out)
    # Features that the module makes itself are in no schema, but its hashers know them.
    rules = {feature.name: feature for feature in schema.features} | by_lookup
    treatments: Treatments = {
        name: IdTreatment(hashing=rule.hashing, out_of_range=rule.out_of_range)
        for name, rule in rules.items()
        if name not in by_module
    }
    # What is in the memo counts as copied already.
    memo: dict[int, object] = {
        id(collection.module): collection.kind.packed(collection, tables, treatments, backend)
        for collection in found.collections
    }
    memo |= {id(hashers[path]): KeepIds() for path in left_out}
    memo |= packed_positions(module)
    if backend.name == "tessera" and not tables.for_gpu:
        memo |= joined_stages(module)
    return copy.deepcopy(module, memo).eval().requires_grad_(requires_grad=False)
