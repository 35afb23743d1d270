"""Stored rows against loops over plain numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tessera.errors import UserError
from tessera.kernels.row_codecs import affine_rows_in_torch
from tessera.kernels.row_types import ROW_TYPES, row_type
from tessera.serving.package.manifest import Placement, ShardingPlan
from tessera.serving.packaging.tables.quantize import FloatTable, quantize_tables
from tessera.serving.packaging.tables.stored import TABLE_ALIGNMENT_BYTES

QUANTIZED = [name for name, kind in ROW_TYPES.items() if kind.scaled and name != "fp8"]


def reference_rows(weights: np.ndarray, bits: int) -> np.ndarray:
    """FBGEMM's row-wise quantization, one number at a time."""
    codes = (1 << bits) - 1
    rows = []
    for row in weights.astype(np.float32):
        bias = np.float16(row.min())
        # The range is measured from the stored bias, in float32.
        span = np.float32(row.max()) - np.float32(bias)
        scale = np.float16(1.0) if span == 0 else np.float16(span / np.float32(codes))
        if scale == 0:
            scale = np.float16(1.0)
        inverse = np.float32(1.0) / np.float32(scale)
        if np.isinf(inverse):
            scale, inverse = np.float16(1.0), np.float32(1.0)
        quantized = []
        for element in row:
            code = np.rint((element - np.float32(bias)) * inverse)
            quantized.append(int(min(max(code, 0), codes)))
        per_byte = 8 // bits
        quantized = [
            sum(code << (bits * place) for place, code in enumerate(quantized[begin:][:per_byte]))
            for begin in range(0, len(quantized), per_byte)
        ]
        header = np.array([scale, bias], dtype=np.float16).view(np.uint8)
        rows.append(np.concatenate([header, np.array(quantized, dtype=np.uint8)]))
    return np.stack(rows)


def tables(dims: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(1, 6), dims)
    # Of two zeros the reference takes the first; rows are stored as if there were only one.
    elements = st.floats(-8, 8, width=32).map(lambda element: element + 0.0)
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=elements))


@settings(max_examples=100)
@given(weights=tables(st.integers(1, 40)))
def test_int8_rows_are_those_of_the_plain_loop(weights: np.ndarray) -> None:
    stored = row_type("int8").encode(torch.from_numpy(weights)).numpy()
    np.testing.assert_array_equal(stored, reference_rows(weights, 8))


@settings(max_examples=100)
@given(weights=tables(st.integers(1, 20).map(lambda half: 2 * half)))
def test_int4_rows_are_those_of_the_plain_loop(weights: np.ndarray) -> None:
    stored = row_type("int4").encode(torch.from_numpy(weights)).numpy()
    np.testing.assert_array_equal(stored, reference_rows(weights, 4))


@settings(max_examples=100)
@given(weights=tables(st.integers(1, 10).map(lambda quarter: 4 * quarter)))
def test_int2_rows_are_those_of_the_plain_loop(weights: np.ndarray) -> None:
    stored = row_type("int2").encode(torch.from_numpy(weights)).numpy()
    np.testing.assert_array_equal(stored, reference_rows(weights, 2))


def test_int8_rows_are_those_of_fbgemms_row_wise_quantization() -> None:
    weights = torch.randn(50, 24, generator=torch.Generator().manual_seed(3))
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weights, 8)
    stored = quantize_tables([FloatTable(name="t", weights=weights)], row_type("int8"))
    rows = stored.rows(stored.table("t").pieces[0], row_type("int8"))
    # FBGEMM's operator puts scale and bias behind the codes, its inference tables before them.
    assert torch.equal(rows[:, 4:], fused[:, :24])
    assert torch.equal(rows[:, :4], fused[:, 24:])


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=100)
@given(
    weights=tables(st.integers(1, 10).map(lambda quarter: 4 * quarter)),
    factor=st.sampled_from([1.0, 1e-3, 1e-6, 3e-8, 7e3]),
)
def test_without_fbgemm_the_rows_are_the_same(
    name: str, weights: np.ndarray, factor: float
) -> None:
    kind = row_type(name)
    values = torch.from_numpy(weights) * factor
    # A factor can make -0.0 of a number; encode() knows one zero.
    assert torch.equal(affine_rows_in_torch(values + 0.0, kind.bits), kind.encode(values))


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_sign_of_a_zero_changes_no_row(name: str) -> None:
    kind = row_type(name)
    weights = torch.zeros(3, 40)
    weights[:, 16] = torch.tensor([1.0, 0.0, 0.25])
    signed = weights.clone()
    signed[:, 8] = -0.0
    assert torch.equal(kind.encode(signed), kind.encode(weights))


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=50)
@given(weights=tables(st.integers(1, 10).map(lambda quarter: 4 * quarter)))
def test_a_decoded_element_is_off_by_half_a_step_and_the_rounding_of_scale_and_bias(
    name: str, weights: np.ndarray
) -> None:
    kind = row_type(name)
    decoded = kind.decode(kind.encode(torch.from_numpy(weights)), weights.shape[1]).numpy()
    for row, found in zip(weights, decoded, strict=True):
        span = float(row.max() - row.min())
        step = span / ((1 << kind.bits) - 1)
        # float16 keeps 11 significant bits: bias and scale are each off by a relative 2**-11 at
        # most, the scale's share being multiplied by up to all codes.  Below float16's normal
        # range the error is absolute, 2**-25 a step; a scale that rounds to zero loses the span.
        lost_span = span if step < 2**-24 else 0.0
        tiny = 2**-25 * (1 << kind.bits)
        bound = step / 2 + (abs(float(row.min())) + span) * 2**-10 + tiny + lost_span
        assert np.abs(found - row).max() <= bound


