"""Several runs in one package: the mean of their logits, and what is measured of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.cli import main
from tessera.errors import UserError
from tessera.serving.package.loading import LoadedPackage, load_package
from tessera.serving.packaging.evaluate import host_batch
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_runs
from tessera.training.config import load_config
from tessera.training.trained import load_trained, validation_batches
from tessera.training.trainer import train
from tests.packaging.backends import EACH_BACKEND, NEEDS_TESSERA
from tests.packaging.batches import random_batch
from tests.packaging.test_same_bits import check_same_bits
from tests.trainer.shop import write_config
from tests.transforms.table_runs import write_run

LABELS = ("clicked", "spent")
WEIGHTS = [2.0, 1.0]


def trained_run(
    folder: Path, name: str, arch: str, *changes: str, model: tuple[str, ...] = ()
) -> Path:
    config = write_config(folder / f"{name}.yaml", arch, labels=LABELS, model=model)
    changes = ("train.metric=log_loss", "train.epochs=1", *changes)
    train(load_config(config, changes), folder / name, progress=False)
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of other architectures, seeds and sizes of tables."""
    folder = tmp_path_factory.mktemp("runs")
    lines = ("attention: {history: item}", "sequence_length: 5")
    return [
        trained_run(folder, "din", "din", model=lines),
        trained_run(
            folder,
            "mmoe",
            "mmoe",
            "train.seed=7",
            "model.rows=25",
            "model.embedding_dim=auto",
            model=("first_order: true",),
        ),
    ]


def package(runs: list[Path], out: Path, **options: object) -> LoadedPackage:
    chosen = {
        key: options.pop(key) for key in list(options) if key in {"weights", "skip_evaluation"}
    }
    package_runs(runs, out, PackageOptions(name="m", **options), progress=False, **chosen)
    return load_package(out, devices=["cpu"] if options.get("device") == "cuda" else None)


def logit(scores: Tensor) -> Tensor:
    return torch.log(scores.double()) - torch.log1p(-scores.double())


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_scores_are_those_of_the_mean_logit(runs: list[Path], backend: str, tmp_path: Path) -> None:
    whole = package(runs, tmp_path / "whole.pt", weights=WEIGHTS, backend=backend)
    parts = [
        package([run], tmp_path / f"{run.name}.pt", backend=backend, skip_evaluation=True)
        for run in runs
    ]
    for size in (1, 33):
        batch = random_batch(whole.manifest.schema, size, max_length=7, seed=size)
        found = whole.runner.forward(batch)
        first, second = (part.runner.forward(batch) for part in parts)
        mean = (2 * logit(first["clicked"]) + logit(second["clicked"])) / 3
        # Float32 probabilities, whose logits have some 1e-6 of error.
        torch.testing.assert_close(
            found["clicked"].double(), torch.sigmoid(mean), rtol=0, atol=1e-5
        )
        spent = (2 * first["spent"].double() + second["spent"].double()) / 3
        torch.testing.assert_close(found["spent"].double(), spent, rtol=1e-5, atol=1e-5)
    check_same_bits(tmp_path / "whole.pt")
    tables = sum(len(part.manifest.tables) for part in parts)
    assert len(whole.manifest.tables) == tables
    assert {table.dtype for table in whole.manifest.tables} == {"int8"}


def plain_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    above = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


