"""Tables of type int8b: blocks of 16 columns, their scales in a book behind the rows."""

from __future__ import annotations

import pytest
import torch

from tessera.errors import UserError
from tessera.kernels.libraries import load_libraries
from tessera.kernels.quantize import quantize_table
from tessera.kernels.row_types import row_type
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.backends import BACKENDS
from tessera.serving.packaging.tables.quantize import FloatTable, quantize_tables
from tessera.serving.packaging.tables.shard import plan_shards

KIND = row_type("int8b")


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    load_libraries(BACKENDS["tessera"].operator_libraries)


def table(rows: int = 50, dim: int = 64) -> FloatTable:
    generator = torch.Generator().manual_seed(rows)
    weights = torch.randn(rows, dim, generator=generator) * torch.linspace(0.1, 3, rows)[:, None]
    return FloatTable(name="t", weights=weights)


def feature(rows: int = 50, dim: int = 64) -> FeatureSpec:
    return FeatureSpec(
        name="f",
        group="id_list",
        table="t",
        rows=rows,
        dim=dim,
        pooling="sum",
        hashing="none",
        out_of_range="clamp",
    )


@pytest.mark.parametrize("for_gpu", [False, True])
def test_rows_are_those_of_the_kernels_quantization(
    monkeypatch: pytest.MonkeyPatch, *, for_gpu: bool
) -> None:
    # Several chunks, whose book is the whole table's.
    monkeypatch.setattr("tessera.serving.packaging.tables.quantize._CHUNK_ELEMENTS", 640)
    given = table()
    stored = quantize_tables([given], KIND, for_gpu=for_gpu)
    expected = quantize_table(given.weights, KIND)
    (piece,) = stored.table("t").pieces
    assert piece.data_stride == 64
    assert torch.equal(stored.rows(piece, KIND), expected.data)
    book = stored.buffers[0][piece.scale_offset : piece.scale_offset + 64].view(torch.float32)
    assert torch.equal(book, expected.scale)
    assert piece.scale_offset % (128 if for_gpu else 64) == 0
    error = (stored.values("t") - given.weights).abs().max().item()
    assert 0 < error <= expected.scale.max()
    assert stored.table("t").info.max_abs_error == error


def test_lookups_read_what_is_stored() -> None:
    stored = quantize_tables([table()], KIND)
    module = BACKENDS["tessera"].lookup(stored, [feature()], ["f"])
    ids = torch.tensor([3, 49, 0, 7, 7])
    pooled = module(ids, torch.tensor([1, 1, 3]), None)
    values = stored.values("t")[ids]
    assert torch.equal(pooled[:2], values[:2])
    assert torch.allclose(pooled[2], values[2:].sum(0), rtol=1e-6)


@pytest.mark.parametrize("way", ["column_wise", "row_wise"])
@pytest.mark.parametrize("shards", [2, 3])
def test_cuts_give_the_bits_of_one_shard(way: str, shards: int) -> None:
    given = table()
    plan = plan_shards([given], {"t": KIND}, shards=shards, by_pattern={"t": way})
    one, many = quantize_tables([given], KIND), quantize_tables([given], KIND, plan=plan)
    assert torch.equal(many.values("t"), one.values("t"))
    single = BACKENDS["tessera"].lookup(one, [feature()], ["f"])
    spread = BACKENDS["tessera"].lookup(many, [feature()], ["f"])
    for ids, lengths in (
        (torch.arange(50), torch.full((10,), 5)),
        (torch.tensor([49]), torch.tensor([0, 1, 0])),
        (torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)),
    ):
        weights = torch.rand(len(ids))
        for own in (None, weights):
            assert torch.equal(spread(ids, lengths, own), single(ids, lengths, own))


def test_widths_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="int8b needs a multiple of 16"):
        quantize_tables([table(dim=40)], KIND)


def test_a_table_of_zeros_stays_one() -> None:
    given = FloatTable(name="t", weights=torch.zeros(4, 16))
    assert torch.equal(quantize_tables([given], KIND).values("t"), given.weights)
