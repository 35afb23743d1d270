"""Packages for GPUs as far as a CPU can tell, and on the GPUs that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera.kernels.libraries import LibraryError, library_path
from tessera.serving import package_model
from tessera.serving.package.devices import default_devices, shard_of
from tessera.serving.package.golden import TOLERANCE
from tessera.serving.package.loading import LoadedPackage, load_package
from tessera.serving.package.records import PackageError
from tessera.serving.package.runner import HostBatch
from tessera.serving.packaging.inputs import ModelInputs
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.trace import FACTORIES as TORCH_FACTORIES
from tessera.training.models.config import TableConfig
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.package_factory import FEATURES, make_model
from tests.packaging import user_models
from tests.packaging.batches import random_batch
from tests.packaging.user_models import FACTORIES


def _built() -> bool:
    try:
        return bool(library_path("tessera_ops"))
    except LibraryError:
        return False


pytestmark = pytest.mark.skipif(not _built(), reason="the operators are not built (make build)")

RANKING = {**FEATURES, "watch": TableConfig(rows=90, weighted=True, pooling="mean")}
NAMES = [*FACTORIES, "ranking"]
# Sums of some ten terms of magnitude 1 in other orders, and the layers above them.
BOUND = 1e-4


def write(name: str, out: Path, **choices: object) -> None:
    if name == "ranking":
        model = make_model(features=RANKING)
        write_model(model, out, PackageOptions(name="m", backend="tessera", **choices))
    else:
        package_model(*FACTORIES[name](), out=out, backend="tessera", **choices)


def batch_for(package: LoadedPackage, size: int) -> HostBatch:
    batch = random_batch(package.manifest.schema, size, max_length=9, seed=size)
    if package.manifest.schema.dense_missing == "refuse":
        batch.float_features.nan_to_num_(0.0)
    return batch


def check_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for output, value in expected.items():
        assert found[output].device.type == "cpu"
        assert found[output].dtype == torch.float32
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(found[output], value, rtol=0, atol=BOUND * scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choices", [{}, {"shards": 2, "sharding": "row_wise"}])
def test_a_package_for_gpus_may_be_loaded_on_the_cpu(
    name: str, choices: dict[str, object], tmp_path: Path
) -> None:
    write(name, tmp_path / "gpu.pt", device="cuda", **choices)
    write(name, tmp_path / "cpu.pt")
    shards = int(choices.get("shards", 1))
    gpu = load_package(tmp_path / "gpu.pt", devices=["cpu"] * shards)
    cpu = load_package(tmp_path / "cpu.pt")
    assert gpu.manifest.device == "cuda"
    assert gpu.manifest.golden.atol >= TOLERANCE["cuda"]
    for size in (1, 2, 64):
        batch = batch_for(cpu, size)
        check_alike(gpu.runner.forward(batch), cpu.runner.forward(batch))


def test_devices_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write("dcn", tmp_path / "cpu.pt", shards=2)
    with pytest.raises(PackageError, match="has 2 shards, and 1 devices were given"):
        load_package(tmp_path / "cpu.pt", devices=["cpu"])
    with pytest.raises(
        PackageError, match="packaged for device 'cpu', asked for is 'cuda:0'; pack"
    ):
        load_package(tmp_path / "cpu.pt", devices=["cuda:0", "cuda:0"])
    with pytest.raises(PackageError, match="packaged for device 'cpu', asked for is 'cuda'"):
        load_package(tmp_path / "cpu.pt", device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_package_for_gpus_is_refused(tmp_path: Path) -> None:
    write("dcn", tmp_path / "gpu.pt", device="cuda")
    with pytest.raises(PackageError, match="cannot be loaded: torch sees no CUDA device here"):
        load_package(tmp_path / "gpu.pt")


def test_shards_take_turns_on_fewer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert default_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]


class Sizes(user_models.Branches):
    """Makes tensors of sizes alone, which have to be where the inputs are."""

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        places = torch.arange(dense.size(0))
        return self.tables(ids).values().sum(dim=1) + places * torch.zeros(dense.size(0))


def test_a_gpus_graph_names_no_device_and_ends_in_copies_to_the_cpu() -> None:
    _, _, sample = user_models.branches()
    options = PackageOptions(name="m", device="cuda", backend="tessera")
    graph = make_servable((Sizes(), ModelInputs(), sample), options).graph.graph
    made = [node for node in graph.nodes if node.target in TORCH_FACTORIES]
    assert len(made) == 2
    for node in made:
        assert node.kwargs["device"].target is getattr
    assert not [node for node in graph.nodes if "cuda" in str(node.args) + str(node.kwargs)]
    (last,) = graph.find_nodes(op="output")
    assert [node.target for node in last.args[0].values()] == ["cpu"]


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_one_gpu_answers_as_the_cpu(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "gpu.pt", device="cuda")
    write(name, tmp_path / "cpu.pt")
    on_gpu = load_package(tmp_path / "gpu.pt")
    on_cpu = load_package(tmp_path / "cpu.pt")
    for size in (1, 3, 512):
        batch = batch_for(on_cpu, size)
        check_alike(on_gpu.runner.forward(batch), on_cpu.runner.forward(batch))


@gpu
@needs_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("shards", [2, 4])
def test_several_gpus_answer_as_one(name: str, sharding: str, shards: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < shards:
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs")
    few_tables = {
        "tutorial": 2,
        "positioned": 2,
        "reshuffled": 2,
        "two_tower": 2,
        "hashed": 1,
        "dcn": 3,
        "wide": 3,
        "multi_task": 3,
    }
    if sharding == "table_wise" and few_tables.get(name, 99) < shards:
        pytest.skip("fewer tables than shards")
    if sharding == "column_wise" and name == "wide":
        pytest.skip("tables of one column")
    write(name, tmp_path / "one.pt", device="cuda")
    write(name, tmp_path / "many.pt", device="cuda", shards=shards, sharding=sharding)
    one, many = load_package(tmp_path / "one.pt"), load_package(tmp_path / "many.pt")
    assert {
        shard_of(p.device.replace("cuda:", "tessera_shard_")) for p in many.manifest.plan.placements
    } == set(range(shards))
    for size in (1, 3, 512):
        batch = batch_for(one, size)
        found, expected = many.runner.forward(batch), one.runner.forward(batch)
        if sharding == "row_wise":
            check_alike(found, expected)
            continue
        for output, value in expected.items():
            assert torch.equal(found[output], value), output


@gpu
@needs_gpu
def test_shards_may_be_put_on_other_gpus(tmp_path: Path) -> None:
    last = f"cuda:{torch.cuda.device_count() - 1}"
    write("multi_task", tmp_path / "many.pt", device="cuda", shards=2, sharding="row_wise")
    usual = load_package(tmp_path / "many.pt")
    moved = load_package(tmp_path / "many.pt", devices=[last, "cuda:0"])
    batch = batch_for(usual, 40)
    check_alike(moved.runner.forward(batch), usual.runner.forward(batch))
