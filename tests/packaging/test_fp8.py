"""Dense layers of e4m3 numbers in packages for GPUs: the graph and its arithmetic, on the CPU, and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tessera.cli import main
from tessera.errors import UserError
from tessera.kernels import ops, reference
from tessera.serving.package.golden import FP8_TOLERANCE
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import TorchScriptRunner
from tessera.serving.packaging.calibration import CALIBRATION_ROWS, looked_at
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_model, write_model
from tessera.serving.packaging.passes.fp8 import HEADROOM, LARGEST, to_fp8, unit_of
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import ServableModel, make_servable
from tessera.serving.packaging.write.golden import golden_batch
from tessera.training.models.architectures.dlrm_dcn import DLRMDCNConfig
from tessera.training.models.config import TableConfig
from tessera.training.models.ranking import RankingModel, build_ranking_model
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.packaging.backends import NEEDS_TESSERA
from tests.packaging.user_models import bags, table

pytestmark = NEEDS_TESSERA
FLOAT8 = torch.float8_e4m3fn
DIM = 16


def options(**chosen: Any) -> PackageOptions:
    settings = {"name": "m", "backend": "tessera", "device": "cuda", "dense_dtype": "fp8"}
    return PackageOptions(**{**settings, **chosen})


@pytest.fixture(scope="module")
def dcn() -> RankingModel:
    """MLPerf's shape, small: every dense layer but the first and the last is a multiple of 16 wide."""
    torch.manual_seed(7)
    config = DLRMDCNConfig(
        embedding_dim=DIM,
        dense_layers=(32,),
        over_layers=(64, 32),
        dcn_num_layers=3,
        dcn_low_rank_dim=16,
        tables={name: TableConfig(rows=50) for name in ("a", "b", "c")},
    )
    return build_ranking_model(config, ["x", "y", "z"], ["a", "b", "c"]).eval()


@pytest.fixture(scope="module")
def served(dcn: RankingModel) -> ServableModel:
    return make_servable(ranking_source(dcn), options())


def calls(servable: ServableModel, name: str) -> list[fx.Node]:
    ops.load()
    operator = getattr(torch.ops.tessera, name)
    return list(servable.graph.graph.find_nodes(op="call_function", target=operator))


def test_numbers_pass_between_layers_as_e4m3(served: ServableModel):
    (lookup,) = calls(served, "lookup")
    assert lookup.kwargs["dtype"] == FLOAT8
    assert lookup.kwargs["dense"].args[-1] == FLOAT8  # the bottom layers' last one
    crosses = calls(served, "cross_layer_fp8")
    assert [cross.args[0] for cross in crosses] == [lookup] * 3
    assert [cross.args[1] for cross in crosses] == [lookup, *crosses[:2]]
    layers = calls(served, "linear_fp8")
    # One bottom layer, three to rank 16, two top ones, of which the last gives what a thin one reads.
    assert [layer.args[-1] for layer in layers] == [FLOAT8] * 5 + [torch.bfloat16]
    first, last = calls(served, "linear_thin")
    assert first.kwargs["dtype"] == FLOAT8
    assert last.args[0] is layers[-1]
    assert "dtype" not in last.kwargs
    assert not served.graph.graph.find_nodes(op="call_function", target=torch.clamp)
    weights = [b for b in served.graph.buffers() if b.dtype == FLOAT8]
    assert len(weights) == len(crosses) + len(layers)


def test_scores_are_near_those_of_float32(dcn: RankingModel, served: ServableModel):
    exact = make_servable(ranking_source(dcn), options(dense_dtype="fp32"))
    narrow = make_servable(ranking_source(dcn), options(dense_dtype="bf16"))
    assert served.bytes_packaged < narrow.bytes_packaged < exact.bytes_packaged
    batch = golden_batch(served.schema, seed=2)
    (found,), (expected,) = (
        TorchScriptRunner(each.scripted).forward(batch).values() for each in (served, exact)
    )
    assert 0 < float((found - expected).abs().max()) < FP8_TOLERANCE


