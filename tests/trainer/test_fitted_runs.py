"""Runs whose transforms are fitted: stopped and taken up again, loaded, and packaged."""

from __future__ import annotations

import itertools

import pytest
import torch

from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_run
from tessera.training.config import load_config
from tessera.training.trained import load_trained, validation_batches
from tessera.training.trainer.checkpoint import load_checkpoint
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder
from tests.transforms.table_runs import write_run


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return load_config(write_run(tmp_path_factory.mktemp("table")))


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    assert train(config, out, progress=False).status == "finished"
    return out


def test_the_fitted_values_are_in_the_checkpoint(straight):
    trained = load_trained(straight)
    sizes = load_checkpoint(trained.checkpoint_path).fitted
    assert sizes["vocabularies"]["country"] == 16
    assert 50 < sizes["vocabularies"]["item"] <= 100
    assert sizes["keys"] == 16
    by_name = {feature.name: feature for feature in trained.model.features}
    assert by_name["country"].rows == 17
    assert by_name["age"].rows == 9
    assert list(by_name) == ["country", "device", "item", "country_x_device", "age"]
    statistics = trained.model.preprocessor.statistics
    assert statistics.means_U.min() < 0.3
    assert statistics.means_U.max() > 0.6


def test_a_run_that_goes_on_takes_them_from_there(config, straight, tmp_path):
    out, asked = tmp_path / "run", itertools.count()
    stopped = train(config, out, progress=False, should_stop=lambda: next(asked) >= 4)
    assert stopped.status == "interrupted"
    assert train(config, out, resume=True, progress=False).status == "finished"
    one, other = (load_checkpoint(load_trained(run).checkpoint_path) for run in (straight, out))
    assert one.model.keys() == other.model.keys()
    assert all(torch.equal(value, other.model[name]) for name, value in one.model.items())
    timed = "evaluation_samples_per_second"
    first, second = (RunFolder(run).read_final() for run in (straight, out))
    assert {**first, timed: 0} == {**second, timed: 0}


def test_evaluation_and_package_score_as_the_loaded_model(straight, tmp_path):
    path = tmp_path / "m.pt"
    package_run(straight, path, PackageOptions(name="m", dtype="fp32"), progress=False)
    found = load_package(path).manifest
    assert found.evaluation.max_abs_score_error < 1e-5
    final = RunFolder(straight).read_final()["valid"]
    assert found.evaluation.fp32.auc == pytest.approx(final["auc"], abs=1e-6)
    assert {f.name: f.hashing for f in found.schema.features} == {
        "country": "vocabulary",
        "device": "murmur3",
        "item": "vocabulary",
    }


def test_held_out_rows_are_shown_the_whole_table(straight):
    trained = load_trained(straight)
    batch = next(validation_batches(trained, 1000))
    assert batch.row_numbers is None
