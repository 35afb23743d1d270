"""Windows against recomputation from the newest examples, and what a metric keeps and forgets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessera.training.metrics.auc import AUCMetric, compute_auc
from tessera.training.metrics.calibration import CalibrationMetric
from tessera.training.metrics.metrics_config import RecTaskInfo
from tessera.training.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.training.metrics.ne import NEMetric, compute_ne, get_ne_states
from tessera.training.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecMetricException,
)
from tessera.training.metrics.window import WindowBuffer

TASK = [RecTaskInfo(name="t")]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    limit=st.integers(1, 20),
    count=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_a_window_is_the_sum_of_its_newest_batches(sizes, limit, count):
    window = WindowBuffer(max_size=limit, max_buffer_count=count)
    state = torch.zeros(2, dtype=torch.double)
    held = []
    for number, size in enumerate(sizes):
        batch = torch.tensor([float(number), size * 0.1], dtype=torch.double)
        window.aggregate_state(state, batch, size)
        held.append((size, batch))
        while len(held) > 1 and (len(held) > count or sum(s for s, _ in held) > limit):
            held.pop(0)
        expected = torch.stack([b for _, b in held]).sum(0)
        torch.testing.assert_close(state, expected, rtol=1e-12, atol=0.0)
        assert len(window.buffers) == len(held)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    every=st.integers(1, 25),
    tasks=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_sum_that_is_asked_for_seldom_has_the_bits_of_one_asked_for_always(sizes, every, tasks):
    always, seldom = (WindowBuffer(max_size=60, max_buffer_count=20) for _ in range(2))
    expected, found = (torch.zeros(tasks, dtype=torch.double) for _ in range(2))
    random = torch.Generator().manual_seed(every)
    batches = torch.rand(len(sizes), tasks, dtype=torch.double, generator=random)
    for number, (size, batch) in enumerate(zip(sizes, batches, strict=True), start=1):
        always.aggregate_state(expected, batch, size)
        seldom.add(batch, size)
        if number % every == 0 or number == len(sizes):
            seldom.write_sum(found)
            assert torch.equal(found, expected)


def test_nothing_is_left_of_batches_that_have_gone():
    """Sums that add and subtract keep 1e-16 of what has gone, and a ratio over that is nonsense."""
    window, state = WindowBuffer(max_size=3, max_buffer_count=9), torch.zeros(1, dtype=torch.double)
    for value in (0.1, 0.2, 0.3, 1e9, 0.7, 0.0, 0.0, 0.0):
        window.aggregate_state(state, torch.tensor([value], dtype=torch.double), 1)
    assert state.item() == 0.0


@pytest.mark.parametrize("sizes", [[7] * 30, [1, 16, 3, 16, 2, 2, 9, 1, 1, 16, 5]])
def test_windows_of_batches_of_any_size(sizes):
    """NE's window has the newest whole batches that fit, AUC's exactly the newest examples."""
    random = np.random.default_rng(len(sizes))
    limit = 20
    ne = NEMetric(1, 0, 16, TASK, window_size=limit)
    auc = AUCMetric(1, 0, 16, TASK, window_size=limit)
    held = []
    for size in sizes:
        batch = [torch.from_numpy(random.integers(0, 9, size) / 9.0 + 0.05) for _ in range(3)]
        batch[1] = (batch[1] > 0.5).double()
        held.append(batch)
        p, y, w = batch
        for metric in (ne, auc):
            metric.update(predictions={"t": p}, labels={"t": y}, weights={"t": w})
        while sum(len(b[0]) for b in held) > limit + 16:
            held.pop(0)
        whole = list(held)
        while sum(len(b[0]) for b in whole) > limit:
            whole.pop(0)
        p, y, w = (torch.cat(parts)[None] for parts in zip(*whole, strict=True))
        expected = compute_ne(*get_ne_states(y, p, w, 1e-12).values(), 1e-12)
        found = ne.compute()["ne-t|window_ne"]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)
        p, y, w = (torch.cat(parts)[None, -limit:].float() for parts in zip(*held, strict=True))
        found = auc.compute()["auc-t|window_auc"]
        torch.testing.assert_close(found, compute_auc(1, [p], [y], [w]), rtol=1e-9, atol=0.0)


class HalfComputation(RecMetricComputation):
    """A metric of one's own: the largest prediction of all, and of how many updates the window is."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._add_state(
            "largest",
            torch.zeros(self._n_tasks),
            add_window_state=False,
            dist_reduce_fx="max",
            persistent=True,
        )
        self._add_state(
            "updates", torch.zeros(self._n_tasks), add_window_state=True, dist_reduce_fx="sum"
        )

    def update(self, *, predictions, labels, weights, **kwargs):
        self.largest = torch.maximum(self.largest, predictions.amax(-1))
        self.updates += 1
        one = torch.ones(self._n_tasks)
        self._aggregate_window_state("updates", one, predictions.shape[-1])

    def _compute(self):
        return [
            MetricComputationReport(
                MetricName.DEFAULT, MetricPrefix.LIFETIME, self.largest, "most"
            ),
            MetricComputationReport(
                MetricName.DEFAULT, MetricPrefix.WINDOW, self.get_window_state("updates")
            ),
        ]


