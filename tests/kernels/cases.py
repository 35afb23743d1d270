"""Lookup calls to draw: tables of every kind, features over them, jagged ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tessera.kernels.plan import IdRule, OutOfRange, Pooling
from tessera.kernels.quantize import quantize_table
from tessera.kernels.row_types import kernel_types
from tessera.kernels.tables import (
    TABLE_SCALE_SHIFT,
    FeatureLookup,
    PackedTables,
    make_plan,
    pack_tables,
)

DIMS = st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 64, 100, 127, 128, 129, 192, 300, 520])
LARGE = [-(2**63), 2**63 - 1, -1, 2**31 - 1, -(2**31), 2**40 + 12345]


@dataclass(frozen=True)
class Call:
    tables: PackedTables
    plan: Tensor
    indices: Tensor
    lengths: Tensor
    width: int
    id_weights: Tensor | None
    dtype: torch.dtype

    def offsets(self):
        return torch.nn.functional.pad(self.lengths.long().cumsum(0), (1, 0))


def random_table(generator, rows, dim, weight_type, *, scale_shift=0, scale_dtype=torch.float16):
    values = torch.randn(rows, dim, generator=generator)
    return quantize_table(values, weight_type, scale_shift=scale_shift, scale_dtype=scale_dtype)


@st.composite
def tables(draw, generator, *, dim=None):
    weight_type = draw(st.sampled_from(kernel_types()))
    return random_table(
        generator,
        rows=draw(st.integers(1, 9)),
        dim=draw(DIMS) if dim is None else dim,
        weight_type=weight_type,
        scale_shift=draw(st.sampled_from([0, 0, 1, TABLE_SCALE_SHIFT])),
        scale_dtype=draw(st.sampled_from([torch.float16, torch.float16, torch.float32])),
    )


@st.composite
def calls(draw, *, dim=None, rows_output=False, most_samples=5):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    packed = pack_tables(
        draw(st.lists(tables(generator, dim=dim), min_size=1, max_size=4)),
        scale_beside=draw(st.booleans()),
        row_alignment=draw(st.sampled_from([16, 16, 1])),
    )
    places = draw(st.lists(st.sampled_from(packed.places), min_size=1, max_size=6))
    features = []
    column = 0 if rows_output else draw(st.sampled_from([0, 8, 3]))
    for place in places:
        features.append(
            FeatureLookup(
                table=place,
                out_column=column,
                pooling=Pooling.SUM if rows_output else draw(st.sampled_from(list(Pooling))),
                id_rule=draw(st.sampled_from(list(IdRule))),
                out_of_range=draw(st.sampled_from(list(OutOfRange))),
                expected_ids=draw(st.sampled_from([1.0, 5.0])),
            )
        )
        column += 0 if rows_output else place.dim
    batch = draw(st.integers(0, most_samples))
    bags = len(features) * batch
    lengths = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 14]), min_size=bags, max_size=bags))
    wide = draw(st.booleans())
    edges = st.sampled_from([value for value in LARGE if wide or -(2**31) <= value < 2**31])
    count = sum(lengths)
    ids = draw(
        st.lists(st.one_of(st.integers(-3, 12), edges), min_size=min(count, 40), max_size=40)
    )
    indices = torch.tensor((ids * (count // max(len(ids), 1) + 1))[:count])
    weighted = not rows_output and draw(st.booleans())
    return Call(
        tables=packed,
        plan=make_plan(features),
        indices=indices.to(torch.int64 if wide else torch.int32),
        lengths=torch.tensor(lengths, dtype=draw(st.sampled_from([torch.int32, torch.int64]))),
        width=places[0].dim if rows_output else column,
        id_weights=torch.randn(count, generator=generator) if weighted else None,
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
    )
