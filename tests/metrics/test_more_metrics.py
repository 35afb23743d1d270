"""The other metrics of a training against plain loops and scikit-learn: lifetime, window, tasks, and errors."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from tessera.training.metrics.mapping import REC_METRICS_MAPPING
from tessera.training.metrics.metrics_config import (
    RecComputeMode,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
)
from tessera.training.metrics.rec_metric import RecMetricException
from tessera.training.metrics.segmented_ne import GroupingKeyConfig

BATCH, BATCHES, WINDOW, CLASSES = 12, 4, 24, 5
TASKS = ("a", "b")
UNFUSED = RecComputeMode.UNFUSED_TASKS_COMPUTATION
FUSED = RecComputeMode.FUSED_TASKS_COMPUTATION


def rows(kind="probability", seed=0):
    """For each batch, each task's predictions, labels and weights; some are equal, some weights are 0."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(BATCHES):
        batch = {}
        for task in TASKS:
            p = np.round(random.random(BATCH), 1) * 0.9 + 0.05
            y = (random.random(BATCH) < p).astype(np.float64)
            if kind == "number":
                y = np.round(random.random(BATCH) * 3)
            if kind == "bits":
                p, y = random.integers(0, 8, BATCH) * 1.0, random.integers(0, 8, BATCH) * 1.0
            w = np.round(random.random(BATCH) * 2, 1) * (random.random(BATCH) < 0.8)
            batch[task] = (p, y, w)
        made.append(batch)
    return made


def computed(metric, batches, mode=UNFUSED, inputs=None, tasks=None, **arguments):
    """The values by key after all batches; ``inputs`` has the required inputs of each batch."""
    tasks = tasks or [RecTaskInfo(name=task) for task in TASKS]
    module = REC_METRICS_MAPPING[metric](
        world_size=1,
        my_rank=0,
        batch_size=BATCH,
        tasks=tasks,
        compute_mode=mode,
        window_size=WINDOW,
        **arguments,
    )
    for number, batch in enumerate(batches):
        own = {name: [torch.from_numpy(np.asarray(each)) for each in batch[name]] for name in batch}
        more = {} if inputs is None else {"required_inputs": inputs[number]}
        module.update(
            predictions={name: p for name, (p, _, _) in own.items()},
            labels={name: y for name, (_, y, _) in own.items()},
            weights={name: w for name, (_, _, w) in own.items()},
            **more,
        )
    return {key: value.reshape(-1).tolist() for key, value in module.compute().items()}


def of_task(batches, task):
    """All rows of a task: predictions, labels, weights."""
    return tuple(np.concatenate(parts) for parts in zip(*(b[task] for b in batches), strict=True))


def entropy(p, y, w):
    return float(-(w * (y * np.log2(p) + (1 - y) * np.log2(1 - p))).sum())


def of_mean(y, w):
    mean = (w * y).sum() / w.sum()
    return float(-(w * y).sum() * np.log2(mean) - (w * (1 - y)).sum() * np.log2(1 - mean))


def ne(p, y, w):
    return entropy(p, y, w) / of_mean(y, w)


def cali_free(p, y, w):
    mean = (w * p).sum() / w.sum()
    against = -(w * y).sum() * np.log2(mean) - (w * (1 - y)).sum() * np.log2(1 - mean)
    return ne(p, y, w) / against


def xauc(batches, task):
    """Pairs inside batches, in plain loops."""
    alike = pairs = 0.0
    for batch in batches:
        p, y, w = batch[task]
        for i in range(len(p)):
            for j in range(i):
                pairs += w[i] * w[j]
                alike += w[i] * w[j] * (np.sign(p[i] - p[j]) == np.sign(y[i] - y[j]))
    return alike / pairs


def nmse(p, y, w):
    return float((w * (p - y) ** 2).sum() / (w * (1 - y) ** 2).sum())


