"""All metrics of a training as one module: configs, what is reported, checkpoints, intervals, throughput."""

import math
import re

import pytest
import torch
from sklearn import metrics as sk

from tessera.training.metrics import metric_module, throughput
from tessera.training.metrics.mapping import REC_METRICS_MAPPING
from tessera.training.metrics.metric_module import (
    RecMetricModule,
    StateMetric,
    generate_metric_module,
    steps_for_interval,
)
from tessera.training.metrics.metrics_config import (
    BatchSizeStage,
    DefaultMetricsConfig,
    DefaultTaskInfo,
    EmptyMetricsConfig,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecMetricEnumBase,
    RecTaskInfo,
    SessionMetricDef,
    StateMetricEnum,
    ThroughputDef,
    validate_batch_size_stages,
)
from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNamespace,
    MetricPrefix,
    task_wildcard_metrics_pattern,
)
from tessera.training.metrics.model_utils import (
    parse_model_outputs,
    parse_task_model_outputs,
    session_ids_to_tensor,
)
from tessera.training.metrics.rec_metric import RecMetricException
from tessera.training.metrics.throughput import ThroughputMetric

BATCH = 32


def made(config, cls=RecMetricModule, **arguments):
    given = {"batch_size": BATCH, "world_size": 1, "my_rank": 0, "state_metrics_mapping": {}}
    return generate_metric_module(cls, config, **{**given, **arguments}, device=torch.device("cpu"))


