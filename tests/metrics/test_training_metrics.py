"""Metrics of a training while it runs, against scikit-learn over the same examples."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from tessera.training.metrics import binary
from tessera.training.metrics.accuracy import AccuracyMetric
from tessera.training.metrics.auc import AUCMetric, compute_auc, compute_auc_per_group
from tessera.training.metrics.auprc import AUPRCMetric, compute_auprc, compute_auprc_per_group
from tessera.training.metrics.calibration import CalibrationMetric
from tessera.training.metrics.ctr import CTRMetric
from tessera.training.metrics.mae import MAEMetric
from tessera.training.metrics.metrics_config import RecComputeMode, RecTaskInfo
from tessera.training.metrics.mse import MSEMetric
from tessera.training.metrics.ne import NEMetric
from tessera.training.metrics.precision import PrecisionMetric
from tessera.training.metrics.rec_metric import RecMetricException
from tessera.training.metrics.recall import RecallMetric
from tessera.training.metrics.weighted_avg import WeightedAvgMetric

BATCH, BATCHES, WINDOW_BATCHES = 40, 7, 3
TASKS = ("click", "buy")
FUSED = RecComputeMode.FUSED_TASKS_COMPUTATION
FUSED_STATES = RecComputeMode.FUSED_TASKS_AND_STATES_COMPUTATION
UNFUSED = RecComputeMode.UNFUSED_TASKS_COMPUTATION


def batches(seed=0):
    """Batches that hold, of each task, predictions with ties, labels 0 or 1, and weights of which some are 0."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(BATCHES):
        p = {task: (random.integers(1, 20, BATCH) / 20).astype(np.float32) for task in TASKS}
        y = {task: (random.random(BATCH) < p[task]).astype(np.float32) for task in TASKS}
        w = {task: random.integers(0, 4, BATCH).astype(np.float32) for task in TASKS}
        made.append((p, y, w))
    return made


def joined(made, task):
    """Predictions, labels and weights of some batches, in float64."""
    return [np.concatenate([b[i][task] for b in made]).astype(np.float64) for i in range(3)]


def tensors(values):
    return {task: torch.from_numpy(v) for task, v in values.items()}


def metric(kind, *, mode=UNFUSED, window=WINDOW_BATCHES * BATCH, **arguments):
    tasks = [RecTaskInfo(name=task) for task in TASKS]
    return kind(1, 0, BATCH, tasks, mode, window, **arguments)


def fed(made, kind, *, weighted=True, **arguments):
    subject = metric(kind, **arguments)
    for p, y, w in made:
        weights = tensors(w) if weighted else None
        subject.update(predictions=tensors(p), labels=tensors(y), weights=weights)
    return subject


def logloss(p, y, w):
    return sk.log_loss(y, p, sample_weight=w, labels=[0, 1]) / np.log(2)


def ne(p, y, w):
    return logloss(p, y, w) / logloss(np.full(len(y), np.average(y, weights=w)), y, w)


def r_squared(p, y, w):
    return sk.r2_score(y, p, sample_weight=w)


OF_SCIKIT_LEARN = {
    "ne": (NEMetric, {"ne": ne, "logloss": logloss}, {"include_logloss": True}),
    "ctr": (CTRMetric, {"ctr": lambda p, y, w: np.average(y, weights=w)}, {}),
    "calibration": (
        CalibrationMetric,
        {"calibration": lambda p, y, w: np.dot(p, w) / np.dot(y, w)},
        {},
    ),
    "mse": (
        MSEMetric,
        {
            "mse": lambda p, y, w: sk.mean_squared_error(y, p, sample_weight=w),
            "rmse": lambda p, y, w: sk.mean_squared_error(y, p, sample_weight=w) ** 0.5,
            "r_squared": r_squared,
        },
        {"include_r_squared": True},
    ),
    "mae": (MAEMetric, {"mae": lambda p, y, w: sk.mean_absolute_error(y, p, sample_weight=w)}, {}),
    "accuracy": (
        AccuracyMetric,
        {"accuracy": lambda p, y, w: sk.accuracy_score(y, p >= 0.35, sample_weight=w)},
        {"threshold": 0.35},
    ),
    "precision": (
        PrecisionMetric,
        {"precision": lambda p, y, w: sk.precision_score(y, p >= 0.5, sample_weight=w)},
        {},
    ),
    "recall": (
        RecallMetric,
        {"recall": lambda p, y, w: sk.recall_score(y, p >= 0.5, sample_weight=w)},
        {},
    ),
    "weighted_avg": (
        WeightedAvgMetric,
        {"weighted_avg": lambda p, y, w: np.average(p, weights=w)},
        {},
    ),
    "auc": (AUCMetric, {"auc": lambda p, y, w: sk.roc_auc_score(y, p, sample_weight=w)}, {}),
    "auprc": (
        AUPRCMetric,
        {"auprc": lambda p, y, w: sk.average_precision_score(y, p, sample_weight=w)},
        {},
    ),
}


