"""A sample's answers have the same bits in every batch, whatever the module does with its samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tessera.serving import ModelInputs, package_model
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.passes.padding import pad_dense
from tessera.serving.packaging.passes.whole_vectors import FUNCTIONS
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.source import Source
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.packaging.backends import EACH_BACKEND
from tests.packaging.batches import random_batch
from tests.packaging.user_models import FACTORIES, bags, table

WHOLE = 43  # samples of the batch that the others are cut from
SPANS = [(b, b + n) for n in (1, 2, 3, 4, 5, 7, 16, 31, 42) for b in (0, 3, 11) if b + n <= WHOLE]


def cut(lengths: Tensor, values: Tensor, span: tuple[int, int]) -> tuple[Tensor, list[int]]:
    """The lengths of some samples, and the places of their ids among ``values``."""
    begin, end = span
    by_feature = lengths.view(-1, WHOLE)
    ends = lengths.cumsum(0).view(-1, WHOLE)
    starts = ends - by_feature
    places = [
        place
        for feature in range(len(by_feature))
        for place in range(int(starts[feature, begin]), int(ends[feature, end - 1]))
    ]
    return by_feature[:, begin:end].flatten().contiguous(), places


def samples(batch: HostBatch, span: tuple[int, int]) -> HostBatch:
    plain, ids = cut(batch.id_list_features_lengths, batch.id_list_features_values, span)
    scored, others = cut(
        batch.id_score_list_features_lengths, batch.id_score_list_features_values, span
    )
    return HostBatch(
        float_features=batch.float_features[span[0] : span[1]],
        id_list_features_lengths=plain,
        id_list_features_values=batch.id_list_features_values[ids],
        id_score_list_features_lengths=scored,
        id_score_list_features_values=batch.id_score_list_features_values[others],
        id_score_list_features_weights=batch.id_score_list_features_weights[others],
        batch_size=span[1] - span[0],
    )


def check_same_bits(path: Path) -> None:
    loaded = load_package(path)
    whole = random_batch(loaded.manifest.schema, WHOLE, max_length=5, seed=1)
    whole.float_features.nan_to_num_(0.5)
    expected = loaded.runner.forward(whole)
    for span in SPANS:
        found = loaded.runner.forward(samples(whole, span))
        for name, value in found.items():
            assert torch.equal(value, expected[name][span[0] : span[1]]), (name, span)


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("name", FACTORIES)
def test_in_every_batch(name: str, backend: str, tmp_path: Path) -> None:
    package_model(*FACTORIES[name](), out=tmp_path / "m.pt", backend=backend)
    check_same_bits(tmp_path / "m.pt")


class Elementwise(nn.Module):
    """Every function of `FUNCTIONS`, on tensors of one to three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([table("a", ["a"], dim=8), table("b", ["b"], dim=8)])

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        x = self.tables(ids).values().abs() + dense.sum(dim=1, keepdim=True).abs()
        x = (x + 0.01) / (x + 1)
        found = {}
        for number, function in enumerate(sorted(FUNCTIONS, key=str)):
            given = (x, x.sum(dim=1), x.view(-1, 2, 8))[number % 3]
            result = getattr(given, function)() if isinstance(function, str) else function(given)
            found[f"f{number}"] = result if number % 3 == 1 else result.flatten(1)
        return found


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_functions_that_vectors_round_otherwise(backend: str, tmp_path: Path) -> None:
    sample = (torch.ones(3, 2), bags(["a", "b"]))
    package_model(Elementwise(), None, sample, out=tmp_path / "m.pt", backend=backend)
    check_same_bits(tmp_path / "m.pt")


class Listwise(nn.Module):
    """The share of each sample in its batch: an answer that other samples change on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([table("a", ["a"])])
        self.over = nn.Linear(8 + 2, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        score = self.over(torch.cat([dense, self.tables(ids).values()], dim=1))
        return torch.matmul(torch.softmax(score, dim=0), torch.ones(1, 1)).squeeze(1)


def listwise() -> Source:
    torch.manual_seed(3)
    return Listwise(), ModelInputs(), (torch.randn(3, 2), bags(["a"]))


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_a_module_that_looks_at_all_samples_gets_no_others(backend: str) -> None:
    source = listwise()
    made = make_servable(source, PackageOptions(name="m", backend=backend))
    assert not made.graph.graph.find_nodes(op="call_function", target=pad_dense)
    batch = random_batch(made.schema, 5, max_length=3, seed=0)
    batch.float_features.nan_to_num_(0.5)
    with torch.inference_mode():
        shares = made.scripted(*batch.tensors())["default"]
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-6)
