"""Quantized collections, whole and sharded, as packages: their rows byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving import package_model
from tessera.serving.package.loading import LoadedPackage, load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.package.schema import FeatureSpec
from tessera.training import (
    KeyedJaggedTensor,
)
from tessera.training.inference.modules import quantize_inference_model
from tests.packaging.backends import EACH_BACKEND, NEEDS_TESSERA
from tests.packaging.batches import random_batch
from tests.packaging.quantized_models import BATCH, DTYPES, Pooled, Unpooled, sharded


def rows_of_tables(feature: FeatureSpec, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(feature.rows, (count,), generator=generator)


def packaged(module: nn.Module, path: Path, **choices: object) -> LoadedPackage:
    package_model(module, None, [BATCH], out=path, **choices)  # type: ignore[arg-type]
    return load_package(path)


def answers(package: LoadedPackage, batch: HostBatch) -> Tensor:
    return package.runner.forward(batch)["default"]


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("make", [Pooled, Unpooled])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantizing_before_packaging_gives_the_packagers_own_bits(
    make: Callable[[], nn.Module], dtype: str, backend: str, tmp_path: Path
) -> None:
    if dtype == "int2" and backend == "tessera":
        pytest.skip("no kernel of ours reads int2")
    model = make().eval()
    direct = packaged(model, tmp_path / "direct.pt", dtype=dtype, backend=backend)
    quantized = quantize_inference_model(model, quantization_dtype=DTYPES[dtype])
    ours = packaged(quantized, tmp_path / "quantized.pt", backend=backend)
    assert [table.dtype for table in ours.manifest.tables] == [dtype, dtype]
    batch = random_batch(direct.manifest.schema, 33, max_length=6, seed=3)
    assert torch.equal(answers(ours, batch), answers(direct, batch))


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("make", [Pooled, Unpooled])
def test_an_int8_package_answers_as_the_quantized_module(
    make: Callable[[], nn.Module], backend: str, tmp_path: Path
) -> None:
    quantized = quantize_inference_model(make().eval())
    ours = packaged(quantized, tmp_path / "quantized.pt", backend=backend)
    assert {table.dtype for table in ours.manifest.tables} == {"int8"}
    assert {table.max_abs_error for table in ours.manifest.tables} == {0.0}
    batch = random_batch(ours.manifest.schema, 33, max_length=6, seed=4, ids=rows_of_tables)
    lengths, values = batch.id_list_features_lengths, batch.id_list_features_values
    features = KeyedJaggedTensor(["x", "y", "z"], values, lengths=lengths)
    # Sums of up to some tens of numbers below 10, fused or not, through a layer of 48 inputs.
    torch.testing.assert_close(answers(ours, batch), quantized(features), rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [pytest.param(m, marks=NEEDS_TESSERA) for m in (Pooled, Unpooled)])
@pytest.mark.parametrize(
    ("dtype", "kind", "devices"),
    [
        ("int8", "table_wise", 1),
        ("int8", "table_wise", 2),
        ("int4", "column_wise", 3),
        ("int8", "row_wise", 2),
        ("fp16", "row_wise", 3),
    ],
)
def test_sharded_collections_are_packaged_in_their_shards(
    make: Callable[[], nn.Module], dtype: str, kind: str, devices: int, tmp_path: Path
) -> None:
    model = make().eval()
    whole = packaged(
        quantize_inference_model(model, quantization_dtype=DTYPES[dtype]), tmp_path / "whole.pt"
    )
    quantized = quantize_inference_model(model, quantization_dtype=DTYPES[dtype])
    ours = packaged(sharded(quantized, kind, devices), tmp_path / "sharded.pt")
    assert ours.manifest.plan.num_shards == devices
    pieces = [p for p in ours.manifest.plan.placements if p.table == "big"]
    assert len(pieces) == {"table_wise": 1, "column_wise": 2, "row_wise": devices}[kind]
    batch = random_batch(whole.manifest.schema, 65, max_length=6, seed=5)
    assert torch.equal(answers(ours, batch), answers(whole, batch))


def test_a_choice_that_a_quantized_table_cannot_follow_is_refused(tmp_path: Path) -> None:
    quantized = quantize_inference_model(Pooled().eval(), quantization_dtype=torch.quint2x4)
    with pytest.raises(UserError, match="'big' is quantized to int2, which this backend cannot"):
        packaged(quantized, tmp_path / "a.pt", backend="tessera")
    quantized = quantize_inference_model(Pooled().eval())
    with pytest.raises(UserError, match=r"'own' is quantized to int8 already.* asks for fp16"):
        packaged(quantized, tmp_path / "b.pt", table_dtypes={"own": "fp16"})
    half = quantize_inference_model(Pooled().eval(), output_dtype=torch.float16)
    with pytest.raises(UserError, match=r"gives torch\.float16, and packages look up float32"):
        packaged(half, tmp_path / "c.pt")
    empty = quantize_inference_model(Pooled().eval()).to("meta")
    with pytest.raises(UserError, match="table 'big' is on the meta device"):
        packaged(empty, tmp_path / "d.pt")
