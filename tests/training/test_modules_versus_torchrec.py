"""The script that times modules beside TorchRec: its shapes, its cases on Tessera's side, and its last line."""

import pytest
import torch

from tessera.training.bench.module_steps import Case, Draws
from tessera.training.bench.modules_versus_torchrec import CASES, measure, summary
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
    shape = case.draw(Draws(torch.Generator().manual_seed(0)))
    assert shape == case.draw(Draws(torch.Generator().manual_seed(0)))
    assert shape.keys() <= SMALL.keys()
    step = case.make(libraries()[0], {key: SMALL[key] for key in shape}, device)
    assert step().numel() > 0
    assert step().numel() > 0


def test_steps_that_give_different_values_are_not_timed(monkeypatch):
    both = [Library("tessera", "tessera.training", {}), Library("torchrec", "torchrec", {})]
    monkeypatch.setattr("tessera.training.bench.modules_versus_torchrec.libraries", lambda: both)
    same = Case(lambda _: {}, lambda _library, _shape, _device: lambda: torch.ones(2))
    found = measure(same, {}, CPU, rounds=1, seconds=0.001)
    assert min(found["ratio"]) > 0
    assert min(found["tessera"]) > 0
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


@pytest.mark.parametrize("name", CASES)
def test_numbers_anywhere_are_in_wider_ranges_and_seeded(name):
    drawn = [Draws(torch.Generator().manual_seed(seed), anywhere=True) for seed in (1, 1)]
    shapes = [[CASES[name].draw(draws) for _ in range(20)] for draws in drawn]
    assert shapes[0] == shapes[1]
    assert len({str(shape) for shape in shapes[0]}) > 5


def test_a_number_anywhere_is_within_half_the_least_and_twice_the_most():
    draws = Draws(torch.Generator().manual_seed(2), anywhere=True)
    found = [draws.one_of(16, 64, step=4) for _ in range(300)]
    assert min(found) == 8
    assert max(found) == 128
    assert all(number % 4 == 0 for number in found)
    assert {draws.one_of("a", "b") for _ in range(20)} == {"a", "b"}
    assert {draws.one_of(False, True) for _ in range(20)} == {False, True}
    assert {Draws(draws.generator).one_of(3, 90) for _ in range(20)} == {3, 90}


def test_the_last_lines_name_the_worst():
    said = summary([("a", "x 1", 2.0, 0.9), ("b", "x 2", 0.5, 2.0), ("c", "x 3", 1.0, 1.0)])
    assert said[0].startswith("2 of 3 steps take no longer than TorchRec's by time of the proc")
    assert said[0].endswith("is 1.00, the worst 0.50 (b; x 2)")
    assert said[1].startswith("2 of 3 steps take no longer than TorchRec's by elapsed time")
    assert said[1].endswith("the worst 0.90 (a; x 1)")
    assert [line[:4] for line in said[2:]] == ["0.50", "2.00"]
    assert summary([])[0].startswith("no ratio")