def test_rows_of_one_value_are_kept_as_their_bias() -> None:
    for name in QUANTIZED:
        kind = row_type(name)
        weights = torch.tensor([[0.5] * 4, [0.0] * 4, [-2.0] * 4])
        assert torch.equal(kind.decode(kind.encode(weights), 4), weights)


@settings(max_examples=50)
@given(weights=tables(st.integers(1, 40)))
def test_an_fp8_element_is_off_by_a_sixteenth_of_itself(weights: np.ndarray) -> None:
    kind = row_type("fp8")
    decoded = kind.decode(kind.encode(torch.from_numpy(weights)), weights.shape[1]).numpy()
    for row, found in zip(weights, decoded, strict=True):
        # e4m3 keeps 4 significant bits; below its normal range (2**-6) a step is 2**-9 of the
        # scale.  The scale is the largest magnitude over 448, rounded to float16; one below
        # float16's smallest number becomes 1, under which the row is lost to a step of 2**-9.
        largest = float(np.abs(row).max())
        scale = float(np.float16(largest / 448)) or 1.0
        bound = np.abs(row) * (2**-4 + 2**-10) + scale * 2**-9 + 2**-24 * 448
        assert (np.abs(found - row) <= bound).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)],
)
def test_float_rows_are_the_rounded_numbers(name: str, dtype: torch.dtype) -> None:
    weights = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    kind = row_type(name)
    assert torch.equal(kind.decode(kind.encode(weights), 7), weights.to(dtype).float())


# Their rows mean something without the rest of the table; the others are in test_blocks.
BY_ROW = [name for name, kind in ROW_TYPES.items() if not kind.blocks]