@pytest.mark.parametrize("mode", [UNFUSED, FUSED])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", OF_SCIKIT_LEARN)
def test_values_equal_scikit_learn(name, weighted, mode):
    kind, values, arguments = OF_SCIKIT_LEARN[name]
    made = batches()
    found = fed(made, kind, weighted=weighted, mode=mode, **arguments).compute()
    parts = {"lifetime_": made, "window_": made[-WINDOW_BATCHES:]}
    if name in {"auc", "auprc"}:
        del parts["lifetime_"]
    expected = {}
    for prefix, part in parts.items():
        for task in TASKS:
            p, y, w = joined(part, task)
            for value, function in values.items():
                wanted = function(p, y, w if weighted else np.ones(len(y)))
                expected[f"{name}-{task}|{prefix}{value}"] = wanted
    # Predictions are float32 and sums float64: in float64 the values differ by its rounding.
    assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, rel=1e-9)
    assert {value.numel() for value in found.values()} == {1}


def test_modes_and_joined_batches_give_the_same():
    made = batches(1)
    one = fed(made, NEMetric).compute()
    for other in (
        fed(made, NEMetric, mode=FUSED),
        fed(made, NEMetric, mode=FUSED_STATES),
        fed(made, NEMetric, fused_update_limit=1),
    ):
        assert {k: float(v) for k, v in other.compute().items()} == pytest.approx(
            {k: float(v) for k, v in one.items()}, rel=1e-12
        )
    # Batches that are joined leave the window together: 7 batches in parts of 2, 2, 2 and 1.
    kept = fed(made, NEMetric, fused_update_limit=2, window=3 * BATCH)
    p, y, w = joined(made[-3:], "buy")
    assert float(kept.compute()["ne-buy|window_ne"]) == pytest.approx(ne(p, y, w), rel=1e-9)
    assert kept.compute().keys() == one.keys()


def test_local_values_have_their_own_prefix():
    made = batches()
    found = fed(made, CTRMetric).local_compute()
    assert set(found) == {
        f"ctr-{task}|local_{part}_ctr" for task in TASKS for part in ("lifetime", "window")
    }


def test_one_class_and_no_weights():
    ones, none = torch.ones(BATCH), torch.zeros(BATCH)
    p = torch.linspace(0.1, 0.9, BATCH)

    def of(kind, labels, weights=ones, **arguments):
        subject = kind(1, 0, BATCH, [RecTaskInfo(name="t")], window_size=BATCH, **arguments)
        subject.update(predictions={"t": p}, labels={"t": labels}, weights={"t": weights})
        (value,) = (v for k, v in subject.compute().items() if k.partition("|window_")[2])
        return float(value)

    assert of(AUCMetric, ones) == of(AUCMetric, none) == of(AUCMetric, ones, none) == 0.5
    assert of(AUPRCMetric, none) == 0.0
    assert of(AUPRCMetric, ones) == pytest.approx(1.0)
    assert of(NEMetric, none) > 1e6
    assert np.isnan(of(NEMetric, ones, none))
    assert of(NEMetric, ones, none, allow_missing_label_with_zero_weight=True) == 1e-12
    for kind in (CTRMetric, CalibrationMetric, MAEMetric, AccuracyMetric, PrecisionMetric):
        assert of(kind, ones, none) == 0.0
    assert of(CalibrationMetric, none) == of(RecallMetric, none) == 0.0
    assert np.isnan(of(WeightedAvgMetric, ones, none))


def test_auc_is_that_of_an_evaluation():
    """The windows' AUC and the evaluation's, ties and weights included; and binned labels."""
    p, y, w = (torch.from_numpy(v)[None] for v in joined(batches(2), "click"))
    found = compute_auc(1, [p[:, :50], p[:, 50:]], [y], [w])
    expected = binary.auc_estimate(p[0].numpy(), y[0].numpy(), w[0].numpy()).value
    assert found.tolist() == pytest.approx([expected], rel=1e-12)
    soft = torch.where(y > 0, 0.5, 0.01)
    binned = compute_auc(1, [p], [soft], [w], apply_bin=True)
    # What is below the bound stays as it is: partly positive.
    parts = [torch.cat([p, p], 1), torch.cat([torch.ones_like(y), torch.zeros_like(y)], 1)]
    partly = torch.where(y > 0, 1.0, 0.01).double()
    weights = torch.cat([w * partly, w * (1 - partly)], 1)
    expected = sk.roc_auc_score(parts[1][0], parts[0][0], sample_weight=weights[0])
    assert binned.tolist() == pytest.approx([expected], rel=1e-9)


