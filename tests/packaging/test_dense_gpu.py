"""Dense layers in bfloat16 in packages for GPUs: the graph, on the CPU, and the answers on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from tessera.cli import main
from tessera.kernels import ops
from tessera.serving.package.golden import BF16_TOLERANCE
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import TorchScriptRunner
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.packaging.passes.crosses import fuse_crosses
from tessera.serving.packaging.passes.narrow import (
    LINEAR_RELU,
    THIN,
    keep_narrow,
    narrow_linears,
)
from tessera.serving.packaging.passes.registry import Target
from tessera.serving.packaging.passes.tensors import observe
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.type_report import compare_types
from tessera.serving.packaging.write.golden import golden_batch
from tessera.training.modules.crossnet import LowRankCrossNet
from tests.package_factory import make_model
from tests.packaging import user_models
from tests.packaging.backends import NEEDS_TESSERA

NARROW = torch.bfloat16


def rounded(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer in float64 from rounded numbers, its result rounded."""
    weight, bias = (
        layer.weight.detach().to(NARROW).double(),
        layer.bias.detach().to(NARROW).double(),
    )
    return (x.to(NARROW).double() @ weight.t() + bias).to(NARROW).float()


class Tower(nn.Module):
    """Two wide layers in a row, one behind float32 arithmetic, and a thin one; 35 is not a multiple of 8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(35, 48), nn.Linear(48, 64)
        self.third, self.head = nn.Linear(64, 35, bias=False), nn.Linear(35, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.first(x)))
        crossed = self.third(hidden) * x + x
        return self.head(nn.functional.relu(crossed))


def casts(module: fx.GraphModule) -> list[torch.dtype]:
    return [node.args[1] for node in module.graph.find_nodes(op="call_method", target="to")]


class InlineLinears(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return False


def traced(module: nn.Module, sample: Tensor) -> fx.GraphModule:
    graph = fx.GraphModule(module, InlineLinears().trace(module))
    observe(graph, sample)
    return graph


TARGET = Target(backend="tessera", device="cuda", dense_dtype="bf16")


class TestCrosses:
    pytestmark = NEEDS_TESSERA

    @pytest.fixture(autouse=True)
    def _operators(self):
        ops.load()

    def fused(self, module: nn.Module, x: Tensor) -> fx.GraphModule:
        graph = traced(module, x)
        narrow_linears(graph)
        keep_narrow(graph)
        fuse_crosses(graph, TARGET)
        graph.recompile()
        return graph

    def operators(self, graph: fx.GraphModule, operator: object) -> int:
        return len(graph.graph.find_nodes(op="call_function", target=operator))

    def test_a_layer_and_what_follows_it_are_one_operator(self):
        tower, x = Tower(), torch.randn(7, 35)
        graph = self.fused(tower, x)
        assert self.operators(graph, torch.ops.tessera.cross_layer) == 1
        assert self.operators(graph, torch.addcmul) == 0
        # x is rounded once for both readers, and what the thin layer reads is widened.
        assert casts(graph) == [NARROW, torch.float32]
        hidden = rounded(torch.relu(rounded(x, tower.first)), tower.second)
        weight = tower.third.weight.detach().to(NARROW).float()
        narrow = x.to(NARROW).float()
        crossed = (narrow * (hidden @ weight.t()) + narrow).to(NARROW).float()
        expected = tower.head(torch.relu(crossed)).detach()
        torch.testing.assert_close(graph(x), expected, rtol=2**-7, atol=2**-8)

    def test_layers_pass_bfloat16_to_each_other(self):
        network, x = LowRankCrossNet(48, 3, 16), torch.randn(9, 48)
        graph = self.fused(network, x)
        assert self.operators(graph, torch.ops.tessera.cross_layer) == 3
        assert casts(graph) == [NARROW, torch.float32]
        found, expected = graph(x), network(x).detach()
        assert 0 < float((found - expected).abs().max()) < 2**-6 * float(expected.abs().max())

    def test_a_product_that_others_also_read_stays_a_layer(self):
        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(16, 16)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                y = self.layer(x)
                return x * y + x, y

        graph = self.fused(Shared(), torch.randn(3, 16))
        assert self.operators(graph, torch.ops.tessera.cross_layer) == 0
        assert self.operators(graph, nn.functional.linear) == 1

    def test_vectors_of_other_shapes_stay(self):
        class Broadcast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.factor = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

            def forward(self, x: Tensor) -> Tensor:
                return self.factor * self.layer(x) + x

        graph = self.fused(Broadcast(), torch.randn(3, 16))
        assert self.operators(graph, torch.ops.tessera.cross_layer) == 0


def test_the_graph_rounds_where_a_layer_begins_and_ends():
    tower, x = Tower(), torch.randn(7, 35)
    graph = traced(tower, x)
    saved = narrow_linears(graph)
    assert saved == 2 * sum(
        part.weight.numel() for part in (tower.first, tower.second, tower.third)
    )
    before = graph(x)
    assert casts(graph) == [NARROW, torch.float32] * 3
    keep_narrow(graph)
    # x narrow for the first layer, the third one's output wide: all between is bfloat16.
    assert casts(graph) == [NARROW, torch.float32]
    assert torch.equal(graph(x), before)
    assert len(graph.graph.find_nodes(op="call_function", target=LINEAR_RELU)) == 1
    assert 0 < float((before - tower(x)).detach().abs().max()) < 2**-6


def test_layers_are_those_of_rounded_numbers():
    tower = Tower()
    for layer, shape in ((tower.first, (5, 35)), (tower.first, (5, 3, 35)), (tower.third, (2, 64))):
        x = torch.randn(shape)
        graph = traced(nn.Sequential(layer), x)
        narrow_linears(graph)
        found = graph(x)
        assert found.dtype == torch.float32
        assert found.shape == (*shape[:-1], layer.out_features)
        if layer.bias is not None:
            # One rounding of a sum of 32 float32 products: at most a neighbour in bfloat16.
            torch.testing.assert_close(found, rounded(x, layer), rtol=2**-7, atol=1e-6)


def test_a_layer_that_is_called_twice_is_stored_once():
    layer = nn.Linear(16, 16)
    graph = traced(nn.Sequential(layer, layer), torch.ones(2, 16))
    assert narrow_linears(graph) == 2 * 16 * 16
    assert len(dict(graph.named_buffers())) == 2


def test_what_others_also_read_stays_wide():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = self.first(x)
            return torch.relu(hidden), self.second(hidden), hidden + 1

    graph = traced(Both(), torch.ones(3, 16))
    narrow_linears(graph)
    before = graph(torch.ones(3, 16))
    keep_narrow(graph)
    after = graph(torch.ones(3, 16))
    assert all(
        torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(after, before, strict=True)
    )
    assert casts(graph).count(NARROW) == 1


def test_a_modules_own_call_of_the_fused_layer_is_left_alone():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(16, 16)), nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(LINEAR_RELU(self.bias, x, self.weight).to(torch.float32))

    graph = traced(Own(), torch.ones(3, 16))
    keep_narrow(graph)
    assert casts(graph) == [torch.float32]
    assert torch.equal(graph(torch.ones(3, 16)), torch.full((3, 16), 17.0))


@pytest.mark.parametrize("shape", [(THIN - 1, 64), (64, THIN - 1), (1, 1)])
def test_thin_layers_stay(shape):
    layer = nn.Linear(*shape)
    graph = traced(nn.Sequential(layer), torch.ones(2, shape[0]))
    assert narrow_linears(graph) == 0
    assert casts(graph) == []


def options(**chosen):
    return PackageOptions(name="m", backend="tessera", device="cuda", dense_dtype="bf16", **chosen)


class TestPackages:
    pytestmark = NEEDS_TESSERA

    def test_the_graph_of_a_model(self):
        model = make_model(dense_layers=(32,), over_layers=(64, 32))
        servable = make_servable(ranking_source(model), options())
        exact = make_servable(
            ranking_source(model), PackageOptions(name="m", backend="tessera", device="cuda")
        )
        assert 0 < servable.bytes_packaged < exact.bytes_packaged
        batch = golden_batch(servable.schema, seed=2)
        (found,) = TorchScriptRunner(servable.scripted).forward(batch).values()
        (expected,) = TorchScriptRunner(exact.scripted).forward(batch).values()
        assert 0 < float((found - expected).abs().max()) < BF16_TOLERANCE
        assert NARROW in casts(servable.graph)

    @pytest.mark.parametrize("name", ["dcn", "multi_task", "two_tower"])
    def test_modules_of_ones_own(self, name):
        module, inputs, sample = user_models.FACTORIES[name]()
        # make_module_servable itself holds the script against the swapped module.
        servable = make_servable((module, inputs, sample), options())
        plain = PackageOptions(name="m", backend="tessera", device="cuda")
        exact = make_servable((module, inputs, sample), plain)
        assert servable.bytes_packaged <= exact.bytes_packaged
        batch = golden_batch(servable.schema, seed=2)
        found = TorchScriptRunner(servable.scripted).forward(batch)
        expected = TorchScriptRunner(exact.scripted).forward(batch)
        for output, value in expected.items():
            bound = BF16_TOLERANCE * max(1.0, float(value.abs().max()))
            assert float((found[output] - value).abs().max()) <= bound, output

    def test_the_report_counts_the_layers_as_they_are_packaged(self):
        model = make_model(dense_layers=(32,), over_layers=(64, 32))
        report = compare_types(
            options(), lambda o: make_servable(ranking_source(model), o), lambda *_: None
        )
        # The smallest comes first: fp8 beside the bf16 that is chosen.
        assert [choice.dense for choice in report.choices[:2]] == ["fp8", "bf16"]
        assert report.chosen.bytes == make_servable(ranking_source(model), options()).bytes_packaged

    def test_the_command_line_takes_it(self, tmp_path: Path, capsys):
        out = tmp_path / "m.pt"
        arguments = [
            "package-model",
            "--factory",
            "tests.packaging.user_models:dcn",
            "--out",
            str(out),
        ]
        assert main([*arguments, "--dense-dtype", "bf16", "--device", "cuda"]) == 0
        assert "dense layers bf16" in capsys.readouterr().out
        assert main(["verify", str(out)]) == 0
        verified = capsys.readouterr().out
        assert ("on the CPU, as there is no GPU" in verified) is not torch.cuda.is_available()

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
    @pytest.mark.parametrize("shards", [1, 2])
    def test_on_a_gpu(self, tmp_path: Path, shards):
        model = make_model(dense_layers=(32,), over_layers=(64, 32))
        for dense in ("fp32", "bf16"):
            chosen = PackageOptions(
                name="m", backend="tessera", device="cuda", dense_dtype=dense, shards=shards
            )
            write_model(model, tmp_path / f"{dense}.pt", chosen)
        devices = ["cuda:0"] * shards
        exact, narrow = (
            load_package(tmp_path / f"{dense}.pt", devices=devices) for dense in ("fp32", "bf16")
        )
        assert narrow.manifest.golden.atol == BF16_TOLERANCE
        batch = golden_batch(exact.manifest.schema, seed=8)
        (found,), (expected,) = (p.runner.forward(batch).values() for p in (narrow, exact))
        assert 0 < float((found - expected).abs().max()) < BF16_TOLERANCE