class HalfMetric(RecMetric):
    _namespace = MetricNamespace.CTR
    _computation_class = HalfComputation


def test_a_metric_of_ones_own_is_reset_moved_and_saved():
    metric = HalfMetric(1, 0, 2, TASK, window_size=4)
    for value in (0.25, 0.75, 0.5):
        p = {"t": torch.full((2,), value)}
        metric.update(predictions=p, labels=p, weights=None)
    values = {"ctr-t|lifetime_most": 0.75, "ctr-t|window_": 2.0}
    assert {k: v.item() for k, v in metric.compute().items()} == values
    assert list(metric.state_dict()) == ["_metrics_computations.0.largest"]
    nn.Sequential(metric).half()  # counts stay what they are
    assert {v.dtype for v in metric.compute().values()} == {torch.float32}
    other = HalfMetric(1, 0, 2, TASK, window_size=4)
    other.load_state_dict(metric.state_dict())
    found = {k: v.item() for k, v in other.compute().items()}
    assert found == {"ctr-t|lifetime_most": 0.75, "ctr-t|window_": 0.0}
    metric.reset()
    assert {v.item() for v in metric.compute().values()} == {0.0}
    metric.update(predictions=p, labels=p, weights=None)
    assert metric.compute()["ctr-t|window_"].item() == 1.0
    metric.to("meta")
    assert {v.device.type for v in metric.compute().values()} == {"meta"}
    with pytest.raises(RecMetricException, match="no window"):
        metric.computations()[0]._aggregate_window_state("largest", torch.zeros(1), 1)


def test_states_that_cannot_be():
    computation = HalfMetric(1, 0, 2, TASK, window_size=4).computations()[0]
    with pytest.raises(ValueError, match=r"torch.zeros\(n_tasks, 0\)"):
        computation.add_state("rows", [])
    with pytest.raises(ValueError, match="sum, mean, max, min, cat"):
        computation.add_state("other", torch.zeros(1), dist_reduce_fx="median")
    with pytest.raises(RecMetricException, match="call sync first"):
        computation.unsync()


def test_batches_without_weights_are_left_out():
    def values(weights, *, validate):
        metric = CalibrationMetric(
            1,
            0,
            4,
            [RecTaskInfo(name="a"), RecTaskInfo(name="b")],
            window_size=4,
            should_validate_update=validate,
        )
        for number, weight in enumerate(weights, start=1):
            ones = torch.ones(4)
            metric.update(
                predictions={"a": ones * number, "b": ones},
                labels={"a": ones, "b": ones},
                weights={"a": ones * weight, "b": ones * 0},
            )
        return {k: v.item() for k, v in metric.compute().items() if "window" in k}

    # The second batch of task a has no weights: with the check the window is still the first one.
    a, b = "calibration-a|window_calibration", "calibration-b|window_calibration"
    assert values([1, 0], validate=False) == {a: 0.0, b: 0.0}
    assert values([2, 0], validate=True) == {a: 1.0, b: 0.0}
    fused = NEMetric(1, 0, 4, TASK, window_size=4, should_validate_update=True)
    p = {"t": torch.rand(4)}
    fused.update(predictions=p, labels=p, weights={"t": torch.zeros(4)})
    assert fused.compute()["ne-t|lifetime_ne"].item() == 0.0  # NaN without the check


def test_inputs_may_be_written_again():
    """A program that writes each batch into the same memory; also while batches are kept."""
    for kind, arguments in (
        (AUCMetric, {}),
        (CalibrationMetric, {"fused_update_limit": 3, "should_clone_update_inputs": True}),
    ):
        found = []
        for again in (True, False):
            metric = kind(1, 0, 8, TASK, window_size=64, **arguments)
            memory = [torch.empty(8) for _ in range(3)]
            generator = torch.Generator().manual_seed(1)
            for _ in range(5):
                fresh = [torch.rand(8, generator=generator) for _ in range(3)]
                for place, values in zip(memory, fresh, strict=True):
                    place.copy_(values)
                p, y, w = memory if again else fresh
                metric.update(predictions={"t": p}, labels={"t": y}, weights={"t": w})
            usage = metric.get_memory_usage()
            assert sum(usage.values()) > 0
            found.append({k: v.item() for k, v in metric.compute().items()})
        assert found[0] == found[1]


def test_a_kept_batch_holds_no_graph():
    p = torch.rand(8, requires_grad=True)
    metric = AUCMetric(1, 0, 8, TASK, window_size=8)
    metric.update(predictions={"t": p * 2}, labels={"t": torch.ones(8)}, weights=None)
    assert not any(tensor.requires_grad for tensor in metric.get_memory_usage())
