"""tessera diff: what it finds, and what its exit status says."""

from __future__ import annotations

import json
import shutil
from math import inf, nan
from pathlib import Path

import pytest
import torch

from tessera.cli import main
from tessera.serving.inspect.compare import compare, differences, random_batch
from tessera.serving.package.golden import read_golden
from tessera.serving.package.loading import load_package
from tessera.serving.package.manifest import GOLDEN_RECORD
from tessera.serving.package.records import Records
from tessera.serving.package.runner import TorchScriptRunner, zero_batch
from tests.package_factory import FEATURES, make_package


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``package`` in fp32."""
    return make_package(tmp_path_factory.mktemp("exact"), dtype="fp32", name="exact")[0]


def test_a_package_is_the_same_as_its_copy(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copy(package, tmp_path / "copy.pt")
    assert main(["diff", str(package), str(copy)]) == 0
    text = capsys.readouterr().out
    assert "schema: the same" in text
    assert "tables: the same" in text
    assert text.endswith("the same\n")
    # Nine golden samples of each, and the random ones.
    assert [line.split() for line in text.splitlines() if "default" in line] == [
        ["default", "1018", "0", "0", "0"]
    ]


def test_two_versions_of_the_same_weights_count_as_the_same(package: Path, tmp_path: Path) -> None:
    again, _ = make_package(tmp_path, name="again", version="2")
    found = compare(package, again, samples=10)
    assert {change.what for change in found.about} >= {"name", "version"}
    assert found.same(atol=0)


def test_packages_for_gpus_are_compared_anywhere(package: Path, tmp_path: Path) -> None:
    for_gpus, _ = make_package(tmp_path, name="gpu", device="cuda")
    found = compare(package, for_gpus, samples=10)
    assert found.same(atol=1e-4)
    assert not found.not_compared


def test_other_weight_types_are_told_with_how_far_the_answers_are_apart(
    package: Path, exact: Path
) -> None:
    found = compare(package, exact, samples=100, seed=3)
    assert not found.schema
    changes = {change.what: (change.a, change.b) for change in found.tables}
    assert changes["table t_user: dtype"] == ("int8", "fp32")
    assert changes["table t_user: bytes"] == ("12000", "32000")
    assert {change.what for change in found.sizes} == {"bytes of the file", "bytes_packaged"}
    # The same numbers, one request after the other.
    a, b = load_package(package), load_package(exact)
    batches = [
        read_golden(Records(path).read(GOLDEN_RECORD, max_bytes=1 << 20))[0]
        for path in (package, exact)
    ]
    generator = torch.Generator().manual_seed(3)
    batches += [random_batch(a.manifest, b.manifest, n, generator) for n in (64, 36)]
    apart = torch.cat(
        [
            (a.runner.forward(batch)["default"] - b.runner.forward(batch)["default"].double()).abs()
            for batch in batches
        ]
    )
    (answer,) = found.answers
    assert answer.samples == len(apart) == 118
    assert answer.max_abs == apart.max().item() > 0
    assert answer.mean_abs == pytest.approx(apart.mean().item())
    assert answer.differing == int((apart > 0).sum())
    assert not found.same(atol=answer.max_abs * 0.99)
    changed_tables = found.same(atol=answer.max_abs)
    assert not changed_tables


def test_a_bound_admits_other_answers_of_alike_tables(package: Path, tmp_path: Path) -> None:
    other, _ = make_package(tmp_path, seed=1)
    found = compare(package, other, samples=10)
    assert not found.tables
    assert found.answers[0].max_abs > 1e-3
    arguments = ["diff", str(package), str(other), "--samples", "10"]
    assert main(arguments) == 1
    assert main([*arguments, "--atol", "1"]) == 0


def answering(*scores: float) -> TorchScriptRunner:
    return TorchScriptRunner(lambda *_: {"y": torch.tensor(scores), "only": torch.zeros(1)})


@pytest.mark.parametrize(
    ("left", "right", "differing", "max_abs"),
    [
        ((1.0, 2.0), (1.0, 2.5), 1, 0.5),
        ((nan, 2.0), (nan, 2.0), 0, 0.0),
        ((nan, 2.0), (1.0, 2.0), 1, inf),
        ((inf, 2.0), (inf, 2.0), 0, 0.0),
        ((inf, 2.0), (-inf, 1.0), 2, inf),
        ((0.0, 2.0), (-0.0, 2.0), 0, 0.0),
    ],
)
def test_numbers_that_are_none_have_a_distance_too(
    left: tuple[float, ...], right: tuple[float, ...], differing: int, max_abs: float, package: Path
) -> None:
    schema = load_package(package).manifest.schema
    batches = [zero_batch(schema, 2, wide_ids=True)]
    (found,) = differences(["y", "none"], answering(*left), answering(*right), batches)
    assert (found.output, found.samples) == ("y", 2)
    assert (found.differing, found.max_abs) == (differing, max_abs)


def test_packages_of_other_inputs_are_described_and_not_run(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = {name: spec for name, spec in FEATURES.items() if name != "tag"}
    other, _ = make_package(tmp_path, features=fewer)
    assert main(["diff", str(package), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["answers"] == []
    assert found["not_compared"] == "their id_list features, or their order, are not the same"
    assert {"what": "feature tag", "a": "there", "b": "missing"} in found["schema"]
    assert {"what": "table t_tag", "a": "there", "b": "missing"} in found["tables"]
    assert main(["diff", str(other), str(package)]) == 1
    text = capsys.readouterr().out
    assert "feature tag: missing -> there" in text
    assert "answers: not compared, since their id_list features" in text
    wider, _ = make_package(tmp_path, num_dense=5, name="wider")
    assert compare(package, wider, samples=0).not_compared == "4 dense features against 5"


def test_what_is_no_package_ends_with_2(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(package), str(tmp_path / "none.pt")]) == 2
    assert "none.pt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--samples", "-1", "'-1': give a whole number of at least 0"),
        ("--samples", "x", "'x': give a whole number of at least 0"),
        ("--atol", "nan", "'nan' is not a distance; give 0 or a number above it"),
        ("--atol", "-1", "'-1' is not a distance"),
        ("--atol", "x", "'x' is not a distance"),
    ],
)
def test_a_wrong_number_ends_with_2(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["diff", "a.pt", "b.pt", flag, value])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
