"""package-model, inspect and verify as a user runs them, on a run that was really trained."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from tessera.cli import main
from tessera.kernels.libraries import LIBRARIES
from tessera.kernels.row_types import ROW_TYPES
from tessera.serving.commands import package_model as package_model_command
from tessera.serving.package.loading import load_package
from tessera.serving.package.manifest import Manifest
from tessera.serving.package.records import Records
from tessera.serving.packaging.evaluate import host_batch
from tessera.serving.packaging.lookups.backends import BACKENDS
from tessera.training.trained import load_trained, validation_batches
from tests import forked_program
from tests.packaging.archives import read_records, write_records
from tests.packaging.backends import EACH_BACKEND

CONFIG = """
data: {format: criteo, path: clicks.tsv, workers: 0}
model: {embedding_dim: 8, rows: 500, dense_layers: [16], over_layers: [16]}
train: {batch_size: 256, epochs: 1}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    data, config = folder / "clicks.tsv", folder / "small.yaml"
    assert main(["datagen", "--rows", "3000", "--out", str(data), "--workers", "0"]) == 0
    config.write_text(CONFIG)
    out = folder / "run"
    arguments = ["train", "--config", str(config), "--out", str(out), f"data.path={data}"]
    assert main(arguments) == 0
    return out


def package_model(*arguments: object) -> int:
    return main(["package-model", *(str(argument) for argument in arguments)])


