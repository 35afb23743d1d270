"""Writing a package: what is measured and stored, and that it is whole or not at all."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tessera.errors import UserError
from tessera.serving.package.loading import load_package
from tessera.serving.package.records import Records
from tessera.serving.package.runner import TorchScriptRunner
from tessera.serving.packaging.evaluate import evaluate, host_batch
from tessera.serving.packaging.options import Origin, PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.packaging.ranking import ServedRanking, ranking_source
from tessera.serving.packaging.ranking import labelled as as_arguments
from tessera.serving.packaging.servable import make_servable
from tessera.training.data.batch import Batch
from tessera.training.models.config import TableConfig
from tessera.training.models.ranking import RankingModel
from tessera.training.trainer.metrics import evaluate_probabilities
from tests import REPOSITORY
from tests.package_factory import FEATURES, make_model, make_package
from tests.packaging.archives import read_records
from tests.packaging.batches import random_batch, sparse_features

OPTIONS = PackageOptions(name="m")


def labelled(model: RankingModel, count: int, rows: int) -> list[Batch]:
    schema = make_servable(ranking_source(model), OPTIONS).schema
    batches = []
    for seed in range(count):
        batch = random_batch(schema, rows, max_length=4, seed=seed)
        labels = (torch.arange(rows) % 3 == seed % 3).float()
        batches.append(
            Batch(
                dense_features=batch.float_features,
                sparse_features=sparse_features(batch, schema),
                labels=labels,
            )
        )
    return batches


def test_the_manifest_describes_the_model(tmp_path: Path) -> None:
    model = make_model()
    origin = Origin(
        source={"checkpoint": "step-9.pt", "step": "9"},
        metrics={"valid": {"auc": 0.7, "calibration": None}},
    )
    manifest = write_model(model, tmp_path / "m.pt", OPTIONS, origin=origin)
    assert Records(tmp_path / "m.pt").manifest() == manifest
    assert [feature.name for feature in manifest.schema.features] == list(FEATURES)
    assert manifest.source == origin.source
    assert manifest.training_metrics == origin.metrics
    assert manifest.evaluation is None
    tables = {table.name: table for table in manifest.tables}
    assert tables["item_table"].rows == 700
    assert tables["item_table"].bytes == 700 * (8 + 4)
    floats = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert manifest.bytes_fp32 == floats
    saved = sum(table.bytes_fp32 - table.bytes for table in manifest.tables)
    assert manifest.bytes_packaged == floats - saved
    assert {placement.table for placement in manifest.plan.placements} == tables.keys()
    for placement in manifest.plan.placements:
        assert (placement.row_begin, placement.row_end) == (0, tables[placement.table].rows)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.pt"]


def test_the_stored_metrics_are_those_of_both_models(tmp_path: Path) -> None:
    model = make_model(dim=4)
    batches = labelled(model, 3, 50)
    path = tmp_path / "m.pt"
    options = PackageOptions(name="m", dtype="int4")
    manifest = write_model(model, path, options, batches=batches)
    measured = manifest.evaluation
    assert measured is not None
    assert measured.rows == 150
    labels = torch.cat([batch.labels for batch in batches]).numpy()
    with torch.inference_mode():
        before = torch.cat(
            [torch.sigmoid(model(b.dense_features, b.sparse_features)) for b in batches]
        )
    runner = load_package(path).runner
    after = torch.cat(
        [
            runner.forward(
                host_batch((batch.dense_features, batch.sparse_features), manifest.schema)
            )["default"]
            for batch in batches
        ]
    )
    for quality, scores in ((measured.fp32, before), (measured.packaged, after)):
        expected = evaluate_probabilities(scores.numpy(), labels)
        assert quality.auc == pytest.approx(expected.auc, abs=1e-6)
        assert quality.log_loss == pytest.approx(expected.log_loss, abs=1e-6)
        assert quality.calibration == pytest.approx(expected.calibration, abs=1e-6)
        assert quality.normalised_entropy == pytest.approx(expected.normalised_entropy, abs=1e-6)
    assert measured.max_abs_score_error == pytest.approx(
        float((after - before).abs().max()), abs=1e-6
    )
    # int4 over four columns is coarse: the two models are not one and the same.
    assert measured.max_abs_score_error > 1e-4


def test_measuring_stops_at_the_asked_number_of_rows() -> None:
    model = make_model()
    servable = make_servable(ranking_source(model), OPTIONS)
    seen: list[int] = []
    found = evaluate(
        ServedRanking(model),
        TorchScriptRunner(servable.scripted),
        servable.schema,
        as_arguments(labelled(model, 5, 20)),
        max_rows=30,
        on_rows=seen.append,
    )
    assert found is not None
    assert found.rows == 40
    assert seen == [20, 20]


def test_one_label_only_leaves_its_metrics_open(tmp_path: Path) -> None:
    model = make_model()
    batches = labelled(model, 1, 10)
    batches[0].labels.zero_()
    manifest = write_model(model, tmp_path / "m.pt", OPTIONS, batches=batches)
    assert manifest.evaluation is not None
    assert manifest.evaluation.fp32.auc is None
    assert math.isfinite(manifest.evaluation.fp32.log_loss or math.nan)


def test_a_training_batch_with_other_key_order_is_the_same_request() -> None:
    features = {
        "watch": TableConfig(rows=9, weighted=True),
        "user": TableConfig(rows=9),
        "click": TableConfig(rows=9, weighted=True),
    }
    model = make_model(arch="dlrm_dcn", features=features)
    schema = make_servable(ranking_source(model), OPTIONS).schema
    batch = random_batch(schema, 6, max_length=4, seed=0)
    sparse = sparse_features(batch, schema)
    other = sparse.permute([2, 0, 1])
    found = host_batch((batch.float_features, other), schema)
    for one, two in zip(found.tensors(), batch.tensors(), strict=True):
        torch.testing.assert_close(one, two, equal_nan=True)


@pytest.mark.parametrize("field", ["name", "version", "output"])
@pytest.mark.parametrize("value", ["", "a b", "a=b", "../x", "-x", "é"])
def test_names_are_simple_words(field: str, value: str) -> None:
    with pytest.raises(UserError, match=f"model's {field} is .*; give letters"):
        PackageOptions(**{"name": "m", field: value})


def test_unknown_types_and_backends_are_named() -> None:
    with pytest.raises(UserError, match="dtype 'int9' is unknown"):
        PackageOptions(name="m", dtype="int9")
    with pytest.raises(UserError, match="backend is 'mine'; give one of tessera, fb"):
        PackageOptions(name="m", backend="mine")


def test_a_place_that_cannot_be_written_is_named_before_the_work(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(UserError, match=r"--out .* is a folder; give a file name"):
        write_model(model, tmp_path, OPTIONS)
    with pytest.raises(UserError, match=r"the folder .*/none does not exist; make it first"):
        write_model(model, tmp_path / "none" / "m.pt", OPTIONS)


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("tessera.serving.package.replace.sync", OSError(28, "No space left on device")),
        ("torch.jit.save", RuntimeError("writer")),
    ],
)
def test_a_failure_leaves_the_old_file_and_nothing_else(
    broken: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = make_package(tmp_path)
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(broken, fail)
    with pytest.raises(UserError, match=r"model-1\.pt cannot be written: (No space|writer)"):
        write_model(model, path, PackageOptions(name="other"))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


class Sharded(torch.nn.Module):
    """What stands in a model in the place of a collection while it is trained."""

    def embedding_bag_configs(self) -> list[object]:
        return []


def test_a_model_in_the_trainers_hands_is_refused(tmp_path: Path) -> None:
    model = make_model()
    model.arch.sparse_arch.embedding_bag_collection = Sharded()
    with pytest.raises(
        UserError,
        match=r"sparse_arch\.embedding_bag_collection is a .*, which cannot be packaged; give the module",
    ):
        write_model(model, tmp_path / "m.pt", OPTIONS)


def test_a_wrong_source_date_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UserError, match="SOURCE_DATE_EPOCH is 'yesterday'; give seconds"):
        make_package(tmp_path)


_WRITE = """
import sys
from pathlib import Path
from tests.package_factory import make_package
make_package(Path(sys.argv[1]))
from tests.packaging import user_models
from tessera.serving import package_model
package_model(*user_models.multi_task(), out=Path(sys.argv[1]) / "users.pt")
"""


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "SOURCE_DATE_EPOCH": "86400",
    }
    contents = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        subprocess.run([sys.executable, "-c", _WRITE, str(tmp_path / folder)], env=env, check=True)
        path = tmp_path / folder / "model-1.pt"
        assert Records(path).manifest().created == "1970-01-02T00:00:00Z"
        contents.append(path)
    first, second = (read_records(path) for path in contents)
    assert first == second
    assert contents[0].read_bytes() == contents[1].read_bytes()
    users = [path.with_name("users.pt") for path in contents]
    assert users[0].read_bytes() == users[1].read_bytes()
