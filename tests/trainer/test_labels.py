"""Several labels: their losses, metrics, logs and reports, and runs that train them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from tessera.errors import UserError
from tessera.training.config import load_config
from tessera.training.data.columns import LabelColumn
from tessera.training.data.opening import open_data
from tessera.training.metrics.binary import auc_estimate
from tessera.training.metrics.estimate import codes_of
from tessera.training.trained import load_trained
from tessera.training.trainer import train
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.losses import Losses
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.trainer.split_metrics import RegressionMetrics, SplitMetrics
from tests.trainer.shop import write_config
from tests.trainer.test_train_ranks import on_ranks

CLICKED, SPENT = LabelColumn(name="clicked"), LabelColumn(name="spent", task="regression")


def losses(labels, label_weights=(), positive_weights=()):
    return Losses.of(
        labels, label_weights=dict(label_weights), positive_weights=dict(positive_weights)
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_the_weighted_sum_over_known_labels(weighted):
    outputs, wanted = torch.randn(7, 2), torch.rand(7, 2)
    wanted[:, 0] = (wanted[:, 0] > 0.5).float()
    wanted[2, 0] = wanted[4, 1] = math.nan
    weights = torch.rand(7) if weighted else None
    expected = 0.0
    for row in range(7):
        counts = float(weights[row]) if weighted else 1.0
        x, y = float(outputs[row, 0]), float(wanted[row, 0])
        if not math.isnan(y):
            chance = 1 / (1 + math.exp(-x))
            term = -math.log(chance) * 3 if y == 1 else -math.log(1 - chance)
            expected += counts * term
        if not math.isnan(float(wanted[row, 1])):
            expected += counts * 0.5 * float(outputs[row, 1] - wanted[row, 1]) ** 2
    found = losses([CLICKED, SPENT], {"spent": 0.5}, {"clicked": 3.0})
    total = found(outputs, wanted, weights, reduction="sum")
    assert float(total) == pytest.approx(expected, rel=1e-5)
    mean = found(outputs, wanted, weights, reduction="mean")
    assert float(mean) == pytest.approx(expected / 7, rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_label_has_the_bits_of_torchs_loss(reduction):
    logits = torch.randn(43, 1, requires_grad=True)
    wanted = (torch.rand(43) > 0.5).float()
    loss = losses([CLICKED])(logits, wanted, None, reduction=reduction)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = functional.binary_cross_entropy_with_logits(
        logits[:, 0], wanted, reduction=reduction
    )
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected, logits)[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_weights": {"clicks": 2.0}}, r"names 'clicks', .* clicked, spent; did you mean"),
        ({"positive_weights": {"spent": 2.0}}, "the label's task is regression"),
    ],
)
def test_weights_of_labels_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        losses([CLICKED, SPENT], **fields)


def test_regression_metrics_are_their_definitions():
    wanted = torch.tensor([1.0, 2.0, 4.0])
    metrics = RegressionMetrics(3)
    metrics.update(torch.tensor([1.5]), wanted[:1])
    metrics.update(torch.tensor([2.0, 3.0]), wanted[1:])
    found = metrics.compute()
    assert found.mean_squared_error == pytest.approx((0.25 + 0 + 1) / 3)
    assert found.root_mean_squared_error == pytest.approx(math.sqrt(1.25 / 3))
    assert found.mean_absolute_error == pytest.approx(0.5)
    assert found.r_squared == pytest.approx(1 - (1.25 / 3) / float(np.var([1, 2, 4])))
    assert found.calibration == pytest.approx(6.5 / 7)


def test_a_row_counts_for_the_labels_that_are_known():
    metrics = SplitMetrics([CLICKED, SPENT], [1.0, 0.5], 4)
    wanted = torch.tensor([[1, 2.0], [0, math.nan], [math.nan, 4.0], [1, 5.0]])
    metrics.update(torch.zeros(4, 2), wanted)
    found = metrics.compute()
    assert {name: own.rows for name, own in found.by_label.items()} == {"clicked": 3, "spent": 3}
    assert found.loss == pytest.approx(math.log(2) + 0.5 * (4 + 16 + 25) / 3)
    assert found.auc == found.by_label["clicked"].auc == 0.5
    assert found.to_json()["spent.mean_squared_error"] == pytest.approx(15)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run of three labels with weighted samples, and its config file."""
    folder = tmp_path_factory.mktemp("three")
    labels = ("clicked", "bought", "spent")
    path = write_config(folder / "three.yaml", "mmoe", labels=labels, weighted=True)
    overrides = ["train.label_weights={spent: 0.1}", "train.positive_weights={bought: 2}"]
    config = load_config(path, [*overrides, "run.report=true", "run.tensorboard=true"])
    return train(config, folder / "run", progress=False), path


