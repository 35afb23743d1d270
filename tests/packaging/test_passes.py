"""The registry of passes, and the example of docs/extending.md, "A pass over the served graph"."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.passes import registry
from tessera.serving.packaging.passes.registry import Pass, Target, passes_for
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.source import Source
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests import REPOSITORY
from tests.packaging.backends import EACH_BACKEND
from tests.packaging.user_models import bags, table

TEXT = (REPOSITORY / "docs" / "extending.md").read_text()
SECTION = TEXT.split("\n## A pass over the served graph\n")[1].split("\n## ")[0]
CPU = Target(backend="tessera", device="cpu", dense_dtype="fp32")


@pytest.fixture(autouse=True)
def own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    passes_for(CPU)  # loads those of the packager
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([table("a", ["a"])])
        self.layer = nn.Linear(8, 8)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        x = self.layer(self.tables(ids).values())
        return (x * torch.sigmoid(x)).sum(dim=1)


def source() -> Source:
    return Swish(), None, (bags(["a"]),)


def graph_of(backend: str) -> str:
    made = make_servable(source(), PackageOptions(name="m", backend=backend))
    return str(made.scripted.inlined_graph)


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_the_example_of_the_documentation(backend: str) -> None:
    before = graph_of(backend)
    assert "aten::sigmoid" in before
    assert "aten::silu" not in before
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    exec(compile(code, "docs/extending.md", "exec"), {})
    after = graph_of(backend)
    assert "aten::silu" in after
    assert "aten::sigmoid" not in after


def test_a_pass_that_changes_answers_is_refused() -> None:
    @Pass(name="double", order=60)
    def double(module: torch.fx.GraphModule, target: Target) -> None:
        assert target.device == "cpu"
        (last,) = module.graph.find_nodes(op="output")
        (outputs,) = last.args
        with module.graph.inserting_before(last):
            last.args = (
                {n: module.graph.call_function(torch.add, (v, v)) for n, v in outputs.items()},
            )

    with pytest.raises(UserError, match="differs between the module and its traced graph"):
        make_servable(source(), PackageOptions(name="m"))


def test_a_name_is_given_once() -> None:
    (first, *_) = passes_for(CPU)
    with pytest.raises(ValueError, match=f"two passes called '{first.name}'; give each its own"):
        Pass(name=first.name, order=1)(lambda *_: 0)


def test_the_documentation_lists_every_pass_in_order() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", SECTION, re.MULTILINE)
    targets = itertools.product(("tessera", "fbgemm"), ("cpu", "cuda"), ("fp32", "bf16", "fp8"))
    known = {
        (str(made.order), made.name)
        for backend, device, dense in targets
        for made in passes_for(Target(backend=backend, device=device, dense_dtype=dense))
    }
    assert set(rows) == known
    assert [int(order) for order, _ in rows] == sorted(int(order) for order, _ in rows)
    for backend in ("tessera", "fbgemm"):
        names = [
            p.name for p in passes_for(Target(backend=backend, device="cpu", dense_dtype="fp32"))
        ]
        assert names == [name for _, name in rows if name in names]
