"""Options of architectures, packaged for GPUs: the passes leave the answers alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.training.models.config import ModelConfig, TableConfig
from tessera.training.models.ranking import RankingModel, build_ranking_model
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.packaging.backends import EACH_BACKEND, NEEDS_TESSERA
from tests.packaging.batches import random_batch

TERMS = {"first_order": True, "fm": True}
MODELS = {
    "dlrm": {**TERMS, "concat": True},
    "dlrm_dcn": {**TERMS, "concat": True, "dcn_num_layers": 2},
    "mmoe": TERMS,
}


def make(arch: str) -> RankingModel:
    torch.manual_seed(1)
    config = ModelConfig(
        arch=arch,
        embedding_dim=16,
        rows=50,
        embedding_init=0.3,
        tables={"b": TableConfig(pooling="mean")},
        **MODELS[arch],
    )
    model = build_ranking_model(config, ["x", "y"], ["a", "b", "c"], labels=["p", "q"]).eval()
    for name, parameter in model.named_parameters():
        if "first_order" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def exact_scores(model: RankingModel, batch: HostBatch) -> Tensor:
    lengths, values = batch.id_list_features_lengths, batch.id_list_features_values
    ids = KeyedJaggedTensor(["a", "b", "c"], values.long(), lengths=lengths)
    with torch.no_grad():
        return torch.sigmoid(model(batch.float_features, ids))


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("arch", MODELS)
def test_a_package_answers_as_the_model(arch: str, backend: str, tmp_path: Path) -> None:
    model, out = make(arch), tmp_path / "m.pt"
    write_model(model, out, PackageOptions(name="m", backend=backend, dtype="fp32"))
    package = load_package(out)
    batch = random_batch(package.manifest.schema, 33, max_length=5, seed=1)
    found = package.runner.forward(batch)
    expected = exact_scores(model, batch)
    for place, name in enumerate(("p", "q")):
        torch.testing.assert_close(found[name], expected[:, place], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dense_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("arch", [pytest.param(arch, marks=NEEDS_TESSERA) for arch in MODELS])
def test_a_package_for_gpus_answers_as_the_cpus(
    arch: str, dense_dtype: str, tmp_path: Path
) -> None:
    model = make(arch)
    for device in ("cpu", "cuda"):
        options = PackageOptions(
            name="m", backend="tessera", device=device, dense_dtype=dense_dtype
        )
        write_model(model, tmp_path / f"{device}.pt", options)
    cpu = load_package(tmp_path / "cpu.pt")
    gpu = load_package(tmp_path / "cuda.pt", devices=["cpu"])
    # Sums in other orders; in bfloat16 with 8 bits, through some five layers.
    bound = 1e-4 if dense_dtype == "fp32" else 2e-2
    for size in (1, 64):
        batch = random_batch(cpu.manifest.schema, size, max_length=5, seed=size)
        expected = cpu.runner.forward(batch)
        for name, value in gpu.runner.forward(batch).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=bound)