def test_every_label_and_member_is_measured(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "m.pt", tmp_path / "types.txt"
    words = ["package-model", *map(str, runs), "--weights", "2,1", "--out", str(out)]
    assert main([*words, "--report", str(report)]) == 0
    manifest = load_package(out).manifest
    trained = [load_trained(run) for run in runs]
    logits, truth = [[], []], []
    for batch in validation_batches(trained[0], 50):
        truth.append(batch.labels.numpy())
        for place, one in enumerate(trained):
            with torch.no_grad():
                logits[place].append(one.model(batch.dense_features, batch.sparse_features).numpy())
    labels = np.concatenate(truth)
    members = [np.concatenate(own) for own in logits]
    mean = (2 * members[0] + members[1]) / 3
    evaluation = manifest.evaluation
    assert evaluation is not None
    names = [f"member 1 ({runs[0].name})", f"member 2 ({runs[1].name})"]
    assert list(evaluation.members) == names
    measured = [{name: own.fp32 for name, own in evaluation.labels.items()}]
    measured += [evaluation.members[name] for name in names]
    for found, scores in zip(measured, [mean, *members], strict=True):
        assert found["clicked"]["auc"] == pytest.approx(
            plain_auc(scores[:, 0], labels[:, 0]), abs=2e-4
        )
        error = np.sqrt(np.mean((scores[:, 1].astype(float) - labels[:, 1]) ** 2))
        assert found["spent"]["root_mean_squared_error"] == pytest.approx(error, rel=1e-5)
    assert evaluation.fp32.auc == evaluation.labels["clicked"].fp32["auc"]
    assert evaluation.labels["spent"].rows == evaluation.rows == len(labels)
    before, after = (
        own["root_mean_squared_error"]
        for own in (evaluation.labels["spent"].fp32, evaluation.labels["spent"].packaged)
    )
    assert before != after
    assert after == pytest.approx(before, rel=0.02)
    final = trained[1].metrics["valid"]
    assert evaluation.members[names[1]]["clicked"]["log_loss"] == pytest.approx(
        final["clicked.log_loss"], rel=1e-4
    )
    assert manifest.source[names[0]].endswith(", din, weight 2")
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    for row in ("clicked AUC", "spent RMSE", "  ensemble ", f"  {names[1]} "):
        assert row in shown
    assert f"{names[0]} clicked AUC" in report.read_text()


@pytest.mark.parametrize("mark", [pytest.param(None, marks=NEEDS_TESSERA)])
def test_an_ensemble_for_gpus_answers_as_the_cpus(
    runs: list[Path], tmp_path: Path, mark: None
) -> None:
    cpu = package(runs, tmp_path / "cpu.pt", skip_evaluation=True)
    gpu = package(runs, tmp_path / "gpu.pt", skip_evaluation=True, device="cuda")
    batch = random_batch(cpu.manifest.schema, 64, max_length=5, seed=1)
    expected = cpu.runner.forward(batch)
    for name, value in gpu.runner.forward(batch).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-4)


def test_members_keep_what_their_own_transforms_learned(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    text = config.read_text()
    other = tmp_path / "other.yaml"
    other.write_text(text.replace("min_count: 5", "min_count: 40"))
    for name, path, arch in (("a", config, "deepfm"), ("b", other, "dlrm_dcn")):
        train(
            load_config(path, [f"model.arch={arch}", "train.epochs=1"]),
            tmp_path / name,
            progress=False,
        )
    runs = [tmp_path / "a", tmp_path / "b"]
    whole = package(runs, tmp_path / "m.pt", dtype="fp32")
    rows = [table.rows for table in whole.manifest.tables if table.name.endswith("t_country")]
    assert len(set(rows)) == 2
    trained = [load_trained(run) for run in runs]
    [batch] = validation_batches(trained[0], 1000)
    with torch.no_grad():
        outputs = [one.model(batch.dense_features, batch.sparse_features) for one in trained]
    expected = torch.sigmoid(sum(outputs) / 2)
    given = host_batch((batch.dense_features, batch.sparse_features), whole.manifest.schema)
    found = whole.runner.forward(given)["default"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    check_same_bits(tmp_path / "m.pt")


def test_what_does_not_fit_together_is_refused(runs: list[Path], tmp_path: Path) -> None:
    def refused(*others: Path, message: str, **options: object) -> None:
        with pytest.raises(UserError, match=message):
            package([runs[0], *others], tmp_path / "m.pt", **options)

    config = write_config(tmp_path / "one.yaml", "mmoe")
    train(load_config(config, ["train.epochs=1"]), tmp_path / "one", progress=False)
    refused(
        tmp_path / "one",
        message=r"member 2 \(one\) has other labels than member 1 \(din\): spent is one of the first",
    )
    hashed = trained_run(tmp_path, "hashed", "mmoe", "model.tables.user.hashing=modulo")
    refused(hashed, message="differ in hashing of feature user: modulo and murmur3; train them")
    split = trained_run(tmp_path, "split", "mmoe", "data.split_seed=3")
    refused(split, message=r"differs from member 1 \(din\) in data.split_seed, .* --no-evaluate")
    assert package([runs[0], split], tmp_path / "m.pt", skip_evaluation=True).manifest.name == "m"
    refused(runs[1], weights=[1.0], message="--weights 1: there are 2 runs; give one weight")
    refused(runs[1], weights=[1.0, 0.0], message="--weights 1,0: give numbers above 0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--weights", "1"], "--weights is for several runs; give two or more"),
        (["RUN", "RUN", "--weights", "a,b"], "'a,b' is not W,W,..., such as 2,1"),
        ([], "give either RUN_OR_CHECKPOINT or --factory"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: list[str],
    message: str,
    runs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(runs[0]) if word == "RUN" else word for word in words]
    try:
        status = main(["package-model", *given, "--out", str(tmp_path / "m.pt")])
    except SystemExit as error:  # argparse's own way
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
