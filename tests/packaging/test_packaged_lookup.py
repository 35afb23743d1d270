"""The lookup module against a loop over bags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tessera.kernels.libraries import load_libraries
from tessera.kernels.row_types import ROW_TYPES
from tessera.serving.package.schema import FeatureSpec, Pooling
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.script import script
from tessera.serving.packaging.tables.quantize import FloatTable, quantize_tables
from tessera.serving.packaging.tables.stored import StoredTables
from tessera.serving.packaging.trace import trace
from tests.packaging.backends import EACH_BACKEND

ROWS = 11


class OneLookup(nn.Module):
    def __init__(self, lookup: nn.Module, *, weighted: bool) -> None:
        super().__init__()
        self.lookup = lookup
        self.weighted = weighted

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        return self.lookup(ids, lengths, weights if self.weighted else None)


def plain_loop(
    tables: StoredTables,
    features: list[FeatureSpec],
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor,
) -> dict[str, Tensor]:
    """One bag at a time, in float64: each feature's vectors ``[B, D]``."""
    batch_size = len(lengths) // len(features)
    bags = ids.split(lengths.tolist())
    factors = weights.split(lengths.tolist())
    pooled: dict[str, list[Tensor]] = {feature.name: [] for feature in features}
    for sample in range(batch_size):
        for place, feature in enumerate(features):
            bag = place * batch_size + sample
            table = tables.values(feature.table).double()
            vector = torch.zeros(feature.dim, dtype=torch.float64)
            for row, factor in zip(bags[bag].tolist(), factors[bag].tolist(), strict=True):
                vector += factor * table[row]
            if feature.pooling == "mean":
                vector /= max(1, len(bags[bag]))
            pooled[feature.name].append(vector)
    return {name: torch.stack(vectors) for name, vectors in pooled.items()}


@pytest.mark.parametrize("backend", EACH_BACKEND)
@settings(max_examples=60)
@given(data=st.data())
def test_every_mix_of_types_widths_poolings_and_shared_tables(
    backend: str, data: st.DataObject
) -> None:
    load_libraries(lookup_backend(backend).operator_libraries)
    names = st.sampled_from(sorted(lookup_backend(backend).weight_types))
    kinds = [ROW_TYPES[name] for name in data.draw(st.lists(names, min_size=1, max_size=3))]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    dims = [kind.group_columns * data.draw(st.integers(1, 20)) for kind in kinds]
    floats = [
        FloatTable(name=str(table), weights=torch.randn(ROWS, dim, generator=generator))
        for table, dim in enumerate(dims)
    ]
    tables = quantize_tables(floats, {str(table): kind for table, kind in enumerate(kinds)})
    poolings: list[Pooling] = data.draw(
        st.lists(st.sampled_from(["sum", "mean"]), min_size=1, max_size=5)
    )
    features = [
        FeatureSpec(
            name=f"f{place}",
            group="id_list",
            table=str(place % len(dims)),
            rows=ROWS,
            dim=dims[place % len(dims)],
            pooling=pooling,
            hashing="none",
            out_of_range="reject",
        )
        for place, pooling in enumerate(poolings)
    ]
    weighted = data.draw(st.booleans())
    names = data.draw(st.permutations([feature.name for feature in features]))
    # Scripted once per example, run on batches that it was not traced with.
    lookup = lookup_backend(backend).lookup(tables, features, names)
    scripted = script(trace(OneLookup(lookup, weighted=weighted)))
    for batch_size in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)):
        count = len(features) * batch_size
        lengths = torch.randint(0, 6, (count,), generator=generator, dtype=torch.int32)
        if data.draw(st.booleans()):
            lengths[:] = 0
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        ids = ids.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
        weights = torch.rand(len(ids), generator=generator) if weighted else torch.ones(len(ids))
        pooled = scripted(ids, lengths, weights)
        assert pooled.dtype == torch.float32
        vectors = plain_loop(tables, features, ids, lengths, weights)
        expected = torch.cat([vectors[name] for name in names], dim=1)
        # Five terms of a few units, each sum rounded to float32.
        torch.testing.assert_close(pooled.double(), expected, rtol=0, atol=1e-5)