PLAIN = {
    RecMetricEnum.NE_POSITIVE: (
        "ne_positive",
        lambda p, y, w: float(-(w * y * np.log2(p)).sum()) / of_mean(y, w),
    ),
    RecMetricEnum.UNWEIGHTED_NE: ("unweighted_ne", lambda p, y, w: ne(p, y, np.ones_like(w))),
    RecMetricEnum.CALI_FREE_NE: ("cali_free_ne", cali_free),
    RecMetricEnum.SERVING_NE: ("ne", ne),
    RecMetricEnum.SERVING_CALIBRATION: (
        "calibration",
        lambda p, y, w: (w * p).sum() / (w * y).sum(),
    ),
    RecMetricEnum.NMSE: ("nmse", nmse),
    RecMetricEnum.AVERAGE: ("prediction_average", lambda p, y, w: np.average(p, weights=w)),
    RecMetricEnum.NUM_POSITIVE_SAMPLES: ("num_positive_samples", lambda p, y, w: (w * y).sum()),
    RecMetricEnum.SUM_WEIGHTS: ("sum_weights", lambda p, y, w: w.sum()),
    RecMetricEnum.NUM_MISSING_LABELS: ("num_missing_labels", lambda p, y, w: 0.0),
    RecMetricEnum.WEIGHTED_SUM_PREDICTIONS: (
        "weighted_sum_predictions",
        lambda p, y, w: (w * p).sum(),
    ),
}


@pytest.mark.parametrize("mode", [UNFUSED, FUSED])
@pytest.mark.parametrize("metric", list(PLAIN), ids=str)
def test_sums_over_all_examples_and_over_the_window(metric, mode):
    name, plain = PLAIN[metric]
    batches = rows()
    values = computed(metric, batches, mode)
    namespace = REC_METRICS_MAPPING[metric]._namespace
    for task in TASKS:
        for prefix, own in (("lifetime", batches), ("window", batches[-2:])):
            [value] = values[f"{namespace}-{task}|{prefix}_{name}"]
            assert value == pytest.approx(float(plain(*of_task(own, task))), rel=1e-9)
    if str(metric).startswith("serving"):
        counted = values[f"{namespace}-a|total_examples"]
        assert counted == [np.count_nonzero(of_task(batches, "a")[2])]


def test_missing_labels_and_predictions_that_are_nan():
    batch = {"a": (np.array([0.5, math.nan, 0.25]), np.array([1.0, math.nan, math.nan]), np.array([2.0, 3.0, 0.5]))}  # fmt: skip
    tasks = [RecTaskInfo(name="a")]
    for metric, expected in (
        (RecMetricEnum.NUM_MISSING_LABELS, 3.5),
        (RecMetricEnum.NUM_POSITIVE_SAMPLES, 2.0),
        (RecMetricEnum.WEIGHTED_SUM_PREDICTIONS, 1.125),
    ):
        assert computed(metric, [batch], tasks=tasks)[f"{metric}-a|lifetime_{metric}"] == [expected]


def test_roots_and_label_means():
    batches = rows("number")
    values = computed(RecMetricEnum.NMSE, batches)
    assert values["nmse-a|window_nrmse"][0] ** 2 == pytest.approx(values["nmse-a|window_nmse"][0])
    _, y, w = of_task(batches, "b")
    labels = computed(RecMetricEnum.AVERAGE, batches)["average-b|lifetime_label_average"]
    assert labels == [pytest.approx(np.average(y, weights=w))]


def test_recalibration_is_that_of_the_predictions():
    batches = rows()
    p, y, w = of_task(batches, "a")
    p = p / (p + (1 - p) / 0.25)
    value = computed(RecMetricEnum.RECALIBRATED_NE, batches, recalibration_coefficient=0.25)
    assert value["recalibrated_ne-a|lifetime_ne"] == [pytest.approx(ne(p, y, w))]
    value = computed(
        RecMetricEnum.RECALIBRATED_CALIBRATION, batches, recalibration_coefficient=0.25
    )
    expected = (w * p).sum() / (w * y).sum()
    found = value["recalibrated_calibration-a|lifetime_calibration"]
    assert found == [pytest.approx(expected)]


