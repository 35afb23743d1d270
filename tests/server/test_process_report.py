"""What processes of one server report of themselves, and the sums of it."""

import json

import numpy as np
import pytest

from tessera.serving.server.errors import Code
from tessera.serving.server.metrics.counted_names import CountedNames
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.metrics.process_report import ProcessReporter, ProcessTotals, is_ready


def counting_page(dropped=0):
    model = ModelMetrics("m", "1", CountedNames(ranged=("age",), outputs=("clicked", "bought")))
    metrics = MetricsPage("1", lambda: dropped)
    metrics.show_calls(lambda: 0, lambda: {"sent": 2, "dropped": 1})
    metrics.add(model)
    return metrics, model


def scores(**outputs):
    return {name: np.array(own, "<f4").tobytes() for name, own in outputs.items()}


def test_reports_add_up_and_a_successor_goes_on_from_them():
    one, first = counting_page(dropped=2)
    reporter = ProcessReporter(one, b"")
    first.observe_call(Code.OK, 0.01, samples=3)
    first.ids = 7
    first.positions["age"].observe(0.3)
    first.scores.take(scores(clicked=[0.5, 0.5, np.nan], bought=[0, 1, 2]))
    one.unresolved.requests[Code.NOT_FOUND] += 1
    first.memory_bytes = {("cpu", "tables"): lambda: 100, ("cpu", "buffers"): lambda: 10}
    told = reporter.report()
    assert not is_ready(b"")
    assert not is_ready(told)
    two, second = counting_page(dropped=1)
    successor = ProcessReporter(two, told)
    second.observe_call(Code.OK, 0.02, samples=1)
    second.ready = True
    second.scores.take(scores(clicked=[0.5], bought=[np.inf]))
    second.memory_bytes = first.memory_bytes
    told_next = successor.report()
    assert is_ready(told_next)
    assert json.loads(told_next)["dropped_lines"] == {"server": 3, "access": 0}

    totals = ProcessTotals()
    shown, model = counting_page()
    for _ in range(2):  # a report replaces the one before
        totals.take([model, shown.unresolved], shown.security, [told, b"", told_next], restarts=1)
    assert model.requests[Code.OK] == 3
    assert model.duration.count() == 3
    assert model.duration.sum == pytest.approx(0.04)
    assert (model.answered_samples, model.ids) == (3 + 3 + 1, 14)
    clicked = model.scores.histograms["clicked"]
    assert (clicked.count(), clicked.sum) == (2 + 2 + 1, 2.5)
    ages = model.positions["age"]
    assert (ages.count(), ages.sum) == (1 + 1, pytest.approx(0.6))
    assert model.scores.not_finite == {"clicked": 1 + 1, "bought": 1}
    assert model.scores.histograms["bought"].sum == 6
    assert shown.unresolved.requests[Code.NOT_FOUND] == 2
    assert {place: read() for place, read in model.memory_bytes.items()} == {
        ("cpu", "tables"): 100,
        ("cpu", "buffers"): 20,
    }
    assert model.ready
    assert totals.dropped_lines["server"] == 5
    assert totals.spans == {"sent": 2 + 4, "dropped": 1 + 2}
