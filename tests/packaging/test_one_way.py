"""A run's model and the same model as a module of a user's own become the same package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tessera.serving import ModelInputs, package_model
from tessera.serving.inspect.graph import graph_text, read_graph
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import ServableModel, make_servable
from tessera.serving.packaging.source import Source
from tessera.training.models.dlrm import DLRM
from tessera.training.models.ranking import MissingValueEncoder, RankingModel
from tessera.training.modules.hashing import FeatureHasher
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.package_factory import make_model
from tests.packaging.backends import EACH_BACKEND, NEEDS_TESSERA
from tests.packaging.batches import random_batch, sparse_features


class Clicks(nn.Module):
    """What a user writes who has trained a DLRM without `tessera train`."""

    def __init__(self, encoder: MissingValueEncoder, hasher: FeatureHasher, dlrm: DLRM) -> None:
        super().__init__()
        self.encoder, self.hasher, self.dlrm = encoder, hasher, dlrm

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        dense = self.encoder(dense, ids.stride())
        return torch.sigmoid(self.dlrm(dense, self.hasher(ids)).squeeze(1))


def own(model: RankingModel) -> Source:
    _, inputs, sample = ranking_source(model)
    return Clicks(model.encoder, model.hasher, model.arch), inputs, sample


CHOICES = {
    "as it comes": {},
    "bf16": {"dense_dtype": "bf16"},
    "three shards": {"shards": 3, "sharding": "row_wise"},
    "for GPUs": {"device": "cuda", "dense_dtype": "bf16"},
}
EVERY = [
    *(pytest.param(name, "tessera", marks=NEEDS_TESSERA) for name in CHOICES),
    pytest.param("as it comes", "fbgemm", marks=EACH_BACKEND[1].marks),
]


def operators(made: ServableModel) -> list[tuple[str, int]]:
    nodes = read_graph(made.scripted).nodes
    return [(node.name, len(node.arguments)) for node in nodes]


@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn"])
@pytest.mark.parametrize(("choice", "backend"), EVERY)
def test_the_same_graph_and_the_same_bits(arch: str, choice: str, backend: str) -> None:
    model = make_model(arch=arch)
    options = PackageOptions(name="m", backend=backend, **CHOICES[choice])
    run, module = make_servable(ranking_source(model), options), make_servable(own(model), options)
    assert operators(run) == operators(module)
    assert run.schema == module.schema
    assert (run.bytes_fp32, run.bytes_packaged) == (module.bytes_fp32, module.bytes_packaged)
    for size in (1, 5, 64):
        batch = random_batch(run.schema, size, max_length=5, seed=size)
        with torch.inference_mode():
            expected = run.scripted(*batch.tensors())["default"]
            assert torch.equal(module.scripted(*batch.tensors())["default"], expected)


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_a_module_is_measured_before_and_after(backend: str, tmp_path: Path) -> None:
    model = make_model()
    schema = make_servable(ranking_source(model), PackageOptions(name="m")).schema
    batch = random_batch(schema, 60, max_length=4, seed=1)
    arguments = (batch.float_features, sparse_features(batch, schema))
    labels = (torch.arange(60) % 3 == 0).float()
    module, inputs, sample = own(model)
    module.train()
    found = package_model(
        module,
        inputs,
        sample,
        out=tmp_path / "m.pt",
        backend=backend,
        dtype="int4",
        validation=[(arguments, labels)],
    ).evaluation
    assert module.training
    assert module.dlrm.training
    assert found is not None
    assert found.rows == 60
    runner = load_package(tmp_path / "m.pt").runner
    with torch.inference_mode():
        exact = module.eval()(*arguments)
    packaged = runner.forward(batch)["default"]
    assert found.max_abs_score_error == pytest.approx(float((packaged - exact).abs().max()))
    assert found.max_abs_score_error > 1e-4


@pytest.mark.parametrize("backend", EACH_BACKEND[:1])
def test_ids_that_something_else_reads_are_hashed_in_the_graph(backend: str) -> None:
    class Reads(Clicks):
        def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
            rows = self.hasher(ids)
            logits = self.dlrm(self.encoder(dense, ids.stride()), rows).squeeze(1)
            return logits + rows["user"].to_padded_dense(1).squeeze(1)

    model = make_model()
    _, inputs, sample = ranking_source(model)
    options = PackageOptions(name="m", backend=backend)
    source = Reads(model.encoder, model.hasher, model.arch), inputs or ModelInputs(), sample
    made = make_servable(source, options)
    assert "remainder" in graph_text(read_graph(made.scripted))
    batch = random_batch(made.schema, 9, max_length=3, seed=0)
    with torch.inference_mode():
        found = made.scripted(*batch.tensors())["default"]
        expected = source[0].eval()(batch.float_features, sparse_features(batch, made.schema))
    # int8 tables move the logits a little; rows of the user's table are whole numbers.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)
    plain = make_servable(ranking_source(model), options)
    assert "remainder" not in graph_text(read_graph(plain.scripted))


def test_a_model_in_memory_is_a_module_with_a_served_head(tmp_path: Path) -> None:
    model = make_model()
    by_model = write_model(model, tmp_path / "model.pt", PackageOptions(name="m"))
    by_module = package_model(*ranking_source(model), out=tmp_path / "module.pt", name="m")
    # The class in data.pkl and code/ has a number that grows with each script of a process.
    stored = [name for name in by_model.records if name.startswith("data/")]
    assert len(stored) > 5
    assert {n: by_model.records[n] for n in stored} == {n: by_module.records[n] for n in stored}
    assert by_model.schema == by_module.schema