@pytest.mark.parametrize("name", BY_ROW)
def test_tables_lie_one_after_the_other_on_cache_lines(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    kind = row_type(name)
    shapes = {"a": (3, 8), "b": (1, 4), "c": (100, 12)}
    floats = {table: torch.randn(shape, generator=generator) for table, shape in shapes.items()}
    stored = quantize_tables(
        [FloatTable(name=table, weights=weights) for table, weights in floats.items()], kind
    )
    end = 0
    for table, weights in floats.items():
        (piece,) = stored.table(table).pieces
        info = stored.table(table).info
        begin = piece.data_offset - kind.header_bytes
        assert begin % TABLE_ALIGNMENT_BYTES == 0
        assert end <= begin < end + TABLE_ALIGNMENT_BYTES
        end = begin + info.bytes
        raw = stored.buffers[0][begin:end].view(info.rows, -1)
        assert torch.equal(raw, kind.encode(weights))
        assert torch.equal(stored.rows(piece, kind), raw)
        assert info.bytes == weights.shape[0] * kind.row_bytes(weights.shape[1])
        assert info.bytes_fp32 == weights.numel() * 4


@pytest.mark.parametrize("dim", [12, 16, 32, 64, 96, 100, 128])
@pytest.mark.parametrize("name", BY_ROW)
def test_a_gpus_rows_begin_on_16_bytes_and_scales_fill_the_padding_or_a_sector(
    name: str, dim: int
) -> None:
    kind = row_type(name)
    weights = torch.randn(9, dim, generator=torch.Generator().manual_seed(4))
    stored = quantize_tables([FloatTable(name="t", weights=weights)], kind, for_gpu=True)
    (piece,) = stored.table("t").pieces
    data_bytes = kind.data_bytes(dim)
    if not kind.scaled:
        assert piece.data_stride == -(-data_bytes // 16) * 16
        assert piece.scale_offset == 0
    # No row here fills all of its last 16 bytes but less than a scale.
    elif data_bytes % 16 or data_bytes == 16:
        behind = -(-data_bytes // 4) * 4
        assert piece.scale_offset == behind
        assert piece.scale_stride == piece.data_stride == -(-(behind + 4) // 16) * 16
    else:
        assert piece.data_stride == data_bytes
        assert piece.scale_offset == -(-9 * piece.data_stride // 128) * 128
        assert piece.scale_stride == 4
    assert torch.equal(stored.rows(piece, kind), kind.encode(weights))
    assert torch.equal(stored.values("t"), kind.decode(kind.encode(weights), dim))


@pytest.mark.parametrize("for_gpu", [False, True])
@pytest.mark.parametrize("name", BY_ROW)
def test_pieces_hold_what_the_whole_table_holds(
    name: str, monkeypatch: pytest.MonkeyPatch, *, for_gpu: bool
) -> None:
    monkeypatch.setattr("tessera.serving.packaging.tables.quantize._CHUNK_ELEMENTS", 40)
    kind = row_type(name)
    weights = torch.randn(10, 12, generator=torch.Generator().manual_seed(5))

    def piece(shard: int, rows: tuple[int, int], columns: tuple[int, int]) -> Placement:
        return Placement(
            table="t",
            shard=shard,
            device="cpu",
            row_begin=rows[0],
            row_end=rows[1],
            column_begin=columns[0],
            column_end=columns[1],
        )

    placements = (
        piece(1, (0, 4), (0, 12)),
        piece(0, (4, 10), (0, 4)),
        piece(1, (4, 10), (4, 12)),
    )
    stored = quantize_tables(
        [FloatTable(name="t", weights=weights)],
        kind,
        plan=ShardingPlan(num_shards=2, placements=placements),
        for_gpu=for_gpu,
    )
    assert len(stored.buffers) == 2
    assert torch.equal(stored.values("t"), kind.decode(kind.encode(weights), 12))


def test_the_errors_of_a_table_are_those_of_all_its_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tessera.serving.packaging.tables.quantize._CHUNK_ELEMENTS", 40)
    weights = torch.randn(33, 8, generator=torch.Generator().manual_seed(2))
    kind = row_type("int4")
    seen: list[int] = []
    stored = quantize_tables([FloatTable(name="t", weights=weights)], kind, on_rows=seen.append)
    assert seen == [5, 5, 5, 5, 5, 5, 3]
    error = (kind.decode(kind.encode(weights), 8) - weights).double()
    info = stored.table("t").info
    assert info.max_abs_error == error.abs().max().item()
    assert info.rmse == pytest.approx(error.square().mean().sqrt().item(), rel=1e-12)
    norm = weights.double().square().mean().sqrt().item()
    assert info.relative_rmse == pytest.approx(info.rmse / norm, rel=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 7e4])
@pytest.mark.parametrize("name", ["int8", "int4", "fp16"])
def test_a_number_that_float16_cannot_hold_is_refused(name: str, bad: float) -> None:
    weights = torch.zeros(4, 4)
    weights[2, 1] = bad
    with pytest.raises(UserError, match=r"table 't', row 2 .* --dtype fp32"):
        quantize_tables([FloatTable(name="t", weights=weights)], row_type(name))


def test_float32_rows_hold_large_numbers_but_no_nan() -> None:
    kind = row_type("fp32")
    weights = torch.full((2, 2), 7e4)
    assert quantize_tables([FloatTable(name="t", weights=weights)], kind).table("t")
    weights[1, 1] = float("nan")
    with pytest.raises(UserError, match="row 1"):
        quantize_tables([FloatTable(name="t", weights=weights)], kind)


def test_int4_needs_an_even_dimension() -> None:
    with pytest.raises(UserError, match="dimension 3; int4 needs an even one"):
        quantize_tables([FloatTable(name="t", weights=torch.zeros(2, 3))], row_type("int4"))


def test_an_unknown_type_is_named_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="'int7' is unknown; give one of int8"):
        row_type("int7")