class Odd(nn.Module):
    """A layer of e4m3 between one of 24 outputs, which stays bfloat16, and arithmetic in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tables = EmbeddingBagCollection([table("a", ["a"])])
        self.first, self.second = nn.Linear(24, 24), nn.Linear(32, 48, bias=False)
        self.head = nn.Linear(48, 1)

    def forward(self, x: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        both = torch.cat([torch.relu(self.first(x)), self.tables(ids).values()], dim=1)
        return self.head(torch.relu(self.second(both)) + 1).squeeze(1)


def test_what_others_give_is_rounded_where_it_is_read():
    module = Odd().eval()
    servable = make_servable((module, None, (torch.randn(3, 24), bags(["a"]))), options())
    (layer,) = calls(servable, "linear_fp8")
    assert layer.args[2] is None
    assert layer.args[-1] == torch.bfloat16
    rounded = layer.args[0].kwargs["dense"]  # beside the rows, from a layer in bfloat16
    assert (rounded.target, rounded.args[1]) == ("to", FLOAT8)
    plain = options(dense_dtype="fp32")
    exact = make_servable((module, None, (torch.randn(3, 24), bags(["a"]))), plain)
    batch = golden_batch(servable.schema, seed=3)
    (found,), (expected,) = (
        TorchScriptRunner(each.scripted).forward(batch).values() for each in (servable, exact)
    )
    largest = max(1.0, float(expected.abs().max()))
    assert 0 < float((found - expected).abs().max()) < FP8_TOLERANCE * largest


@pytest.mark.parametrize("largest", [0.0, 1e-6, 0.9, 448.0, 3e4])
def test_units_are_powers_of_two_with_room(largest):
    unit = unit_of(largest, HEADROOM)
    assert torch.frexp(torch.tensor(unit)).mantissa == 0.5
    assert HEADROOM * largest / unit <= LARGEST
    assert largest == 0 or HEADROOM * largest / unit > LARGEST / 2


def test_rounding_is_the_references():
    values = torch.randn(1000) * 3
    assert torch.equal(to_fp8(values, 0.25).float(), reference.to_float8(values * 4).float())
    assert float(to_fp8(torch.tensor([1e6]), 1.0).float()) == LARGEST


def test_activations_are_measured_on_the_rows_that_are_given(dcn: RankingModel):
    source = ranking_source(dcn)
    arguments, large = (
        tuple(torch.full_like(p, size) if isinstance(p, Tensor) else p for p in source[2])
        for size in (0.0, 1e4)
    )
    labels = torch.zeros(len(arguments[0]))
    scales = []
    for given in (arguments, large):
        servable = make_servable(source, options(), calibration=[(given, labels)])
        (lookup,) = calls(servable, "lookup")
        scales.append(lookup.kwargs["scale"])
    assert scales[0] > scales[1]  # the dense vector beside the rows is larger


def test_rows_that_can_be_read_once_are_all_evaluated():
    labels = torch.zeros(CALIBRATION_ROWS)
    rows = [((torch.full((1,), float(k)),), labels) for k in range(3)]
    first, every = looked_at(iter(rows))
    assert len(first) == 1
    assert [float(given[0]) for given, _ in every] == [0.0, 1.0, 2.0]
    assert looked_at(rows)[1] is rows


def test_it_is_for_gpus_alone():
    with pytest.raises(
        UserError, match="dense_dtype is fp8, which is for --device cuda; give that"
    ):
        options(device="cpu")


def test_the_command_line_takes_it(tmp_path: Path, capsys):
    out = tmp_path / "m.pt"
    arguments = ["package-model", "--factory", "tests.packaging.user_models:dcn", "--out", str(out)]
    assert main([*arguments, "--dense-dtype", "fp8", "--device", "cuda"]) == 0
    assert "dense layers fp8" in capsys.readouterr().out
    assert main(["verify", str(out)]) == 0


def test_a_module_of_ones_own_reports_its_change(tmp_path: Path):
    module = Odd().eval()
    sample = (torch.randn(3, 24), bags(["a"]))
    rows = [(sample, torch.tensor([0.0, 1.0, 1.0]))]
    manifest = package_model(
        module,
        None,
        sample,
        out=tmp_path / "m.pt",
        device="cuda",
        dense_dtype="fp8",
        validation=rows,
    )
    assert manifest.dense_dtype == "fp8"
    assert manifest.golden.atol >= FP8_TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("shards", [1, 2])
def test_on_a_gpu(dcn: RankingModel, tmp_path: Path, shards: int):
    for dense in ("fp32", "fp8"):
        write_model(dcn, tmp_path / f"{dense}.pt", options(dense_dtype=dense, shards=shards))
    devices = ["cuda:0"] * shards
    exact, narrow = (
        load_package(tmp_path / f"{dense}.pt", devices=devices) for dense in ("fp32", "fp8")
    )
    batch = golden_batch(exact.manifest.schema, seed=8)
    (found,), (expected,) = (p.runner.forward(batch).values() for p in (narrow, exact))
    assert 0 < float((found - expected).abs().max()) < FP8_TOLERANCE
