"""Packages whose graph begins with the transforms of raw values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tests.packaging.backends import EACH_BACKEND, NEEDS_TESSERA
from tests.packaging.test_same_bits import check_same_bits
from tests.transforms.raw_model import NAMES, TRANSFORMS, raw_model, raw_rows


def host_batch(count: int, seed: int) -> HostBatch:
    given = raw_rows(count, seed)
    none = torch.empty(0, dtype=torch.int32)
    return HostBatch(
        float_features=given.dense_features,
        id_list_features_lengths=given.sparse_features.lengths(),
        id_list_features_values=given.sparse_features.values(),
        id_score_list_features_lengths=none,
        id_score_list_features_values=none.long(),
        id_score_list_features_weights=none.float(),
        batch_size=count,
    )


WAYS = [
    pytest.param({"backend": "tessera"}, marks=NEEDS_TESSERA),
    pytest.param({"backend": "tessera", "shards": 2, "sharding": "row_wise"}, marks=NEEDS_TESSERA),
    pytest.param({"backend": "fbgemm"}, marks=EACH_BACKEND[1].marks),
]


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("int8", 0.03)])
@pytest.mark.parametrize("options", WAYS)
def test_a_package_takes_raw_values(
    options: dict[str, Any], dtype: str, bound: float, tmp_path: Path
) -> None:
    model = raw_model()
    chosen = PackageOptions(name="m", version="1", dtype=dtype, **options)
    manifest = write_model(model, tmp_path / "m.pt", chosen)
    assert manifest.schema.dense_features == tuple(column.name for column in TRANSFORMS.dense)
    assert tuple(feature.name for feature in manifest.schema.features) == NAMES
    loaded = load_package(tmp_path / "m.pt")
    for count in (1, 3, 64):
        given = raw_rows(count, seed=count)
        with torch.inference_mode():
            expected = torch.sigmoid(model(given.dense_features, given.sparse_features))
        found = loaded.runner.forward(host_batch(count, count))["default"]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=bound)
        assert count == 1 or found.std() > 0.05


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_a_sample_has_the_same_bits_in_every_batch(backend: str, tmp_path: Path) -> None:
    write_model(
        raw_model(), tmp_path / "m.pt", PackageOptions(name="m", version="1", backend=backend)
    )
    check_same_bits(tmp_path / "m.pt")


def test_ids_with_weights_are_transformed_too(tmp_path: Path) -> None:
    model = raw_model(weighted=True, arch="dlrm_dcn")
    write_model(model, tmp_path / "m.pt", PackageOptions(name="m", version="1"))
    check_same_bits(tmp_path / "m.pt")


def test_what_training_alone_reads_is_not_in_the_package(tmp_path: Path) -> None:
    model = raw_model()
    write_model(model, tmp_path / "m.pt", PackageOptions(name="m", version="1"))
    scripted = torch.jit.load(tmp_path / "m.pt")
    names = {name for name, _ in scripted.named_buffers()}
    assert any("means_U" in name for name in names)
    assert not any("fold" in name for name in names)


@pytest.mark.parametrize("backend", [EACH_BACKEND[0]])
def test_a_graph_for_gpus_is_made_of_the_same_transforms(backend: str, tmp_path: Path) -> None:
    options = PackageOptions(name="m", version="1", backend=backend, device="cuda")
    write_model(raw_model(), tmp_path / "m.pt", options)
    code = torch.jit.load(tmp_path / "m.pt", map_location="cpu").code
    assert {"log1p", "searchsorted"} <= set(re.findall(r"torch\.(\w+)\(", code))