def test_a_run_is_packaged_measured_and_summarized(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "clicks.pt"
    assert package_model(run, "--out", out) == 0
    printed = capsys.readouterr().out
    manifest = load_package(out).manifest
    assert manifest.name == "clicks"
    assert manifest.dtype == "int8"
    assert manifest.evaluation is not None
    assert manifest.evaluation.rows == sum(
        batch.size for batch in validation_batches(load_trained(run), 100)
    )
    assert f"{manifest.evaluation.packaged.auc:.6f}" in printed
    assert re.search(
        r"weights: \S+ KiB fp32 -> \S+ KiB \(tables int8, dense layers fp32\), \d\.\d\d times",
        printed,
    )
    assert "quantization error of 26 tables" in printed
    assert all(table.name in printed for table in manifest.tables)
    assert f"wrote {out}" in printed
    assert manifest.source["step"] == str(load_trained(run).step)
    assert manifest.training_metrics["valid"]["auc"] == pytest.approx(
        manifest.evaluation.fp32.auc, abs=1e-4
    )


def test_the_package_answers_the_trained_models_validation_set(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.pt"
    assert package_model(run, "--out", out, "--dtype", "fp32", "--no-evaluate") == 0
    loaded, trained = load_package(out), load_trained(run)
    assert loaded.manifest.evaluation is None
    for batch in validation_batches(trained, 128):
        with torch.inference_mode():
            logits = trained.model(batch.dense_features, batch.sparse_features)
        found = loaded.runner.forward(
            host_batch((batch.dense_features, batch.sparse_features), loaded.manifest.schema)
        )["default"]
        torch.testing.assert_close(found, torch.sigmoid(logits), rtol=0, atol=2e-5)


def test_the_same_checkpoint_and_flags_give_the_same_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key.pem"
    assert main(["keygen", "--out", str(key)]) == 0
    outs = [tmp_path / "first" / "m.pt", tmp_path / "second" / "m.pt"]
    for out in outs:
        out.parent.mkdir()
        # A process each: torch numbers the classes that it scripts.
        arguments = ["package-model", str(run), "--out", str(out), "--sign", str(key)]
        done = forked_program.run(arguments)
        assert done.returncode == 0, done.stderr
    assert outs[0].read_bytes() == outs[1].read_bytes()
    manifest = Records(outs[0]).manifest()
    assert manifest.evaluation is not None
    assert manifest.signature is not None
    trained = datetime.fromtimestamp(
        load_trained(run).checkpoint_path.stat().st_mtime, timezone.utc
    )
    assert manifest.created == trained.strftime("%Y-%m-%dT%H:%M:%SZ")


def test_every_choice_reaches_the_manifest(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.pt"
    checkpoint = load_trained(run).checkpoint_path
    choices = ["--dtype", "fp16", "--name", "ads", "--model-version", "7", "--output-name", "ctr"]
    assert package_model(checkpoint, "--out", out, *choices, "--evaluate-rows", "1") == 0
    manifest = load_package(out).manifest
    assert (manifest.name, manifest.version, manifest.dtype) == ("ads", "7", "fp16")
    assert manifest.schema.outputs[0].name == "ctr"
    assert manifest.source["checkpoint"] == checkpoint.name
    assert manifest.evaluation is not None
    assert 1 <= manifest.evaluation.rows <= 4096


def test_versions_of_a_repository_are_numbered_and_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ("--repository", tmp_path, "--name", "ads", "--no-evaluate")
    assert package_model(run, *to) == 0
    assert package_model(run, run, *to, "--version", "7") == 0  # an ensemble
    assert package_model(load_trained(run).checkpoint_path, *to) == 0
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["ads"]
    assert sorted(p.name for p in (tmp_path / "ads").iterdir()) == ["1", "7", "8"]
    printed = capsys.readouterr().out
    for number in (1, 7, 8):
        path = tmp_path / "ads" / str(number) / "model.pt"
        assert [p.name for p in path.parent.iterdir()] == ["model.pt"]
        manifest = load_package(path).manifest
        assert (manifest.name, manifest.version) == ("ads", str(number))
        assert f"wrote {path} (" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repository", "{}"], "--repository needs --name NAME"),
        (["--repository", "{}", "--name", "ads", "--model-version", "2"], "give --version N"),
        (["--repository", "{}/none", "--name", "ads"], "none is not a folder; make it first"),
        (["--repository", "{}", "--name", "../ads"], r"the model's name is '../ads'"),
        (["--repository", "{}", "--name", "ads", "--version", "3"], "ads/3 exists"),
        (["--repository", "{}", "--name", "ads"], "holds no checkpoint"),
        (["--out", "{}/m.pt", "--version", "3"], "with --out give --model-version"),
    ],
)
def test_a_version_that_cannot_be_made_changes_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ads" / "3").mkdir(parents=True)
    fails_with(capsys, message, tmp_path, *(word.format(tmp_path) for word in arguments))
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == [
        Path("ads"),
        Path("ads/3"),
    ]


def test_the_report_measures_every_type_on_the_validation_set(run: Path, tmp_path: Path) -> None:
    report = tmp_path / "types.html"
    arguments = ("--evaluate-rows", "200", "--report", report)
    assert package_model(run, "--out", tmp_path / "m.pt", *arguments) == 0
    measured = Records(tmp_path / "m.pt").manifest().evaluation
    assert measured is not None
    text = report.read_text()
    assert f"{measured.rows} validation rows" in text
    # Of the chosen types, which are int8 throughout, and of int8.
    assert len(re.findall(rf"<td[^>]*>{measured.packaged.auc:.6f}</td>", text)) >= 2


def test_the_flags_offer_what_the_packager_has() -> None:
    parser = argparse.ArgumentParser()
    package_model_command.add_arguments(parser)
    choices = {action.dest: action.choices for action in parser._actions}
    assert sorted(choices["dtype"]) == sorted(ROW_TYPES)
    assert choices["backend"] == list(BACKENDS)


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = dataclasses.replace(LIBRARIES["tessera_ops"], file="kernels/lib/none.so")
    monkeypatch.setitem(LIBRARIES, "tessera_ops", elsewhere)


@pytest.mark.usefixtures("not_built")
def test_without_its_library_tesseras_backend_is_not_taken_and_the_user_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.pt"
    assert package_model(run, "--out", out, "--no-evaluate") == 0
    assert "operators: fbgemm (fbgemm_gpu_tbe_inference" in (text := capsys.readouterr().out)
    assert "'make build' builds them" in text
    assert Records(out).manifest().backend == "fbgemm"
    asked = (run, "--out", out, "--backend", "tessera")
    fails_with(capsys, "'tessera_ops' was not found .*; build it with: make build", *asked)


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_the_summary_names_the_operators(
    backend: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.pt"
    assert package_model(run, "--out", out, "--no-evaluate", "--backend", backend) == 0
    libraries = Records(out).manifest().operator_libraries
    text = capsys.readouterr().out
    assert f"operators: {backend} ({', '.join(libraries)})" in text
    assert "make build" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int7"], "invalid choice"),
        (["--evaluate-rows", "0"], "'0': give a whole number of at least 1"),
        (["--evaluate-rows", "5", "--no-evaluate"], "not allowed with"),
        (["--shards", "0"], "'0': give a whole number of at least 1"),
        (["--repository", "models"], "not allowed with argument --out"),
        (["--version", "0"], "'0': give a whole number of at least 1"),
        (["--table-dtype", "int4"], "'int4' is not PATTERN=VALUE, such as 'user_*=int4'"),
    ],
)
def test_a_wrong_flag_ends_with_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        package_model(tmp_path, "--out", tmp_path / "m.pt", *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def fails_with(capsys: pytest.CaptureFixture[str], message: str, *arguments: object) -> None:
    assert package_model(*arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert len(error.strip().splitlines()) == 1


def test_what_cannot_be_packaged_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.pt"
    fails_with(capsys, "holds no checkpoint", tmp_path, "--out", out)
    fails_with(capsys, "nowhere", tmp_path / "nowhere", "--out", out)
    fails_with(capsys, "does not exist; make it first", tmp_path, "--out", tmp_path / "a" / "m.pt")
    fails_with(capsys, "model's name is 'a b'", tmp_path, "--out", out, "--name", "a b")
    nowhere = tmp_path / "a" / "types.html"
    fails_with(capsys, "make it first", tmp_path, "--out", out, "--report", nowhere)
    fails_with(capsys, "exists and is not a file", tmp_path, "--out", out, "--report", tmp_path)
    assert not out.exists()


def test_missing_validation_data_says_how_to_do_without(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = tmp_path / "hidden"
    names = [path for path in run.parent.iterdir() if path.name.startswith("clicks")]
    hidden.mkdir()
    for path in names:
        path.rename(hidden / path.name)
    try:
        out = tmp_path / "m.pt"
        fails_with(capsys, r"validation data .* --no-evaluate", run, "--out", out)
        assert not out.exists()
        assert package_model(run, "--out", out, "--no-evaluate") == 0
    finally:
        for path in names:
            (hidden / path.name).rename(path)


def test_inspect_shows_the_manifest(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(package)]) == 0
    text = capsys.readouterr().out
    for part in ("model, version 1", "item_table", "murmur3", "1 shard on cpu", "default [B]"):
        assert part in text
    assert main(["inspect", str(package), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert Manifest.from_json(shown) == load_package(package).manifest


def test_inspect_of_something_else_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pt"
    other.write_bytes(b"something else altogether")
    for path in (other, tmp_path / "none.pt", tmp_path):
        assert main(["inspect", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


def test_verify_says_what_it_checked(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(package)]) == 0
    text = capsys.readouterr().out
    loaded = load_package(package)
    assert loaded.sha256 in text
    assert f"{len(loaded.manifest.records)} records" in text
    assert "9 golden samples" in text
    assert text.endswith("verified\n")


def test_verify_of_a_changed_package_ends_with_1(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = read_records(package)
    damaged = {**records, "data.pkl": records["data.pkl"][:-1]}
    changed = write_records(tmp_path / "m.pt", damaged)
    assert main(["verify", str(changed)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "failed: " in captured.err
    assert "'data.pkl' was changed" in captured.err


def test_verify_without_a_file_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "none.pt")]) == 2
    assert "none.pt is not a file" in capsys.readouterr().err
