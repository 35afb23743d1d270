"""A package whose tables never existed in float32 is the one that packaging them makes."""

import pytest
import torch

from tessera.serving.bench.forward import dlrm, random_batch
from tessera.serving.bench.large_package import DIM, write_repeated
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model

ROWS = 21


@pytest.mark.parametrize("dtype", ["int8", "int8b", "int4", "fp16"])
def test_repeated_rows_are_stored_as_packaging_stores_them(dtype, tmp_path, monkeypatch):
    # As large ones are: torch sees stand-ins.
    monkeypatch.setattr("tessera.serving.bench.large_package.SPILLED_FROM_BYTES", 1)
    rows = torch.randn(7, DIM, generator=torch.Generator().manual_seed(1)) * 0.05
    without, whole = dlrm(ROWS, "modulo", device="meta"), dlrm(ROWS, "modulo")
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            given = without.get_parameter(name)
            weight.copy_(rows.repeat(ROWS // len(rows), 1) if given.is_meta else given)
    options = PackageOptions(name="dlrm", dtype=dtype)
    write_repeated(without, tmp_path / "repeated.pt", options, rows)
    write_model(whole, tmp_path / "whole.pt", options)
    repeated, expected = (load_package(tmp_path / f"{name}.pt") for name in ("repeated", "whole"))
    assert [(t.rows, t.dtype, t.bytes) for t in repeated.manifest.tables] == [
        (t.rows, t.dtype, t.bytes) for t in expected.manifest.tables
    ]
    batch = random_batch(64, ROWS, torch.Generator().manual_seed(2))
    found, wanted = (dict(one.runner.forward(batch)) for one in (repeated, expected))
    assert {name: values.tolist() for name, values in found.items()} == {
        name: values.tolist() for name, values in wanted.items()
    }
    assert len(set(found["default"].tolist())) > 60
