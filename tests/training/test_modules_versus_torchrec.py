"""The script that times modules beside TorchRec: its shapes, its cases on Tessera's side, and its last line."""

import pytest
import torch

from tessera.training.bench.module_steps import Case
from tessera.training.bench.modules_versus_torchrec import CASES, measure, worst
from tessera.training.bench.sharded_steps import Library, libraries

CPU = torch.device("cpu")
SMALL = {
    "rows": 100,
    "ids": 20,
    "policy": "LRU_EvictionPolicy",
    "interval": 2,
    "dim": 8,
    "metric": "NE",
    "batch": 16,
    "tasks": 2,
    "every": 2,
    "features": 4,
    "tables": 2,
    "window": 20,
    "fused": False,
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_its_shapes_and_takes_steps(name, device):
    case = CASES[name]
    shape = case.draw(torch.Generator().manual_seed(0))
    assert shape == case.draw(torch.Generator().manual_seed(0))
    assert shape.keys() <= SMALL.keys()
    step = case.make(libraries()[0], {key: SMALL[key] for key in shape}, device)
    assert step().numel() > 0
    assert step().numel() > 0


def test_steps_that_give_different_values_are_not_timed(monkeypatch):
    both = [Library("tessera", "tessera.training", {}), Library("torchrec", "torchrec", {})]
    monkeypatch.setattr("tessera.training.bench.modules_versus_torchrec.libraries", lambda: both)
    same = Case(lambda _: {}, lambda _library, _shape, _device: lambda: torch.ones(2))
    found = measure(same, {}, CPU, rounds=1, seconds=0.001)
    assert found["ratio"] > 0
    other = Case(
        lambda _: {}, lambda library, _shape, _device: lambda: torch.full((2,), len(library.name))
    )
    with pytest.raises(AssertionError):
        measure(other, {}, CPU, rounds=1, seconds=0.001)

    def refuses(library, _shape, _device):
        if library.name == "torchrec":
            raise RuntimeError("GPUs alone\nand more")
        return lambda: torch.ones(2)

    found = measure(Case(lambda _: {}, refuses), {}, CPU, rounds=1, seconds=0.001)
    assert found["errors"] == {"torchrec": "RuntimeError: GPUs alone"}
    assert "ratio" not in found


def test_the_last_line_names_the_worst():
    said = worst([(2.0, "a"), (0.5, "b"), (1.0, "c")])
    assert said.startswith("2 of 3 steps take no longer")
    assert said.endswith("is 1.00, the worst 0.50 (b)")
    assert worst([]).startswith("no ratio")
