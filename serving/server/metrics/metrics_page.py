"""The metrics page: every model's counters and the process's own figures.

`prometheus_client` renders them: `MetricsCollector` turns them into its metric families when
somebody asks.  Names, labels and buckets are the same in both of Tessera's servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tessera.serving.server.metrics.histogram import Histogram
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.metrics.security_metrics import SecurityMetrics
from tessera.serving.server.metrics.version_metrics import VersionMetrics

_MODEL = ("model", "version")


class MetricsCollector(Collector):
    """Renders every model's counters.

    Attributes:
        models: the models, in the order in which they are served.
        unresolved: requests that named no known model; its labels are empty.
        versions: the metrics of repositories.
        security: those of tokens and certificates.
        dropped_lines: of each log, how many lines it has lost so far.
        spans: how many spans of traced calls were ``sent`` and ``dropped`` so far.
        records: how many requests were recorded (``written``) and ``dropped`` so far, and the ``bytes`` of the former.
    """

    def __init__(self, server_version: str, dropped_log_lines: Callable[[], int]) -> None:
        self._server_version = server_version
        self.dropped_lines: dict[str, Callable[[], int]] = {
            "server": dropped_log_lines,
            "access": lambda: 0,
        }
        self.spans: Callable[[], Mapping[str, int]] = lambda: {"sent": 0, "dropped": 0}
        self.records: Callable[[], Mapping[str, int]] = dict
        self.models: list[ModelMetrics] = []
        self.unresolved = ModelMetrics("", "")
        self.versions = VersionMetrics()
        self.security = SecurityMetrics()

    def collect(self) -> Iterator[Metric]:
        """The families, as `prometheus_client` asks for them."""
        yield from self._counters()
        yield from self._histograms()
        yield from self._gauges()
        yield from self.versions.collect()
        yield from self.security.collect()

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
        values = _counter(
            "tessera_feature_outside_range",
            "Values outside of what the training rows held, by feature",
            "feature",
        )
        missing = _counter(
            "tessera_feature_missing", "Dense values that were missing, by feature", "feature"
        )
        for model in self.models:
            labels = (model.model, model.version)
            model.look_at_features()
            for name, count in zip(model.names.outside, model.outside_values, strict=True):
                values.add_metric((*labels, name), count)
            for name, count in zip(model.names.missing, model.missing_values, strict=True):
                missing.add_metric((*labels, name), count)
            for cut, count in model.batches.items():
                batches.add_metric((*labels, cut.value), count)
            ids.add_metric(labels, model.ids)
            outside.add_metric(labels, model.out_of_range_ids)
        yield from (requests, rejected, batches, ids, outside, values, missing)
        yield from (self._dropped(), self._told_spans(), *self._recorded())

    def _dropped(self) -> Metric:
        dropped = CounterMetricFamily(
            "tessera_log_lines_dropped",
            "Log lines that found no room or could not be written",
            labels=("log",),
        )
        for log, lines in self.dropped_lines.items():
            dropped.add_metric((log,), lines())
        return dropped

    def _told_spans(self) -> Metric:
        spans = CounterMetricFamily(
            "tessera_spans", "Spans of traced calls, by what became of them", labels=("result",)
        )
        for result, count in self.spans().items():
            spans.add_metric((result,), count)
        return spans

    def _recorded(self) -> tuple[Metric, Metric]:
        counts = self.records()
        records = CounterMetricFamily(
            "tessera_records", "Recorded requests, by what became of them", labels=("result",)
        )
        for result in ("written", "dropped"):
            records.add_metric((result,), counts.get(result, 0))
        size = CounterMetricFamily("tessera_record_bytes", "Bytes of recorded requests")
        size.add_metric((), counts.get("bytes", 0))
        return records, size

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
        yield self._positions()
        yield from self._scores()

    def _positions(self) -> Metric:
        positions = _histogram(
            "tessera_feature_range_position",
            "Where dense values lie in the range of the training rows, 0 to 1, by feature",
            "feature",
        )
        for model in self.models:
            model.look_at_features()
            for name, histogram in model.positions.items():
                labels = (model.model, model.version, name)
                positions.add_metric(labels, histogram.cumulative(), histogram.sum)
        return positions

    def _scores(self) -> Iterator[Metric]:
        scores = _histogram(
            "tessera_score", "Scores that passes have computed, by output", "output"
        )
        not_finite = _counter(
            "tessera_score_not_finite",
            "Scores that are NaN or infinite and therefore not in tessera_score, by output",
            "output",
        )
        for model in self.models:
            model.scores.count()
            for name, histogram in model.scores.histograms.items():
                labels = (model.model, model.version, name)
                scores.add_metric(labels, histogram.cumulative(), histogram.sum)
                not_finite.add_metric(labels, model.scores.not_finite[name])
        yield from (scores, not_finite)

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


class _OneProcess(ProcessCollector):
    """The ``process_*`` families of the calling process, its CPU time to the nanosecond.

    The library's own is in hundredths of a second, as /proc tells it, and a load generator compares what two
    moments say that may lie a tenth of a second apart.
    """

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            if family.name == "process_cpu_seconds":
                family.samples = [
                    sample._replace(value=time.process_time()) for sample in family.samples
                ]
            yield family


class MetricsPage:
    """A server's registry: the models' counters and the process's own figures.

    Args:
        server_version: the label of ``tessera_build_info``.
        dropped_log_lines: how many lines the server's own log has lost so far.
        process: tells the ``process_*`` families; those of the calling process if None.
    """

    def __init__(
        self,
        server_version: str,
        dropped_log_lines: Callable[[], int],
        process: Collector | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        self._collector = MetricsCollector(server_version, dropped_log_lines)
        self._registry.register(self._collector)
        if process is None:
            _OneProcess(registry=self._registry)
        else:
            self._registry.register(process)

    @property
    def models(self) -> list[ModelMetrics]:
        """The models, in the order in which they are served."""
        return self._collector.models

    @property
    def unresolved(self) -> ModelMetrics:
        """The counters of requests whose model is unknown."""
        return self._collector.unresolved

    @property
    def versions(self) -> VersionMetrics:
        """The metrics of repositories."""
        return self._collector.versions

    @property
    def security(self) -> SecurityMetrics:
        """The metrics of tokens and certificates."""
        return self._collector.security

    @property
    def dropped_lines(self) -> dict[str, Callable[[], int]]:
        """What tells how many lines each log has lost so far, by the log's name."""
        return self._collector.dropped_lines

    @property
    def spans(self) -> Mapping[str, int]:
        """How many spans of traced calls were ``sent`` and ``dropped`` so far."""
        return self._collector.spans()

    @property
    def records(self) -> Mapping[str, int]:
        """How many requests were recorded (``written``) and ``dropped`` so far, and the ``bytes`` of the former."""
        return self._collector.records()

    def show_records(self, records: Callable[[], Mapping[str, int]]) -> None:
        """Ask this for the counts of recorded requests."""
        self._collector.records = records

    def show_calls(
        self, dropped_lines: Callable[[], int], spans: Callable[[], Mapping[str, int]]
    ) -> None:
        """Ask these for the lines that the access log has lost, and for the spans that were sent and dropped."""
        self._collector.dropped_lines["access"] = dropped_lines
        self._collector.spans = spans

    def add(self, model: ModelMetrics) -> None:
        """Show ``model`` from now on."""
        self._collector.models.append(model)

    def remove(self, model: ModelMetrics) -> None:
        """Show ``model`` no more."""
        self._collector.models.remove(model)
        self._collector.versions.forget(model)

    def render(self) -> bytes:
        """Everything in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)