def test_pairs_in_the_same_order(monkeypatch):
    batches = rows("number")
    whole = computed(RecMetricEnum.XAUC, batches, FUSED)
    monkeypatch.setattr("tessera.training.metrics.xauc._PAIRS_AT_ONCE", 30)  # some rows at a time
    values = computed(RecMetricEnum.XAUC, batches, FUSED)
    assert values == {key: pytest.approx(value) for key, value in whole.items()}
    for task in TASKS:
        assert values[f"xauc-{task}|lifetime_xauc"] == [pytest.approx(xauc(batches, task))]
        assert values[f"xauc-{task}|window_xauc"] == [pytest.approx(xauc(batches[-2:], task))]


def rauc(p, y):
    order = sorted(range(len(p)), key=lambda i: (p[i], y[i]))
    ranked = [y[i] for i in order]
    wrong = sum(ranked[i] > ranked[j] for j in range(len(p)) for i in range(j))
    return 1 - wrong / (len(p) * (len(p) - 1) / 2)


def test_pairs_of_a_window_and_of_groups():
    batches = rows("number")
    random = np.random.default_rng(1)
    keys = [torch.from_numpy(random.integers(0, 3, BATCH)) for _ in batches]
    inputs = [{"grouping_keys": key} for key in keys]
    values = computed(RecMetricEnum.RAUC, batches, FUSED, inputs, grouped_rauc=True)
    groups = torch.cat(keys[-2:]).numpy()
    for task in TASKS:
        p, y, _ = of_task(batches[-2:], task)
        assert values[f"rauc-{task}|window_rauc"] == [pytest.approx(rauc(p, y))]
        each = [rauc(p[groups == g], y[groups == g]) for g in range(3)]
        assert values[f"rauc-{task}|window_grouped_rauc"] == [pytest.approx(np.mean(each))]


@pytest.mark.parametrize("mode", [UNFUSED, FUSED])
def test_recall_at_k_among_classes(mode):
    random = np.random.default_rng(2)
    batches = [
        {
            task: (random.random((BATCH, CLASSES)), random.integers(0, CLASSES, BATCH), random.random(BATCH))
            for task in TASKS
        }
        for _ in range(BATCHES)
    ]  # fmt: skip
    values = computed(RecMetricEnum.MULTICLASS_RECALL, batches, mode, number_of_classes=CLASSES)
    for task in TASKS:
        p, y, w = of_task(batches, task)
        expected = [
            sk.top_k_accuracy_score(y, p, k=k, sample_weight=w, labels=range(CLASSES))
            for k in range(1, CLASSES)
        ]
        found = values[f"multiclass_recall-{task}|lifetime_multiclass_recall"]
        assert found == pytest.approx([*expected, 1.0])


def test_precision_of_each_bit():
    batches = rows("bits")
    names = ["cat", "dog", "cow"]
    values = computed(
        RecMetricEnum.MULTI_LABEL_PRECISION, batches, FUSED, num_labels=3, label_names=names
    )
    for task in TASKS:
        p, y, w = of_task(batches, task)
        for bit, name in enumerate(names):
            chosen = (p.astype(int) >> bit) & 1
            seen = (y.astype(int) >> bit) & 1
            expected = sk.precision_score(seen, chosen, sample_weight=w)
            key = f"multi_label_precision-{task}|lifetime_multi_label_precision{name}"
            assert values[key] == [pytest.approx(expected)]
    with pytest.raises(ValueError, match="label_names has 3 names of 2 labels"):
        computed(RecMetricEnum.MULTI_LABEL_PRECISION, [], num_labels=2, label_names=names)


def test_the_threshold_that_reaches_a_precision():
    batches = rows()
    values = computed(RecMetricEnum.HINDSIGHT_TARGET_PR, batches, FUSED, target_precision=0.7)
    thresholds = np.linspace(0, 1, 1000, dtype=np.float32).astype(np.float64)
    for task in TASKS:
        p, y, w = of_task(batches, task)

        def counts(threshold, p=p, y=y, w=w):
            above = p >= threshold
            return (w * y * above).sum(), (w * (1 - y) * above).sum()

        precisions = [found / ((found + wrong) or 1.0) for found, wrong in map(counts, thresholds)]
        place = next(i for i, precision in enumerate(precisions) if precision >= 0.7)
        threshold = thresholds[place]
        found, wrong = counts(threshold)
        missed = (w * y * (p <= threshold)).sum()
        start = f"hindsight_target_pr-{task}|lifetime_hindsight_target"
        assert values[f"{start}_pr"] == [place]
        assert values[f"{start}_precision"] == [pytest.approx(found / (found + wrong))]
        assert values[f"{start}_recall"] == [pytest.approx(found / (found + missed))]


