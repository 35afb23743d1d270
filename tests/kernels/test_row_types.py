"""The table of row types: what is generated from it, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from tessera.errors import UserError
from tessera.kernels.plan import PlanRow, plan_rows
from tessera.kernels.row_header import generated, header
from tessera.kernels.row_type_names import ROW_TYPE_NEEDS
from tessera.kernels.row_types import (
    BLOCK_INT8,
    INT2,
    INT8,
    ROW_TYPES,
    fbgemm_types,
    kernel_types,
    register,
    row_type,
)
from tessera.kernels.tables import FeatureLookup, TablePlace, make_plan


@pytest.mark.parametrize("path", list(generated()), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path):
    assert path.read_text() == generated()[path], "run make row-types"


def test_the_command_line_offers_every_type():
    assert list(ROW_TYPE_NEEDS) == list(ROW_TYPES)


def test_the_numbers_of_the_package_format_stay():
    assert [kind.name for kind in kernel_types()] == [
        "fp32", "fp16", "bf16", "fp8", "int8", "int4", "int8b",
    ]  # fmt: skip
    assert {code: kind.name for code, kind in sorted(fbgemm_types().items())} == {
        0: "fp32", 1: "fp16", 2: "int8", 3: "int4", 4: "int2",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ROW_TYPES.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("dim", [16, 48])
def test_rows_have_the_bytes_that_their_record_says(kind, dim):
    weights = torch.randn(5, dim, generator=torch.Generator().manual_seed(dim))
    fitted = kind.fitted([weights])
    stored = fitted.encode(weights)
    assert stored.shape == (5, kind.row_bytes(dim))
    assert stored.dtype == torch.uint8
    padded = torch.nn.functional.pad(stored, (0, 3), value=255)
    assert torch.equal(fitted.decode(padded, dim), fitted.decode(stored, dim))
    assert kind.backends
    assert ("cuda" in kind.devices) == (kind.kernel_number is not None)


def test_a_name_is_given_once_and_a_kernel_reads_one_layout():
    with pytest.raises(ValueError, match="row type 'int8' exists already"):
        register(replace(INT8, summary="another"))
    with pytest.raises(ValueError, match="has the kernel number of 'int8' but differs"):
        register(replace(INT8, name="int8x", bits=4))
    assert "int8x" not in ROW_TYPES


def test_a_gap_in_the_kernel_numbers_is_refused(monkeypatch):
    monkeypatch.setitem(ROW_TYPES, "new", replace(INT8, name="new", kernel="kNew", kernel_number=9))
    with pytest.raises(ValueError, match="without a gap from 0 on"):
        header()


def test_a_type_that_no_kernel_reads_is_refused_in_a_plan():
    place = TablePlace(data_offset=0, row_stride=8, rows=1, dim=16, weight_type=INT2)
    with pytest.raises(UserError, match="no kernel reads int2 rows; take one of fp32"):
        make_plan([FeatureLookup(table=place, out_column=0)])


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"'int8_b' is unknown; .* did you mean 'int8b'\?"):
        row_type("int8_b")


def test_a_plan_is_read_by_the_names_it_was_written_with():
    place = TablePlace(
        data_offset=128, row_stride=16, rows=3, dim=8, weight_type=BLOCK_INT8, scale_offset=64
    )
    (row,) = plan_rows(make_plan([FeatureLookup(table=place, out_column=5)]))
    assert row == PlanRow(
        data_offset=128,
        row_stride=16,
        rows=3,
        dim=8,
        weight_type=6,
        scale_offset=64,
        scale_stride=0,
        scale_type=0,
        out_column=5,
        pooling=0,
        id_rule=0,
        out_of_range=0,
        reciprocal=(2**64 - 1) // 3,
        scale_shift=0,
        launch_order=0,
    )
