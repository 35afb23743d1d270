"""Packages whose dense layers are stored in bfloat16."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tessera.cli import main
from tessera.errors import UserError
from tessera.kernels import reference
from tessera.serving.inspect.compare import compare
from tessera.serving.package.golden import BF16_TOLERANCE, TOLERANCE
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import TorchScriptRunner
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_model, write_model
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.type_report import (
    CHOSEN,
    SAME_TABLES,
    as_html,
    as_text,
    compare_types,
)
from tessera.serving.packaging.write.golden import golden_batch
from tests.instruction_sets import output_with
from tests.package_factory import make_model
from tests.packaging import user_models
from tests.packaging.backends import NEEDS_TESSERA

pytestmark = NEEDS_TESSERA

# Loads a package, which compares the golden answers, and prints the answers to its requests.
LOADING = """
import sys, torch
torch.set_num_threads(1)
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.write.golden import golden_batch
loaded = load_package(sys.argv[1])
print(loaded.runner.forward(golden_batch(loaded.manifest.schema, seed=3))["default"].tolist())
"""


def options(**chosen):
    return PackageOptions(name="m", backend="tessera", **{"dense_dtype": "bf16", **chosen})


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("both"), make_model()
    for dense in ("fp32", "bf16"):
        write_model(model, folder / f"{dense}.pt", options(dense_dtype=dense))
    return folder / "fp32.pt", folder / "bf16.pt"


def test_the_manifest_says_so_and_counts_the_bytes(both):
    exact, narrow = (load_package(path).manifest for path in both)
    assert (exact.dense_dtype, narrow.dense_dtype) == ("fp32", "bf16")
    assert exact.golden.atol == TOLERANCE["cpu"]
    assert narrow.golden.atol == BF16_TOLERANCE
    linears = [part for part in make_model().modules() if isinstance(part, torch.nn.Linear)]
    weights = sum(linear.weight.numel() for linear in linears)
    assert exact.bytes_packaged - narrow.bytes_packaged == 2 * weights
    assert exact.bytes_fp32 == narrow.bytes_fp32


def test_answers_are_those_of_rounded_layers(both, monkeypatch):
    # The same graph with the plain reference in the operator's place.
    servable = make_servable(ranking_source(make_model()), options())
    batch = golden_batch(servable.schema, seed=5)
    found = load_package(both[1]).runner.forward(batch)["default"]
    exact = load_package(both[0]).runner.forward(batch)["default"]

    def plain(x, weights, bias, outputs, relu):
        tiles = weights.view(*weights.shape[:2], 16, 16, 2)
        rows = tiles.permute(0, 3, 1, 2, 4).reshape(16 * len(weights), -1)
        return reference.linear_bf16(
            x, rows[:outputs, : x.shape[1]].float(), bias[:outputs], relu=relu
        )

    graph = servable.graph
    layers = graph.graph.find_nodes(op="call_function", target=torch.ops.tessera.linear_bf16)
    assert len(layers) == 5
    for node in layers:
        node.target = plain
    graph.recompile()
    assert torch.equal(TorchScriptRunner(graph).forward(batch)["default"], found)
    assert 0 < float((found - exact).abs().max()) < BF16_TOLERANCE


def test_a_samples_score_has_the_same_bits_in_every_batch(both):
    servable = make_servable(ranking_source(make_model()), options())
    batch = golden_batch(servable.schema, seed=9)
    runner = load_package(both[1]).runner
    whole = runner.forward(batch)["default"]
    features = len(servable.schema.group("id_list"))
    lengths = batch.id_list_features_lengths.view(features, -1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    for row in range(batch.batch_size):
        pieces = []
        for feature in range(features):
            bag = feature * batch.batch_size + row
            pieces.append(batch.id_list_features_values[starts[bag] : starts[bag + 1]])
        alone = type(batch)(
            float_features=batch.float_features[row : row + 1],
            id_list_features_lengths=lengths[:, row].contiguous(),
            id_list_features_values=torch.cat(pieces),
            id_score_list_features_lengths=batch.id_score_list_features_lengths,
            id_score_list_features_values=batch.id_score_list_features_values,
            id_score_list_features_weights=batch.id_score_list_features_weights,
            batch_size=1,
        )
        assert torch.equal(runner.forward(alone)["default"], whole[row : row + 1])


def answers_with(kernels, path):
    """What a program computes that loads the package with this instruction set, or the best for ""."""
    return torch.tensor(json.loads(output_with(kernels, LOADING, path)))


@pytest.fixture(scope="module")
def best_answers(both):
    return answers_with("", both[1])


@pytest.mark.parametrize("kernels", ["amx", "avx512", "avx2", "scalar"])
def test_it_loads_with_every_instruction_set(both, best_answers, kernels):
    found, expected = answers_with(kernels, both[1]), best_answers
    assert len(found) == 9
    assert float((found - expected).abs().max()) < BF16_TOLERANCE


def test_diff_and_inspect_name_the_type(both, capsys):
    changes = {change.what: (change.a, change.b) for change in compare(*both, samples=5).tables}
    assert changes == {"dense_dtype": ("fp32", "bf16")}
    assert not compare(*both, samples=5).same(atol=1.0)
    assert main(["inspect", str(both[1])]) == 0
    assert "dense layers bf16" in capsys.readouterr().out
    assert main(["inspect", "--graph", str(both[1])]) == 0
    assert "tessera.linear_bf16" in capsys.readouterr().out


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    module, inputs, sample = user_models.dcn()
    for dense in ("fp32", "bf16"):
        package_model(
            module,
            inputs,
            sample,
            out=tmp_path / f"{dense}.pt",
            backend="tessera",
            dense_dtype=dense,
        )
    exact, narrow = (load_package(tmp_path / f"{dense}.pt") for dense in ("fp32", "bf16"))
    assert narrow.manifest.dense_dtype == "bf16"
    assert narrow.manifest.bytes_packaged < exact.manifest.bytes_packaged
    batch = golden_batch(exact.manifest.schema, seed=4)
    one, other = exact.runner.forward(batch), narrow.runner.forward(batch)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_the_report_says_what_each_type_costs() -> None:
    model = make_model()
    for chosen, other in (("bf16", "fp32"), ("fp32", "bf16")):
        report = compare_types(
            options(dense_dtype=chosen),
            lambda o: make_servable(ranking_source(model), o),
            lambda *_: None,
        )
        found = {choice.name: choice for choice in report.choices}
        assert (found[CHOSEN].dense, found[SAME_TABLES].dense) == (chosen, other)
        assert found["int8"].dense == "fp32"
        narrow, exact = sorted((found[CHOSEN], found[SAME_TABLES]), key=lambda c: c.bytes)
        assert (narrow.dense, exact.dense) == ("bf16", "fp32")
        assert exact.largest_change == found["int8"].largest_change
        assert narrow.largest_change != exact.largest_change
        assert re.search(rf"<td>{SAME_TABLES}</td><td[^>]*>{other}</td>", as_html(report))
        assert SAME_TABLES in as_text(report)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"backend": "fbgemm"}, "which the fbgemm backend does not have; .* --backend tessera"),
        ({"dense_dtype": "fp16"}, "dense_dtype is 'fp16'; give one of fp32, bf16"),
    ],
)
def test_what_cannot_be_is_refused(chosen, message):
    with pytest.raises(UserError, match=message):
        PackageOptions(**{"name": "m", "backend": "tessera", "dense_dtype": "bf16", **chosen})


def test_the_command_line_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.pt"
    arguments = ["package-model", "--factory", "tests.packaging.user_models:dcn", "--out", str(out)]
    assert main([*arguments, "--dense-dtype", "bf16"]) == 0
    assert "dense layers bf16" in capsys.readouterr().out
    assert load_package(out).manifest.dense_dtype == "bf16"
