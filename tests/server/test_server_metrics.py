"""Names, labels and buckets of every metric, as both servers have them."""

import math
import re
import time
import urllib.error

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.serving.server.errors import Code
from tessera.serving.server.front.last_hour import POINTS, STEP_S
from tessera.serving.server.front.status_page import MOST_FEATURES, WINDOW_SECONDS, StatusPage
from tessera.serving.server.metrics.counted_names import CountedNames
from tessera.serving.server.metrics.histogram import Histogram
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import LATENCY_BUCKETS, ModelMetrics
from tessera.serving.server.metrics.version_metrics import ShadowResult
from tests.server.server_harness import FakeLoader, config, parse_metrics, request, serving, value

MODEL = {"model", "version"}
LATENCY = (
    ".0001 .0002 .0003 .0006 .001 .002 .003 .004 .005 .006 .008 .01 .013 .016 .02 .025 .03 .04 .05 "
    ".065 .08 .1 .2 .5 1 2 5"
)
STAGES = "decode queue assemble transfer forward split encode"
COUNTERS = {
    "tessera_requests_total": MODEL | {"code"},
    "tessera_batches_total": MODEL | {"reason"},
    "tessera_rejected_total": MODEL | {"reason"},
    "tessera_ids_total": MODEL,
    "tessera_out_of_range_ids_total": MODEL,
    "tessera_log_lines_dropped_total": {"log"},
    "tessera_spans_total": {"result"},
    "tessera_records_total": {"result"},
    "tessera_record_bytes_total": set(),
}
HISTOGRAMS = {
    "tessera_request_duration_seconds": MODEL,
    "tessera_stage_duration_seconds": MODEL | {"stage"},
    "tessera_batch_requests": MODEL,
    "tessera_batch_samples": MODEL,
    "tessera_batch_ids": MODEL,
}
GAUGES = {
    "tessera_queue_requests": MODEL,
    "tessera_queue_samples": MODEL,
    "tessera_inflight_batches": MODEL | {"device"},
    "tessera_model_load_duration_seconds": MODEL,
    "tessera_model_ready": MODEL,
    "tessera_model_info": MODEL | {"sha256", "torch", "dtype", "device"},
    "tessera_device_memory_bytes": MODEL | {"device", "kind"},
    "tessera_build_info": {"server", "version"},
}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        running.predict(request(3))
        yield running


@pytest.fixture(scope="module")
def metrics(server):
    return server.metrics()


def labels_of(metrics, name):
    return [{key for key, _ in labels} for found, labels in metrics if found == name]


@pytest.mark.parametrize(("name", "labels"), sorted((COUNTERS | GAUGES).items()))
def test_counters_and_gauges(metrics, name, labels):
    found = labels_of(metrics, name)
    assert found
    assert all(have == labels for have in found)


@pytest.mark.parametrize(("name", "labels"), sorted(HISTOGRAMS.items()))
def test_histograms(metrics, name, labels):
    assert all(have == labels for have in labels_of(metrics, f"{name}_sum"))
    assert all(have == labels for have in labels_of(metrics, f"{name}_count"))
    bounds = sorted(
        {float(dict(have)["le"]) for found, have in metrics if found == f"{name}_bucket"}
    )
    assert bounds[-1] == math.inf
    if name.endswith("_seconds"):
        assert bounds[:-1] == [float(bound) for bound in LATENCY.split()]
    else:
        assert bounds[:-1] == [2.0**power for power in range(len(bounds) - 1)]


def test_there_are_no_others(metrics):
    ours = {name for name, _ in metrics if name.startswith("tessera_")}
    suffixes = ("_bucket", "_count", "_sum")
    parts = {f"{name}{suffix}" for name in HISTOGRAMS for suffix in suffixes}
    assert ours == set(COUNTERS) | set(GAUGES) | parts
    assert value(metrics, "process_resident_memory_bytes") > 0
    assert value(metrics, "process_cpu_seconds_total") > 0


def test_cpu_time_is_told_finer_than_in_hundredths():
    page = MetricsPage("0", lambda: 0)
    (told,) = re.findall(r"(?m)^process_cpu_seconds_total (\S+)$", page.render().decode())
    assert float(told) <= time.process_time()
    assert len(told.partition(".")[2]) > 2


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        (
            "tessera_stage_duration_seconds_count",
            "stage",
            STAGES,
        ),
        ("tessera_batches_total", "reason", "full delay idle deadline drain"),
        ("tessera_rejected_total", "reason", "queue_full deadline cancelled invalid draining"),
        (
            "tessera_requests_total",
            "code",
            (
                "OK INVALID_ARGUMENT NOT_FOUND RESOURCE_EXHAUSTED DEADLINE_EXCEEDED CANCELLED "
                "UNAVAILABLE INTERNAL"
            ),
        ),
    ],
)
def test_every_label_value_is_there_from_the_start(metrics, name, label, values):
    found = [dict(labels)[label] for have, labels in metrics if have == name]
    assert sorted(found) == sorted(values.split())


def test_values_after_one_request(metrics):
    assert value(metrics, "tessera_requests_total", code="OK") == 1
    for stage in STAGES.split():
        assert value(metrics, "tessera_stage_duration_seconds_count", stage=stage) == 1
    assert value(metrics, "tessera_batch_samples_sum") == 3
    assert value(metrics, "tessera_batch_ids_sum") == 12
    assert value(metrics, "tessera_model_ready") == 1
    assert value(metrics, "tessera_model_load_duration_seconds") == 0.25
    assert value(metrics, "tessera_device_memory_bytes", kind="tables", device="cpu") == 12345
    assert value(metrics, "tessera_device_memory_bytes", kind="buffers") > 0
    assert value(metrics, "tessera_build_info", server="python") == 1
    assert value(metrics, "tessera_model_info", sha256="0" * 64, dtype="int8", device="cpu") == 1