@pytest.mark.parametrize("of_labels", [False, True])
def test_the_best_of_each_session(of_labels):
    batches = rows("number" if of_labels else "probability")
    random = np.random.default_rng(3)
    sessions = [random.integers(0, 4, BATCH) for _ in batches]
    chosen = SessionMetricDef("session", top_threshold=2, run_ranking_of_labels=of_labels)
    tasks = [RecTaskInfo(name="a", session_metric_def=chosen)]
    inputs = [{"session": torch.from_numpy(each)} for each in sessions]
    only = [{"a": batch["a"]} for batch in batches]
    found = missed = wrong = 0.0
    for batch, session in zip(only, sessions, strict=True):
        p, y, w = batch["a"]
        for i in range(BATCH):
            mates = [j for j in range(BATCH) if session[j] == session[i]]
            best = sum(p[j] > p[i] for j in mates) < 2
            label = y[i] if not of_labels else float(sum(y[j] > y[i] for j in mates) < 2)
            found += w[i] * label * best
            missed += w[i] * label * (not best)
            wrong += w[i] * (1 - label) * best
    for metric, expected in (
        (RecMetricEnum.RECALL_SESSION_LEVEL, found / (found + missed)),
        (RecMetricEnum.PRECISION_SESSION_LEVEL, found / (found + wrong)),
    ):
        values = computed(metric, only, inputs=inputs, tasks=tasks)
        assert values[f"{metric}-a|lifetime_{metric}"] == [pytest.approx(expected)]
        with pytest.raises(RecMetricException, match="has no 'session'"):
            computed(metric, only, tasks=tasks)
        with pytest.raises(RecMetricException, match="has no session_metric_def"):
            computed(metric, [])
        with pytest.raises(RecMetricException, match="give UNFUSED_TASKS_COMPUTATION"):
            computed(metric, [], FUSED, tasks=tasks)


@pytest.mark.parametrize("mode", [UNFUSED, FUSED])
def test_normalised_entropy_of_each_group(mode):
    batches = rows()
    random = np.random.default_rng(4)
    keys = [random.integers(0, 2, BATCH) for _ in batches]
    others = [random.integers(0, 3, BATCH) for _ in batches]
    inputs = [
        {"grouping_keys": torch.from_numpy(k), "other": torch.from_numpy(o).float()}
        for k, o in zip(keys, others, strict=True)
    ]
    alone = computed(
        RecMetricEnum.SEGMENTED_NE, batches, mode, inputs, num_groups=3, include_logloss=True
    )
    both = computed(
        RecMetricEnum.SEGMENTED_NE,
        batches,
        mode,
        inputs,
        grouping_keys=[
            {"name": "grouping_keys", "num_groups": 3},
            GroupingKeyConfig("other", 3, cast_keys_to_int=True),
        ],
    )
    for task in TASKS:
        p, y, w = of_task(batches, task)
        for group in range(2):
            mine = np.concatenate(keys) == group
            [value] = alone[f"segmented_ne-{task}|lifetime_segmented_ne_{group}"]
            assert value == pytest.approx(ne(p[mine], y[mine], w[mine]))
            loss = entropy(p[mine], y[mine], w[mine]) / w[mine].sum()
            assert alone[f"segmented_ne-{task}|lifetime_logloss_{group}"] == [pytest.approx(loss)]
            key = f"segmented_ne-{task}|lifetime_segmented_ne_{group}@grouping_keys"
            assert both[key] == [value]
            mine = np.concatenate(others) == group
            [value] = both[f"segmented_ne-{task}|lifetime_segmented_ne_{group}@other"]
            assert value == pytest.approx(ne(p[mine], y[mine], w[mine]))
        # A group without examples.
        assert math.isnan(alone[f"segmented_ne-{task}|lifetime_segmented_ne_2"][0])
    for more, message in (
        ({"num_groups": 1}, "has groups from 0 to 1; num_groups is 1"),
        ({"grouping_keys": "other", "num_groups": 3}, "'other' is torch.float32"),
        ({"grouping_keys": "none"}, "has no 'none'"),
    ):
        with pytest.raises(RecMetricException, match=message):
            computed(RecMetricEnum.SEGMENTED_NE, batches, mode, inputs, **more)
    with pytest.raises(ValueError, match="grouping_keys has a int"):
        computed(RecMetricEnum.SEGMENTED_NE, [], grouping_keys=[3])