@pytest.mark.parametrize("digits", [2, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("examples", [700, 70_000])
def test_auc_of_few_and_of_many_examples(examples, dtype, digits):
    generator = torch.Generator().manual_seed(examples)
    scores = torch.rand(1, examples, generator=generator, dtype=torch.float64)
    scores = scores.round(decimals=digits).to(dtype) - 0.5
    labels = (torch.rand(1, examples, generator=generator) < 0.3).double()
    weights = torch.rand(1, examples, generator=generator, dtype=torch.float64)
    expected = sk.roc_auc_score(labels[0], scores[0], sample_weight=weights[0])
    assert compute_auc(1, [scores], [labels], [weights]).tolist() == pytest.approx([expected])
    alike = torch.zeros_like(scores)
    assert compute_auc(1, [alike], [labels], [weights]).tolist() == pytest.approx([0.5])


def test_groups_are_averaged():
    p, y, w = (torch.from_numpy(v)[None] for v in joined(batches(3), "click"))
    groups = torch.arange(p.shape[1]) % 9
    y[:, groups == 4] = 1.0  # one class
    aucs, precisions = [], []
    for group in range(9):
        rows = (groups == group).numpy()
        of_group = (y[0, rows].numpy(), p[0, rows].numpy())
        weights = w[0, rows].numpy()
        precisions.append(sk.average_precision_score(*of_group, sample_weight=weights))
        one_class = len(set(of_group[0])) == 1
        aucs.append(0.5 if one_class else sk.roc_auc_score(*of_group, sample_weight=weights))
    assert aucs[4] == 0.5
    found = compute_auc_per_group(1, [p], [y], [w], groups)
    assert found.tolist() == pytest.approx([np.mean(aucs)], rel=1e-9)
    found = compute_auprc_per_group(1, p, y, w, groups)
    assert found.tolist() == pytest.approx([np.mean(precisions)], rel=1e-9)
    none = torch.zeros(2, 0)
    assert compute_auc(2, [none], [none], [none]).tolist() == [0.5, 0.5]
    assert compute_auprc(2, none, none, none).tolist() == [0.0, 0.0]
    no_groups = torch.zeros(0, dtype=torch.int64)
    assert compute_auc_per_group(2, [none], [none], [none], no_groups).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("mode", [UNFUSED, FUSED])
@pytest.mark.parametrize(("kind", "name"), [(AUCMetric, "auc"), (AUPRCMetric, "auprc")])
def test_grouped_metrics_of_a_window(kind, name, mode):
    made = batches(4)
    subject = metric(kind, mode=mode, **{f"grouped_{name}": True})
    assert subject.get_required_inputs() == {"grouping_keys"}
    keys = [torch.arange(BATCH) % 3 + number for number in range(BATCHES)]
    for (p, y, w), groups in zip(made, keys, strict=True):
        subject.update(
            predictions=tensors(p),
            labels=tensors(y),
            weights=tensors(w),
            required_inputs={"grouping_keys": groups},
        )
    p, y, w = (torch.from_numpy(v)[None] for v in joined(made[-WINDOW_BATCHES:], "buy"))
    groups = torch.cat(keys[-WINDOW_BATCHES:])
    expected = (
        compute_auc_per_group(1, [p], [y], [w], groups)
        if name == "auc"
        else compute_auprc_per_group(1, p, y, w, groups)
    )
    found = subject.compute()[f"{name}-buy|window_grouped_{name}"]
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
    with pytest.raises(RecMetricException, match="grouping_keys"):
        subject.update(predictions=tensors(made[0][0]), labels=tensors(made[0][1]), weights=None)


def test_batches_that_do_not_fit():
    subject, fused = metric(NEMetric), metric(NEMetric, mode=FUSED)
    p = {"click": torch.rand(4)}
    subject.update(predictions=p, labels={"click": torch.ones(4)}, weights=None)
    assert float(subject.compute()["ne-click|lifetime_ne"]) > 0
    assert np.isnan(float(subject.compute()["ne-buy|lifetime_ne"]))
    for subject_, given, match in (
        (subject, {"labels": {}, "weights": None}, "labels and weights"),
        (subject, {"labels": p, "weights": {}}, "labels and weights"),
        (subject, {"labels": {"click": torch.ones(3)}, "weights": None}, "differ"),
        (subject, {"labels": torch.ones(4), "weights": None}, "one tensor of all"),
        (fused, {"labels": p, "weights": None}, "'buy' are not in the batch"),
    ):
        with pytest.raises(RecMetricException, match=match):
            subject_.update(predictions=p, **given)
    # A batch without examples counts nothing.
    before = subject.compute()
    none = {"click": torch.zeros(0)}
    subject.update(predictions=none, labels=none, weights=none)
    fused.update(predictions=torch.zeros(2, 0), labels=torch.zeros(2, 0), weights=None)
    assert subject.compute()["ne-click|window_ne"] == before["ne-click|window_ne"]
    with pytest.raises(ValueError, match="at least 40"):
        metric(NEMetric, window=39)
    with pytest.raises(ValueError, match="one of the two"):
        metric(NEMetric, mode=FUSED, fused_update_limit=2)