def test_probes_and_page(server):
    assert server.http("/healthz") == "ok\n"
    assert server.http("/readyz") == "ready\n"
    page = server.http("/")
    assert "<td>m</td><td>m-v1</td><td>ready</td>" in page
    assert 'http-equiv="refresh"' in page
    assert "http://" not in page  # self-contained


def test_page_escapes_names():
    with serving(config("<script>alert(1)</script>"), FakeLoader()) as server:
        page = server.http("/")
    assert page.count("<script>") == 1, "the page's own"
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


def test_unknown_path_is_not_found(server):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.http("/etc/passwd")


@given(st.lists(st.floats(0, 10)))
def test_histogram_counts_like_the_definition(observations):
    histogram = Histogram(LATENCY_BUCKETS)
    for observation in observations:
        histogram.observe(observation)
    for bound, cumulative in histogram.cumulative():
        assert cumulative == sum(observation <= float(bound) for observation in observations)
    assert histogram.sum == pytest.approx(sum(observations))


def test_quantile():
    histogram = Histogram((1.0, 2.0, 4.0))
    assert math.isnan(histogram.quantile(0.5))
    for observation in (0.5, 1.5, 1.5, 3.0):
        histogram.observe(observation)
    assert histogram.quantile(0.25) == 1.0
    assert histogram.quantile(0.5) == 1.5
    assert histogram.quantile(1.0) == 4.0
    histogram.observe(100.0)
    assert histogram.quantile(1.0) == 4.0  # beyond the last bound nothing is known


def test_labels_are_escaped():
    metrics = MetricsPage("1", lambda: 0)
    name = 'a"b\\c\nd'
    metrics.add(ModelMetrics(name, "v"))
    parsed = parse_metrics(metrics.render().decode())
    assert value(parsed, "tessera_ids_total", model=name) == 0


def test_status_board_shows_the_last_minute():
    now = [0.0]
    model = ModelMetrics("m", "1")
    page = StatusPage([model], lambda: now[0])

    def serve(requests, seconds):
        for _ in range(requests):
            model.duration.observe(seconds)
            model.requests[Code.OK] += 1

    serve(30, 0.0015)
    model.requests[Code.INVALID_ARGUMENT] += 15
    now[0] = 30.0
    (row,) = page.rows()
    assert row.requests_per_second == pytest.approx(1.0)
    assert row.failures_per_second == pytest.approx(0.5)
    assert 1.0 <= row.p50_ms <= row.p99_ms <= 2.0
    page.tick()
    for second in range(31, 31 + WINDOW_SECONDS + 5):
        now[0] = float(second)
        page.tick()
    (row,) = page.rows()
    assert row.requests_per_second == 0
    assert math.isnan(row.p50_ms)


def test_the_last_hour_is_drawn():
    now = [0.0]
    model = ModelMetrics("m", "1")
    page = StatusPage([model], lambda: now[0])

    def step(answered, refused):
        for _ in range(answered):
            model.duration.observe(0.004)
            model.requests[Code.OK] += 1
        model.requests[Code.INVALID_ARGUMENT] += refused
        now[0] += STEP_S
        page.tick()

    for answered, refused in ((100, 0), (0, 0), (100, 40)):
        step(answered, refused)
    ((shown, plots),) = page.hours()
    assert shown is model
    assert plots.most_failures == 2
    assert 3 <= plots.most_ms <= 4
    # Three points at the right; the second has no latency.
    assert plots.failures == "M177 40.00h1L178 40.00L179 0.00"
    assert plots.p99.startswith("M177 ")
    assert "h1M179 " in plots.p99
    for _ in range(POINTS):
        step(0, 0)
    ((_, plots),) = page.hours()
    assert (plots.most_ms, plots.most_failures, plots.p50) == (0, 0, "")


def test_shadows_are_told_by_the_version_that_answered():
    metrics = MetricsPage("1", lambda: 0)
    one, other, shadow = (ModelMetrics("m", version) for version in "123")
    for model, count in ((one, 3), (other, 1)):
        for _ in range(count):
            metrics.versions.compare(model, shadow, np.full(2, 0.25))
            metrics.versions.count_shadow(model, shadow, ShadowResult.COMPARED)
    metrics.versions.count_shadow(one, shadow, ShadowResult.DROPPED)
    first, second = metrics.versions.shadows()
    assert (first.version, first.shadow_version) == ("1", "3")
    assert (first.compared, first.dropped, first.failed, first.mean) == (3, 1, 0, 0.25)
    assert (second.version, second.compared) == ("2", 1)
    parsed = parse_metrics(metrics.render().decode())
    name = "tessera_shadow_calls_total"
    assert value(parsed, name, model="m", version="3", result="compared") == 4
    metrics.versions.forget(other)
    assert [row.version for row in metrics.versions.shadows()] == ["1"]


def test_the_status_page_shows_the_features_with_unlike_values():
    known = CountedNames(missing=("a", "b"), outside=("a", "b", "c"))
    model = ModelMetrics("m", "1", known)
    page = StatusPage([model, ModelMetrics("quiet", "1", known)], lambda: 0.0)
    assert page.features() == []
    model.missing_values, model.outside_values = [0, 5], [3, 1, 0]
    found = [(row.model, row.feature, row.outside, row.missing) for row in page.features()]
    assert found == [("m", "b", 1, 5), ("m", "a", 3, 0)]
    names = tuple(f"f{number}" for number in range(30))
    many = ModelMetrics("many", "1", CountedNames(outside=names))
    many.outside_values = list(range(30))
    shown = StatusPage([many], lambda: 0.0).features()
    assert [row.outside for row in shown] == list(range(29, 29 - MOST_FEATURES, -1))