def test_a_scalar_is_the_newest_and_the_mean_of_the_window():
    batches = rows("number")
    values = computed(RecMetricEnum.SCALAR, batches)
    means = [batch["b"][1].mean() for batch in batches]
    assert values["scalar-b|lifetime_scalar"] == [pytest.approx(means[-1])]
    assert values["scalar-b|window_scalar"] == [pytest.approx(np.mean(means))]


@pytest.mark.parametrize("mode", [UNFUSED, FUSED])
def test_tensors_of_the_models_output(mode):
    batches = rows()
    random = np.random.default_rng(5)
    inputs = [
        {name: torch.from_numpy(random.random(BATCH)) for name in ("x", "z", "latest_imp", "total_latest_imp")}
        for _ in batches
    ]  # fmt: skip
    tasks = [RecTaskInfo(name="a", tensor_name="x"), RecTaskInfo(name="b", tensor_name="z", weighted=False)]  # fmt: skip
    values = computed(RecMetricEnum.TENSOR_WEIGHTED_AVG, batches, mode, inputs, tasks)
    x, z = (torch.cat([each[name] for each in inputs]).numpy() for name in "xz")
    w = of_task(batches, "a")[2]
    assert values["weighted_avg-a|lifetime_weighted_avg"] == [pytest.approx(np.average(x, weights=w))]  # fmt: skip
    assert values["weighted_avg-b|lifetime_weighted_avg"] == [pytest.approx(z.mean())]
    values = computed(RecMetricEnum.OUTPUT, batches, mode, inputs)
    newest = float(inputs[-1]["total_latest_imp"].mean())
    assert values["output-b|output_total_latest_imp"] == [pytest.approx(newest)]
    with pytest.raises(RecMetricException, match="has no 'latest_imp'"):
        computed(RecMetricEnum.OUTPUT, batches, mode, [{}] * BATCHES)
    with pytest.raises(RecMetricException, match="has no 'x', which task 'a' needs"):
        computed(RecMetricEnum.TENSOR_WEIGHTED_AVG, batches, mode, [{}] * BATCHES, tasks)
    with pytest.raises(RecMetricException, match="task 'a' has no tensor_name"):
        computed(RecMetricEnum.TENSOR_WEIGHTED_AVG, [], mode)
    twice = [RecTaskInfo(name="a", tensor_name="x"), RecTaskInfo(name="b", tensor_name="x", weighted=False)]  # fmt: skip
    with pytest.raises(RecMetricException, match="'x' weighted and not weighted"):
        computed(RecMetricEnum.TENSOR_WEIGHTED_AVG, [], mode, tasks=twice)


@pytest.mark.parametrize("mode", [UNFUSED, FUSED])
def test_examples_of_a_task_per_second(mode, monkeypatch):
    # A clock that goes on by half a second with each look at it.
    clock = iter(np.arange(0, 100, 0.5))
    monkeypatch.setattr("tessera.training.metrics.tower_qps.time.monotonic", lambda: next(clock))
    values = computed(RecMetricEnum.TOWER_QPS, rows(), mode, warmup_steps=2)
    step_s = 0.5 * (1 if mode is FUSED else len(TASKS))
    for task in TASKS:
        assert values[f"qps-{task}|lifetime_qps"] == [pytest.approx(BATCH / step_s)]
        assert values[f"qps-{task}|window_qps"] == [pytest.approx(BATCH / step_s)]
        assert values[f"qps-{task}|total_examples"] == [BATCH * BATCHES]
    with pytest.raises(RecMetricException, match="give fused_update_limit=0"):
        computed(RecMetricEnum.TOWER_QPS, [], fused_update_limit=2)
