"""What one process of a server has counted, as bytes, and the sums over all processes.

Counters and histograms are added up, as are the gauges of queues and of buffers; tables are in memory
that the processes share, and count once.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tessera.serving.server.metrics.counted_names import CountedNames
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import ModelInfo, ModelMetrics
from tessera.serving.server.metrics.security_metrics import SecurityMetrics, add_counts

Report = dict[str, Any]

_EMPTY_REPORT_BYTES = 4_096
_MODEL_REPORT_BYTES = 32_768
_COUNT_BYTES = 22  # of a number of 64 bits in a list
_SHARED_MEMORY = "tables"


def report_capacity(models: Sequence[CountedNames]) -> int:
    """Bytes that the report of a process may take whose models' features and outputs are these."""
    counted = sum(model.numbers() for model in models)
    most = _EMPTY_REPORT_BYTES + (len(models) + 1) * _MODEL_REPORT_BYTES
    return most + counted * _COUNT_BYTES


class ProcessReporter:
    """Tells what the calling process has counted.

    Args:
        page: its metrics.
        before: the report of the process whose place it takes: its counters go on from there.
    """

    def __init__(self, page: MetricsPage, before: bytes) -> None:
        self._page = page
        self._rss_bytes_before = _resident_bytes()
        past: Report = json.loads(before) if before else {}
        self._past_cpu_seconds: float = past.get("cpu_seconds", 0.0)
        self._past_dropped: dict[str, int] = past.get("dropped_lines", {})
        self._past_spans: dict[str, int] = past.get("spans", {})
        self._past_records: dict[str, int] = past.get("records", {})
        for model in (*page.models, page.unresolved):
            if past:
                model.add(past["models"][model.model]["counted"])
        if past:
            add_counts(page.security.refused, past["refused_calls"])

    def report(self) -> bytes:
        """The report, as JSON."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        models = (*self._page.models, self._page.unresolved)
        return json.dumps(
            {
                "pid": os.getpid(),
                "cpu_seconds": self._past_cpu_seconds + usage.ru_utime + usage.ru_stime,
                "resident_bytes_more": _resident_bytes() - self._rss_bytes_before,
                "virtual_bytes": _statm(0),
                "open_fds": _open_fds(),
                "dropped_lines": {
                    log: self._past_dropped.get(log, 0) + lines()
                    for log, lines in self._page.dropped_lines.items()
                },
                "spans": {
                    result: self._past_spans.get(result, 0) + count
                    for result, count in self._page.spans.items()
                },
                "records": {
                    result: self._past_records.get(result, 0) + count
                    for result, count in self._page.records.items()
                },
                "refused_calls": self._page.security.refused,
                "models": {
                    model.model: {"counted": model.counted(), "now": _gauges(model)}
                    for model in models
                },
            }
        ).encode()


class ProcessTotals(Collector):
    """The sums of reports: fills a page's models with them, and tells the ``process_*`` families.

    Attributes:
        dropped_lines: of each log, the lines that all processes have lost.
        spans: of all processes, the spans that were ``sent`` and ``dropped``.
        records: of all processes, the records that were ``written`` and ``dropped``, and their ``bytes``.
    """

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self.dropped_lines: Counter[str] = Counter()
        self.spans: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self._restarts = 0
        self._began = time.time()

    def take(
        self,
        models: Sequence[ModelMetrics],
        security: SecurityMetrics,
        contents: Sequence[bytes],
        restarts: int,
    ) -> None:
        """Replace what was told before.

        Args:
            models: a page's models, and what it has for requests of no model; filled.
            security: the page's metrics of tokens; filled.
            contents: of each process the last report; empty of one that has not told any.
            restarts: processes that took the place of others.
        """
        self._reports = [json.loads(content) for content in contents if content]
        self._restarts = restarts
        self.dropped_lines, self.spans, self.records = Counter(), Counter(), Counter()
        for report in self._reports:
            self.dropped_lines.update(report["dropped_lines"])
            self.spans.update(report["spans"])
            self.records.update(report["records"])
        security.take_others([report["refused_calls"] for report in self._reports])
        for model in models:
            reports = [report["models"][model.model] for report in self._reports]
            model.reset()
            for report in reports:
                model.add(report["counted"])
            _sum_gauges(model, [report["now"] for report in reports])

    def collect(self) -> Iterator[Metric]:
        """The families, as `prometheus_client` asks for them."""
        told = self._reports

        def total(name: str) -> float:
            return float(sum(report[name] for report in told))

        restarts = CounterMetricFamily(
            "tessera_worker_restarts", "Worker processes that took the place of one that ended"
        )
        restarts.add_metric((), self._restarts)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu = CounterMetricFamily("process_cpu_seconds", "User and system CPU time, all processes")
        cpu.add_metric((), usage.ru_utime + usage.ru_stime + total("cpu_seconds"))
        yield from (restarts, cpu)
        # What processes share counts once: it was resident when the first of them began.
        resident = _resident_bytes(os.getppid()) + total("resident_bytes_more")
        open_fds = _open_fds() + total("open_fds")
        for name, text, number in (
            ("virtual_memory_bytes", "Virtual memory, all processes", total("virtual_bytes")),
            ("resident_memory_bytes", "Resident memory, shared pages counted once", resident),
            ("start_time_seconds", "When the server began, seconds since 1970", self._began),
            ("open_fds", "Open file descriptors, all processes", open_fds),
            (
                "max_fds",
                "The most file descriptors of a process",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            ),
        ):
            yield GaugeMetricFamily(f"process_{name}", text, value=number)


def counted_of(content: bytes, model: str) -> Report:
    """What the process that reported has counted for ``model``, as `ModelMetrics.add` takes it."""
    counted: Report = json.loads(content)["models"][model]["counted"]
    return counted


def is_ready(content: bytes) -> bool:
    """Whether every model of the process that reported answers."""
    models = json.loads(content)["models"] if content else {}
    return bool(models) and all(model["now"]["ready"] for name, model in models.items() if name)


def _gauges(model: ModelMetrics) -> Report:
    info = model.info
    return {
        "queue_requests": model.queue_requests(),
        "queue_samples": model.queue_samples(),
        "inflight": {device: count() for device, count in model.inflight_by_device.items()},
        "memory": [[*place, read()] for place, read in model.memory_bytes.items()],
        "load_seconds": model.load_seconds,
        "ready": model.ready,
        "device": model.device,
        "info": info and [info.sha256(), info.torch, info.dtype],
    }


def _sum_gauges(model: ModelMetrics, told: list[Report]) -> None:
    def constant(number: int) -> Any:
        return lambda: number

    model.queue_requests = constant(sum(now["queue_requests"] for now in told))
    model.queue_samples = constant(sum(now["queue_samples"] for now in told))
    model.ready = any(now["ready"] for now in told)
    inflight: dict[str, int] = {}
    memory: dict[tuple[str, str], int] = {}
    for now in told:
        model.load_seconds, model.device = now["load_seconds"], now["device"]
        if now["info"]:
            sha256, torch, dtype = now["info"]
            model.info = ModelInfo(sha256=constant(sha256), torch=torch, dtype=dtype)
        for device, count in now["inflight"].items():
            inflight[device] = inflight.get(device, 0) + count
        for device, kind, held in now["memory"]:
            past = memory.get((device, kind), 0)
            memory[device, kind] = held if kind == _SHARED_MEMORY else past + held
    model.inflight_batches = constant(sum(inflight.values()))
    model.inflight_by_device = {device: constant(count) for device, count in inflight.items()}
    model.memory_bytes = {place: constant(held) for place, held in memory.items()}


def _open_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _statm(field: int, pid: int | str = "self") -> int:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[field]) * resource.getpagesize()


def _resident_bytes(pid: int | str = "self") -> int:
    return _statm(1, pid)