def output(seed, *, sessions=False):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(BATCH, generator=generator)
    y = (torch.rand(BATCH, generator=generator) < p).float()
    found = {"prediction": p, "label": y, "weight": torch.rand(BATCH, generator=generator)}
    return {**found, "session_id": torch.arange(BATCH) // 4} if sessions else found


def numbers(values):
    return {key: float(value) for key, value in values.items()}


def test_every_metric_of_a_config_is_reported():
    definition = RecMetricDef(rec_task_indices=[0], window_size=4 * BATCH)
    task = RecTaskInfo(
        session_metric_def=SessionMetricDef("session_id", top_threshold=2), tensor_name="x"
    )
    # Predictions of several classes have another shape.
    chosen = [metric for metric in RecMetricEnum if metric is not RecMetricEnum.MULTICLASS_RECALL]
    config = MetricsConfig(
        rec_tasks=[task],
        rec_metrics=dict.fromkeys(chosen, definition),
        throughput_metric=ThroughputDef(),
        compute_interval_steps=3,
    )
    module = made(config)
    more = {"grouping_keys": torch.zeros(BATCH, dtype=torch.int64)}
    more.update(dict.fromkeys(("latest_imp", "total_latest_imp", "x"), torch.ones(BATCH)))
    assert module.get_required_inputs() == sorted([*more, "session_id"])
    outputs = [{**output(seed, sessions=True), **more} for seed in range(6)]
    due = []
    for each in outputs:
        module.update(each)
        due.append(module.should_compute())
    assert due == [False, False, True] * 2
    found = numbers(module.compute())
    for metric in chosen:
        prefix = "" if metric is RecMetricEnum.OUTPUT else "window_"
        start = f"{REC_METRICS_MAPPING[metric]._namespace}-DefaultTask|{prefix}"
        assert any(key.startswith(start) for key in found), metric
    p, y, w = (torch.cat([o[k] for o in outputs[-4:]]) for k in ("prediction", "label", "weight"))
    expected = sk.roc_auc_score(y, p, sample_weight=w)
    assert found["auc-DefaultTask|window_auc"] == pytest.approx(expected, abs=1e-9)
    assert found["throughput-throughput|total_examples"] == 6 * BATCH
    local = numbers(module.local_compute())
    assert local["auc-DefaultTask|local_window_auc"] == found["auc-DefaultTask|window_auc"]
    module.reset()
    assert math.isnan(float(module.compute()["ne-DefaultTask|lifetime_ne"]))


def test_default_and_empty_configs():
    module = made(DefaultMetricsConfig)
    module.update(output(0))
    assert set(numbers(module.compute())) == {
        "ne-DefaultTask|lifetime_ne",
        "ne-DefaultTask|window_ne",
        "throughput-throughput|total_examples",
        "throughput-throughput|attempt_examples",
    }
    empty = made(EmptyMetricsConfig)
    empty.update({})
    assert empty.compute() == empty.local_compute() == {}


def test_a_training_that_is_continued_goes_on_counting():
    """By state dict and by the states of all ranks: lifetime values as without the stop, new windows."""
    whole, first = made(DefaultMetricsConfig), made(DefaultMetricsConfig)
    for seed in range(3):
        whole.update(output(seed))
        first.update(output(seed))
    second, third = made(DefaultMetricsConfig), made(DefaultMetricsConfig)
    first.sync()
    second.load_state_dict(first.state_dict())
    first.unsync()
    third.load_pre_compute_states(first.get_pre_compute_states())
    window = made(DefaultMetricsConfig)
    for module in (whole, second, third, window):
        module.update(output(7))
    expected, of_window = numbers(whole.compute()), numbers(window.compute())
    lifetime, newest = "ne-DefaultTask|lifetime_ne", "ne-DefaultTask|window_ne"
    for module in (second, third):
        found = numbers(module.compute())
        assert found[lifetime] == pytest.approx(expected[lifetime], rel=1e-12)
        assert found[newest] == of_window[newest]
        assert found["throughput-throughput|total_examples"] == 4 * BATCH
    with pytest.raises(RecMetricException, match="nothing of task 'DefaultTask' under 'ne'"):
        third.load_pre_compute_states({})
    with pytest.raises(RecMetricException, match="'cross_entropy_sum' is missing"):
        third.load_pre_compute_states({"ne": {"DefaultTask": {}}})


class LearningRate(StateMetric):
    def get_metrics(self):
        return {"lr": 0.25}


def test_state_metrics_are_reported():
    config = MetricsConfig(state_metrics=[StateMetricEnum.OPTIMIZERS])
    module = made(config, state_metrics_mapping={StateMetricEnum.OPTIMIZERS: LearningRate()})
    assert module.compute() == {"optimizers-optimizers|lr": 0.25}
    with pytest.raises(ValueError, match="state_metrics has optimizers"):
        made(config)


class OwnMetrics(RecMetricEnumBase):
    OWN = "own"


@pytest.mark.parametrize(
    ("metric", "definition", "match"),
    [
        (RecMetricEnum.NE, RecMetricDef(), "rec_tasks or rec_task_indices"),
        (
            RecMetricEnum.NE,
            RecMetricDef(rec_tasks=[DefaultTaskInfo], rec_task_indices=[0]),
            "one of the two",
        ),
        (OwnMetrics.OWN, RecMetricDef(rec_task_indices=[0]), "REC_METRICS_MAPPING"),
        (RecMetricEnum.NE, RecMetricDef(rec_task_indices=[0], window_size=8), "at least 32"),
    ],
)
def test_configs_that_cannot_be(metric, definition, match):
    with pytest.raises(ValueError, match=match):
        made(MetricsConfig(rec_tasks=[DefaultTaskInfo], rec_metrics={metric: definition}))


def test_the_interval_follows_the_seconds(monkeypatch):
    clock = iter([100.0, 120.0, 500.0])
    monkeypatch.setattr(metric_module.time, "time", lambda: next(clock))
    config = MetricsConfig(
        rec_tasks=[DefaultTaskInfo],
        rec_metrics=DefaultMetricsConfig.rec_metrics,
        compute_interval_steps=10,
        min_compute_interval=30.0,
        max_compute_interval=50.0,
    )
    module = made(config)
    steps = []
    for _ in range(3):
        module.compute()
        steps.append(module.compute_interval_steps)
    assert steps == [10, 20, 20]
    assert steps_for_interval(10, 5.0, 0.0, 9.0) == 10
    assert steps_for_interval(10, 20.0, 0.0, 9.0) == 4
    assert steps_for_interval(10, 20.0, 39.0, math.inf) == 20
    assert steps_for_interval(1, 20.0, 0.0, 0.5) == 1
    with pytest.raises(ValueError, match="compute intervals"):
        RecMetricModule(1, 1, min_compute_interval=-1.0)


def timed(monkeypatch, metric, times):
    for now in times:
        monkeypatch.setattr(throughput.time, "monotonic", lambda now=now: now)
        metric.update()
    return {key.partition("|")[2]: float(value) for key, value in metric.compute().items()}


def test_throughput_is_of_all_ranks_and_of_a_window(monkeypatch):
    metric = ThroughputMetric(batch_size=8, world_size=2, window_seconds=5, warmup_steps=2)
    assert timed(monkeypatch, metric, [0.0, 10.0]) == {
        "total_examples": 32.0,
        "attempt_examples": 32.0,
    }
    # Batches of 1, 2, 4 and 1 s: the window of 5 s has the last two.
    found = timed(monkeypatch, metric, [11.0, 13.0, 17.0, 18.0])
    assert found == {
        "total_examples": 96.0,
        "attempt_examples": 96.0,
        "lifetime_throughput": 64 / 8,
        "attempt_throughput": 64 / 8,
        "window_throughput": 32 / 5,
    }
    # Continued: the first batch starts the clock, and the time between the two does not count.
    other = ThroughputMetric(batch_size=8, world_size=2, window_seconds=5, warmup_steps=1)
    other.load_state_dict(metric.state_dict())
    found = timed(monkeypatch, other, [1000.0, 1002.0])
    assert found["total_examples"] == 128.0
    assert found["attempt_examples"] == 32.0
    assert found["lifetime_throughput"] == (64 + 16) / (8 + 2)
    assert found["attempt_throughput"] == 16 / 2


def test_throughput_of_stages_and_of_many_batches(monkeypatch):
    stages = [BatchSizeStage(4, 2), BatchSizeStage(8, None)]
    metric = ThroughputMetric(
        batch_size=1, world_size=1, window_seconds=99, warmup_steps=1, batch_size_stages=stages
    )
    found = timed(monkeypatch, metric, [0.0, 1.0, 2.0])
    assert (found["batch_size"], found["total_examples"]) == (8.0, 16.0)
    assert found["window_throughput"] == 12 / 2
    other = ThroughputMetric(
        batch_size=1, world_size=1, window_seconds=99, warmup_steps=1, batch_size_stages=stages
    )
    other.load_state_dict(metric.state_dict())
    assert timed(monkeypatch, other, [0.0])["total_examples"] == 24.0
    # More batches than a window holds leave with their time.
    monkeypatch.setattr(throughput, "MAX_WINDOW_TS", 10)
    metric = ThroughputMetric(batch_size=1, world_size=1, window_seconds=9, warmup_steps=1)
    found = timed(monkeypatch, metric, [0.25 * n for n in range(30)])
    assert found["window_throughput"] == 4.0
    for arguments, match in (
        ({"window_seconds": 0}, "window_seconds=0"),
        ({"window_seconds": 1, "warmup_steps": 0}, "warmup_steps=0"),
        ({"window_seconds": 1, "batch_size_stages": stages[:1]}, "max_iters=2"),
    ):
        with pytest.raises(ValueError, match=match):
            ThroughputMetric(batch_size=1, world_size=1, **arguments)
    with pytest.raises(ValueError, match="rising"):
        validate_batch_size_stages([BatchSizeStage(4, 5), BatchSizeStage(4, 3), stages[1]])


def test_outputs_are_taken_apart_by_task():
    tasks = [
        RecTaskInfo(name="one"),
        RecTaskInfo(name="none", label_name="e", prediction_name="e", weight_name="e"),
        RecTaskInfo(name="ndcg", prediction_name="p2"),
    ]
    out = {
        "label": torch.ones(3, 1),
        "prediction": torch.rand(1, 3),
        "weight": torch.ones(3),
        "e": torch.zeros(0),
        "p2": torch.rand(3, 5),
        "session": ["a", "a", "b"],
    }
    labels, predictions, weights, required = parse_task_model_outputs(tasks, out, ["session"])
    assert list(labels) == list(predictions) == list(weights) == ["one", "ndcg"]
    assert predictions["one"].shape == labels["one"].shape == (3,)
    assert predictions["ndcg"].shape == (3, 5)
    assert required["session"].tolist() == [1, 1, 2]
    assert session_ids_to_tensor(["b", "a", "a", "b"]).tolist() == [1, 2, 2, 3]
    assert session_ids_to_tensor([]).tolist() == []
    one = {"label": torch.ones(1, 1), "p": torch.rand(1), "w": torch.ones(1)}
    assert [t.shape for t in parse_model_outputs("label", "p", "w", one)] == [(1,)] * 3
    assert parse_model_outputs("label", "", "", one)[1:] == (None, None)
    for names, match in (
        (("label", "p2", "w"), "no tensor 'w'"),
        (("label", "e", "weight"), "0 examples"),
        (("label", "", "weight"), "both or none"),
    ):
        with pytest.raises(RecMetricException, match=match):
            parse_model_outputs(*names, out)


def test_a_pattern_fits_the_keys_of_every_task():
    pattern = task_wildcard_metrics_pattern(MetricNamespace.NE, MetricName.NE, MetricPrefix.WINDOW)
    assert re.fullmatch(pattern, "ne-click|window_ne")
    assert not re.fullmatch(pattern, "ne-click|lifetime_ne")