def test_every_label_has_metrics(three):
    result, _ = three
    folder = RunFolder(result.folder)
    rows = [row for row in read_metrics(folder.metrics) if row["split"] == "valid"]
    assert [row["label"] for row in rows[:4]] == ["", "clicked", "bought", "spent"]
    total, clicked, bought, spent = (float(row["loss"]) for row in rows[:4])
    assert total == pytest.approx(clicked + bought + 0.1 * spent)
    assert rows[3]["auc"] == ""
    final = json.loads(folder.final.read_text())["valid"]
    assert final["clicked.rows"] == final["spent.rows"] == 40
    assert 0 < final["bought.rows"] < 40
    assert final["auc"] == pytest.approx((final["clicked.auc"] + final["bought.auc"]) / 2)
    html = folder.report.read_text()
    for text in ("clicked: AUC", "spent: root mean squared error", "Calibration of bought"):
        assert text in html
    assert load_trained(result.folder).metrics["valid"] == final


def test_logits_begin_at_the_labels_means(three):
    _, path = three
    config = load_config(path, ["train.dense_optimizer.learning_rate=1e-9", "train.epochs=1"])
    model = load_trained(train(config, path.parent / "slow", progress=False).folder).model
    means = np.nanmean(open_data(config.data, progress=False).train.labels(), axis=0)
    expected = [math.log(mean / (1 - mean)) for mean in means[:2]] + [means[2]]
    biases = [float(model.get_submodule(layer).bias.detach()) for layer in model.logit_layers()]
    assert list(model.logit_layers().values()) == [(0,), (1,), (2,)]
    assert biases == pytest.approx(expected, abs=1e-5)


def test_ranks_train_several_labels_as_one_does(three, tmp_path):
    _, path = three
    # The last batches have one sample, so that a rank has none of its own.
    config = load_config(path, ["train.epochs=1", "model.batch_norm=true", "train.batch_size=29"])
    alone = train(config, tmp_path / "alone", progress=False)
    _, _, final = on_ranks(2, config, tmp_path / "together")
    assert final["valid"].keys() == alone.final["valid"].keys()
    assert final["valid"]["spent.rows"] == 40
    means = []
    for folder in ("alone", "together"):
        state = load_trained(tmp_path / folder).model.state_dict()
        means.append(torch.cat([v for name, v in state.items() if name.endswith("running_mean")]))
    # The first values of the tables differ, so that the averages need not be equal.
    assert means[0].shape == means[1].shape
    assert all(mean.isfinite().all() and mean.abs().sum() > 0 for mean in means)


def test_the_metric_needs_a_binary_label(tmp_path):
    path = write_config(tmp_path / "c.yaml", "dlrm", labels=("spent",))
    with pytest.raises(UserError, match=r"no label is binary.* train\.metric=log_loss"):
        train(load_config(path), tmp_path / "run", progress=False)
    config = load_config(path, ["train.metric=log_loss", "run.report=true"])
    final = train(config, tmp_path / "run", progress=False).final
    assert final["test"]["r_squared"] < 1
    assert "RMSE" not in final["test"]


@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn", "deepfm", "ple"])
def test_every_architecture_takes_several_labels(arch, tmp_path):
    path = write_config(tmp_path / "c.yaml", arch, labels=("clicked", "bought"))
    config = load_config(path, ["train.log_every_steps=5", "train.epochs=6"])
    folder = train(config, tmp_path / "run", progress=False).folder
    rows = read_metrics(RunFolder(folder).metrics)
    losses = [float(row["loss"]) for row in rows if row["split"] == "train"]
    assert sum(losses[-2:]) < 0.97 * sum(losses[:2])


def test_standard_errors_are_clustered_by_user_and_leave_unknown_labels_out():
    columns = [LabelColumn(name="clicked"), LabelColumn(name="spent", task="regression")]
    chance = np.random.default_rng(1)
    logits = chance.normal(size=(300, 2)).astype(np.float32)
    labels = np.stack([chance.random(300) < 0.4, chance.random(300)], axis=1).astype(np.float32)
    labels[::7, 0] = np.nan
    users = chance.integers(0, 40, 300)
    metrics = SplitMetrics(columns, (1.0, 1.0), 300)
    for part in (slice(100), slice(100, 300)):
        metrics.add_users(users[part])
        metrics.update(torch.from_numpy(logits[part]), torch.from_numpy(labels[part]))
    found = metrics.standard_errors()
    known = ~np.isnan(labels[:, 0])
    score = metrics.by_label["clicked"].logits
    assert len(score) == known.sum()
    expected = auc_estimate(score, labels[known, 0]).standard_error(codes_of(users[known]))
    assert found["clicked"]["auc"] == pytest.approx(expected, rel=1e-12)
    squares = (logits[:, 1].astype(float) - labels[:, 1]) ** 2
    sums = np.bincount(users, weights=squares - squares.mean())
    count = len(set(users.tolist()))
    error = np.sqrt(count / (count - 1) * np.square(sums).sum()) / 300
    assert found["spent"]["mean_squared_error"] == pytest.approx(error)
