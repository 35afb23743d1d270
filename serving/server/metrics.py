"""The server's metrics: plain counters that the event loop's thread owns, no locks.

`prometheus_client` renders them: `MetricsCollector` turns them into its metric families when
somebody asks.  Names, labels and buckets are the same in both of Tessera's servers.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tessera.serving.server.batching import CutReason
from tessera.serving.server.errors import Code, Reason
from tessera.serving.server.request import BatchTimings

# fmt: off
LATENCY_BUCKETS = (
    .0001, .0002, .0003, .0006, .001, .002, .003, .004, .005, .006, .008, .01, .013, .016, .02,
    .025, .03, .04, .05, .065, .08, .1, .2, .5, 1.0, 2.0, 5.0,
)
# fmt: on
"""Upper bounds in seconds."""

REQUEST_BUCKETS = tuple(float(1 << power) for power in range(13))
SAMPLE_BUCKETS = tuple(float(1 << power) for power in range(17))
ID_BUCKETS = tuple(float(1 << power) for power in range(23))

STAGES = ("decode", "queue", "assemble", "transfer", "forward", "split", "encode")

_MODEL = ("model", "version")


class Histogram:
    """Counts per bucket; ``observe`` costs one bisection."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value`` in the first bucket whose upper bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bound as Prometheus writes it, and observations at or below it."""
        rows: list[tuple[str, int]] = []
        total = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if math.isinf(bound) else repr(bound), total))
        return rows

    def quantile(self, fraction: float) -> float:
        """An estimate, linear inside its bucket; NaN without observations."""
        total = self.count()
        if total == 0:
            return math.nan
        rank = fraction * total
        below = 0
        lower = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * (rank - below) / count
            below += count
            lower = bound
        return lower


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The facts of ``tessera_model_info``.

    Attributes:
        sha256: of the package's file, once it is known; the label is empty until then.
        torch: the version that made it.
        dtype: the weight type of its tables.
    """

    sha256: Callable[[], str | None]
    torch: str
    dtype: str


class ModelMetrics:
    """One model's counters.

    Args:
        model: the name that requests use.
        version: the version that is loaded.

    Attributes:
        answered_seconds: of the calls that got scores, what ``duration`` counts of all.
        answered_samples: samples of those calls.
        last_answer_ms: when the last of them ended, milliseconds since 1970.
    """

    def __init__(self, model: str, version: str) -> None:
        self.model = model
        self.version = version
        self.requests = dict.fromkeys(Code, 0)
        self.rejected = dict.fromkeys(Reason, 0)
        self.batches = dict.fromkeys(CutReason, 0)
        self.duration = Histogram(LATENCY_BUCKETS)
        self.answered_seconds = 0.0
        self.answered_samples = 0
        self.last_answer_ms = 0
        self.stages = {stage: Histogram(LATENCY_BUCKETS) for stage in STAGES}
        self.batch_requests = Histogram(REQUEST_BUCKETS)
        self.batch_samples = Histogram(SAMPLE_BUCKETS)
        self.batch_ids = Histogram(ID_BUCKETS)
        self.ids = 0
        self.out_of_range_ids = 0
        self.load_seconds = 0.0
        self.ready = False
        self.device = "cpu"
        self.info: ModelInfo | None = None
        self.queue_requests: Callable[[], int] = _zero
        self.queue_samples: Callable[[], int] = _zero
        self.inflight_batches: Callable[[], int] = _zero
        # Of those, by device; empty until the model is loaded.
        self.inflight_by_device: dict[str, Callable[[], int]] = {}
        # By device and kind.
        self.memory_bytes: dict[tuple[str, str], Callable[[], int]] = {}

    def observe_call(self, code: Code, seconds: float, samples: int) -> None:
        """Count one call that has ended."""
        self.requests[code] += 1
        self.duration.observe(seconds)
        if code is Code.OK:
            self.answered_seconds += seconds
            self.answered_samples += samples
            self.last_answer_ms = time.time_ns() // 1_000_000

    def observe_pass(self, timings: BatchTimings) -> None:
        """Count one forward pass."""
        stages = self.stages
        stages["assemble"].observe(timings.assemble)
        stages["transfer"].observe(timings.transfer)
        stages["forward"].observe(timings.forward)
        stages["split"].observe(timings.split)
        self.batch_requests.observe(timings.requests)
        self.batch_samples.observe(timings.samples)
        self.batch_ids.observe(timings.ids)
        self.ids += timings.ids


def _zero() -> int:
    return 0


class MetricsCollector(Collector):
    """Renders every model's counters.

    Attributes:
        models: the models, in the order in which they are served.
        unresolved: requests that named no known model; its labels are empty.
    """

    def __init__(self, server_version: str) -> None:
        self._server_version = server_version
        self.models: list[ModelMetrics] = []
        self.unresolved = ModelMetrics("", "")

    def collect(self) -> Iterator[Metric]:
        """The families, as `prometheus_client` asks for them."""
        yield from self._counters()
        yield from self._histograms()
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        requests = _counter("tessera_requests", "Requests by how they ended", "code")
        rejected = _counter("tessera_rejected", "Requests refused or dropped, by reason", "reason")
        for model in (*self.models, self.unresolved):
            # Requests without a model show only what happened, not a row of zeros.
            shown = model is not self.unresolved
            for code, count in model.requests.items():
                if shown or count:
                    requests.add_metric((model.model, model.version, code.value), count)
            for reason, count in model.rejected.items():
                if shown or count:
                    rejected.add_metric((model.model, model.version, reason.value), count)
        batches = _counter("tessera_batches", "Batches by why they were cut", "reason")
        ids = _counter("tessera_ids", "Ids that were looked up")
        outside = _counter(
            "tessera_out_of_range_ids", "Ids outside their table that were clamped or hashed"
        )
        for model in self.models:
            labels = (model.model, model.version)
            for cut, count in model.batches.items():
                batches.add_metric((*labels, cut.value), count)
            ids.add_metric(labels, model.ids)
            outside.add_metric(labels, model.out_of_range_ids)
        yield from (requests, rejected, batches, ids, outside)

    def _histograms(self) -> Iterator[Metric]:
        stages = _histogram(
            "tessera_stage_duration_seconds", "Where a request's time goes, by stage", "stage"
        )
        families: list[tuple[HistogramMetricFamily, Callable[[ModelMetrics], Histogram]]] = [
            (
                _histogram("tessera_request_duration_seconds", "From the first byte to the answer"),
                lambda model: model.duration,
            ),
            (
                _histogram("tessera_batch_requests", "Requests that shared a forward pass"),
                lambda model: model.batch_requests,
            ),
            (
                _histogram("tessera_batch_samples", "Samples of a forward pass"),
                lambda model: model.batch_samples,
            ),
            (
                _histogram("tessera_batch_ids", "Ids of a forward pass"),
                lambda model: model.batch_ids,
            ),
        ]
        for model in self.models:
            labels = (model.model, model.version)
            for stage, histogram in model.stages.items():
                stages.add_metric((*labels, stage), histogram.cumulative(), histogram.sum)
            for family, read in families:
                family.add_metric(labels, read(model).cumulative(), read(model).sum)
        yield stages
        yield from (family for family, _ in families)

    def _gauges(self) -> Iterator[Metric]:
        requests = _gauge("tessera_queue_requests", "Requests that wait")
        samples = _gauge("tessera_queue_samples", "Samples that wait")
        inflight = _gauge("tessera_inflight_batches", "Batches that workers hold", "device")
        load = _gauge("tessera_model_load_duration_seconds", "How long loading took")
        ready = _gauge("tessera_model_ready", "1 when the model answers")
        info = _gauge("tessera_model_info", "Always 1", "sha256", "torch", "dtype", "device")
        memory = _gauge("tessera_device_memory_bytes", "Bytes held", "device", "kind")
        for model in self.models:
            labels = (model.model, model.version)
            requests.add_metric(labels, model.queue_requests())
            samples.add_metric(labels, model.queue_samples())
            for device, count in model.inflight_by_device.items():
                inflight.add_metric((*labels, device), count())
            ready.add_metric(labels, float(model.ready))
            if model.info:
                load.add_metric(labels, model.load_seconds)
                about = (model.info.sha256() or "", model.info.torch, model.info.dtype)
                info.add_metric((*labels, *about, model.device), 1)
            for place, read in model.memory_bytes.items():
                memory.add_metric((*labels, *place), read())
        build = GaugeMetricFamily("tessera_build_info", "Always 1", labels=("server", "version"))
        build.add_metric(("python", self._server_version), 1)
        yield from (requests, samples, inflight, load, ready, info, memory, build)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=(*_MODEL, *labels))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=(*_MODEL, *labels))


def _histogram(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=(*_MODEL, *labels))


class Metrics:
    """A server's registry: the models' counters and the process's own figures."""

    def __init__(self, server_version: str) -> None:
        self._registry = CollectorRegistry()
        self._collector = MetricsCollector(server_version)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)

    @property
    def unresolved(self) -> ModelMetrics:
        """Counts requests that name no known model."""
        return self._collector.unresolved

    def add(self, model: ModelMetrics) -> None:
        """Show ``model`` from now on."""
        self._collector.models.append(model)

    def render(self) -> bytes:
        """Everything in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)
