"""Lookups in bfloat16 in packages for GPUs: which of them, and what they write beside their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tessera.serving.package.golden import BF16_TOLERANCE
from tessera.serving.package.runner import TorchScriptRunner
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.servable import ServableModel, make_servable
from tessera.serving.packaging.write.golden import golden_batch
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.packaging.backends import NEEDS_TESSERA
from tests.packaging.user_models import bags, table

pytestmark = NEEDS_TESSERA
NARROW = torch.bfloat16
DIM = 8  # of `table`


class Wide(nn.Module):
    """Layers over the dense vector of ``dense`` columns and the rows of two tables beside it."""

    def __init__(self, dense: int = 16, *, first: bool = True, reads_rows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tables = EmbeddingBagCollection([table("a", ["a"]), table("b", ["b"])])
        self.bottom = nn.Linear(20, dense)
        self.top, self.head = nn.Linear(dense + 2 * DIM, 16), nn.Linear(16, 1)
        self.first, self.reads_rows = first, reads_rows

    def forward(self, x: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        dense, rows = self.bottom(x), self.tables(ids).values()
        both = torch.cat([dense, rows] if self.first else [rows, dense], dim=1)
        logits = self.head(torch.relu(self.top(both))).squeeze(1)
        return torch.sigmoid(logits + rows.sum(dim=1) if self.reads_rows else logits)


def served(module: nn.Module, **chosen: Any) -> ServableModel:
    sample = (torch.randn(3, 20), bags(["a", "b"]))
    options = PackageOptions(
        **{"name": "m", "backend": "tessera", "device": "cuda", "dense_dtype": "bf16", **chosen}
    )
    return make_servable((module.eval(), None, sample), options)


def calls(servable: ServableModel, operator: object) -> list[fx.Node]:
    return list(servable.graph.graph.find_nodes(op="call_function", target=operator))


def lookups(servable: ServableModel) -> list[fx.Node]:
    return calls(servable, torch.ops.tessera.lookup)


def same_scores(module: nn.Module, servable: ServableModel) -> bool:
    exact = served(module, dense_dtype="fp32")
    batch = golden_batch(servable.schema, seed=4)
    (found,) = TorchScriptRunner(servable.scripted).forward(batch).values()
    (expected,) = TorchScriptRunner(exact.scripted).forward(batch).values()
    return float((found - expected).abs().max()) < BF16_TOLERANCE


def test_rows_are_rounded_by_the_lookup_beside_the_dense_vector():
    module = Wide()
    servable = served(module)
    (lookup,) = lookups(servable)
    assert lookup.kwargs["dtype"] == NARROW
    assert lookup.args[4] == 16 + 2 * DIM
    assert lookup.kwargs["dense"] is not None
    assert calls(servable, torch.cat) == []
    assert same_scores(module, servable)


@pytest.mark.parametrize("module", [Wide(20), Wide(first=False)])
def test_what_cannot_stand_before_the_rows_is_concatenated(module: Wide):
    servable = served(module)  # 20 columns are not whole 16 bytes
    (lookup,) = lookups(servable)
    assert lookup.kwargs["dtype"] == NARROW
    assert lookup.args[4] == 2 * DIM
    assert "dense" not in lookup.kwargs
    assert len(calls(servable, torch.cat)) == 1
    assert same_scores(module, servable)


def test_rows_that_others_read_stay_float32():
    module = Wide(reads_rows=True)
    servable = served(module)
    (lookup,) = lookups(servable)
    assert "dtype" not in lookup.kwargs
    assert same_scores(module, servable)


def test_packages_of_other_kinds_have_float32_rows():
    for chosen in ({"device": "cpu"}, {"dense_dtype": "fp32"}):
        (lookup,) = lookups(served(Wide(), **chosen))
        assert "dtype" not in lookup.kwargs


def test_sharded_rows_are_rounded_behind_the_lookups():
    module = Wide()
    servable = served(module, shards=2)
    assert all("dtype" not in lookup.kwargs for lookup in lookups(servable))
    (joined,) = calls(servable, torch.cat)[-1:]
    assert [type(part) for part in joined.args[0]] == [fx.Node, fx.Node]
    assert same_scores(module, servable)
