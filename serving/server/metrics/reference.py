"""Every metric of both servers, read from their code, and docs/metrics.md, which describes them.

    python -m tessera.serving.server.metrics.reference --write

The families of the Python server come from its own metrics page, with one model for which everything has been
counted, so that names, types, labels and buckets are those of a scrape.  Those that the C++ server alone has come from
its source; the others it has under the same names, to which tests/conformance holds it.  It runs in the checkout.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from tessera.serving.repository.plan import VersionState
from tessera.serving.server.metrics.counted_names import CountedNames
from tessera.serving.server.metrics.metrics_page import MetricsCollector
from tessera.serving.server.metrics.model_metrics import ModelInfo, ModelMetrics
from tessera.serving.server.metrics.process_report import ProcessTotals
from tessera.serving.server.metrics.security_metrics import SecurityMetrics
from tessera.serving.server.metrics.version_metrics import ShadowResult
from tessera.serving.server.repository.model_versions import IndexRow

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "metrics.md"
WRITE_COMMAND = "make metrics-page"

BOTH, CPP, PROCESSES = "both", "`tessera-server`", "`tessera serve --processes`"
_CPP_PAGE = ROOT / "cpp_server" / "src" / "metrics" / "metrics_page.cc"
_CPP_LIMITS = ROOT / "cpp_server" / "src" / "http2" / "limits.h"

_WORDS = ("code", "reason", "stage", "result", "state", "files", "log")
"""Labels whose values are words of the servers' own."""

_LABELS = {
    "model": "the name that requests use; empty of requests that name no known model",
    "version": "the model's version; of `tessera_build_info` the server's",
    "shadow_version": "the version of the shadow, beside the one that answered",
    "feature": "the feature's name",
    "output": "the output's name, as the package's schema has it",
    "device": "`cpu`, or `cuda:0`, `cuda:1`, ...",
    "kind": "`tables` (stored rows), `buffers` (batches and scores) or, of GPUs, `reserved` (all that torch's allocator holds)",
    "sha256": "of the package's file; empty until it is known",
    "torch": "the torch that made the package",
    "dtype": "the row type of its tables",
    "server": "`python` or `cpp`",
}

_SECTIONS = (
    ("Calls", r"tessera_(requests|rejected|request_duration|stage_duration)_"),
    ("Queue and batches", r"tessera_(queue|batch|inflight)"),
    ("Ids, values and scores", r"tessera_(ids_|out_of_range_|feature_|score)"),
    ("Tokens and certificates", r"tessera_(calls_refused|secret|certificate)_"),
    ("Commits", r"tessera_(model_commit$|freshness|commit)"),
    ("Models", r"tessera_(model|shadow|device_memory)_"),
    ("The server", r"tessera_(build|connections|streams|log|spans|record|worker)|process_"),
)
"""Title and names; the first that matches has the family."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One metric.

    Attributes:
        name: as samples have it, but for the suffixes of a histogram's.
        kind: ``counter``, ``gauge`` or ``histogram``.
        text: what the metrics page says of it.
        labels: by name the values, where those are words of the servers' own; else empty.
        bounds: of a histogram the upper bounds of its buckets.
        servers: which have it.
    """

    name: str
    kind: str
    text: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()
    servers: str = BOTH

    def samples(self) -> dict[str, frozenset[str]]:
        """The names of its samples, with the labels of each."""
        own = frozenset(self.labels)
        if self.kind != "histogram":
            return {self.name: own}
        ends = {"_bucket": own | {"le"}, "_sum": own, "_count": own}
        return {self.name + end: labels for end, labels in ends.items()}


def families() -> list[Family]:
    """Every family of either server.

    Raises:
        ValueError: the source of the C++ server does not tell what it is read for.
    """
    ours = [_family(metric) for metric in _everything_counted().collect()]
    ours += [_family(metric) for metric in ProcessCollector(registry=None).collect()]
    known = {family.name for family in ours}
    totals = ProcessTotals()
    totals.take([], SecurityMetrics(), [], 0)
    of_processes = [_family(metric, PROCESSES) for metric in totals.collect()]
    ours += [family for family in of_processes if family.name not in known]
    known = {family.name for family in ours}
    return ours + [family for family in cpp_families() if family.name not in known]


def cpp_families() -> list[Family]:
    """The families of the C++ server as its source names them, without labels but for its own ones' reasons."""
    source = _CPP_PAGE.read_text(encoding="utf-8")
    quoted = r'((?:"[^"]*"\s*)+)'
    made = re.findall(rf'family\(\s*"(\w+)",\s*{quoted},\s*MetricType::(\w+)\)', source)
    made += [(*found, "Gauge") for found in re.findall(rf'gauge\(\s*"(\w+)",\s*{quoted}\)', source)]
    reasons = re.search(
        r"kCloseReasonNames = std::to_array<std::string_view>\(\s*\{([^}]*)\}",
        _CPP_LIMITS.read_text(encoding="utf-8"),
    )
    if not made or reasons is None:
        raise ValueError(f"{_CPP_PAGE} or {_CPP_LIMITS} is not written as this module expects it")
    own = {
        "tessera_connections_closed_total": {"reason": tuple(re.findall(r'"(\w+)"', reasons[1]))}
    }
    return [
        Family(
            name=name,
            kind=kind.lower(),
            text="".join(re.findall(r'"([^"]*)"', words)),
            labels=own.get(name, {}),
            servers=CPP,
        )
        for name, words, kind in made
    ]


def _everything_counted() -> MetricsCollector:
    """The Python server's metrics with a model of which each family has a sample."""
    collector = MetricsCollector("0", lambda: 0)
    names = CountedNames(missing=("f",), outside=("f",), ranged=("f",), outputs=("o",))
    model = ModelMetrics("m", "1", names)
    model.info = ModelInfo(sha256=lambda: "", torch="", dtype="")
    model.inflight_by_device = {"cpu": lambda: 0}
    model.memory_bytes = {("cpu", "tables"): lambda: 0}
    collector.models.append(model)
    for files in ("tokens", "certificates"):
        collector.security.watch(files)
    versions = collector.versions
    # Of a version that follows its log and is being loaded, everything is shown.
    row = IndexRow(
        model="m", version="1", state=VersionState.LOADING, commit=1, newest_example_s=0.0
    )
    versions.index = lambda: [row]
    versions.follow.index = lambda: [row]
    versions.count_load("m", ok=True)
    versions.count_shadow(model, model, ShadowResult.COMPARED)
    versions.compare(model, model, np.zeros(1))
    versions.follow.follow("m", "1")
    return collector


def _family(metric: Metric, servers: str = BOTH) -> Family:
    labels: dict[str, list[str]] = {}
    for sample in metric.samples:
        for name, value in sample.labels.items():
            values = labels.setdefault(name, [])
            if value not in values:
                values.append(value)
    bounds = labels.pop("le", [])
    return Family(
        name=metric.name + ("_total" if metric.type == "counter" else ""),
        kind=metric.type,
        text=metric.documentation.rstrip("."),
        labels={name: tuple(v) if name in _WORDS else () for name, v in labels.items()},
        bounds=tuple(map(float, bounds[:-1])),
        servers=servers,
    )


def markdown(every: Iterable[Family]) -> str:
    """The page.

    Raises:
        ValueError: a family belongs to no section, or a label is not described.
    """
    sections: dict[str, list[Family]] = {title: [] for title, _ in _SECTIONS}
    labels: dict[str, None] = {}
    bounds: dict[tuple[float, ...], list[str]] = {}
    for family in every:
        title = next((t for t, names in _SECTIONS if re.match(names, family.name)), None)
        if title is None:
            raise ValueError(f"{family.name} belongs to no section: say in _SECTIONS where it is")
        sections[title].append(family)
        labels |= dict.fromkeys(name for name, words in family.labels.items() if not words)
        if family.bounds:
            bounds.setdefault(family.bounds, []).append(family.name)
    if unknown := labels.keys() - _LABELS.keys():
        raise ValueError(f"describe the labels in _LABELS: {', '.join(sorted(unknown))}")
    lines = [
        "# Metrics",
        "",
        "What `/metrics` of the HTTP port tells, in Prometheus' text format. Both servers have the same families, but for those",
        f"that name their server. `{WRITE_COMMAND}` writes this page from the code. [operations.md](operations.md) says which to look at when;",
        "`deploy/monitoring` has a dashboard for Grafana and alert rules for Prometheus.",
    ]
    for title, found in sections.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | type | labels | tells |",
            "| --- | --- | --- | --- |",
        ]
        lines += [_row(family) for family in found]
    lines += ["", "## Labels", "", "| label | |", "| --- | --- |"]
    lines += [f"| `{name}` | {_LABELS[name]} |" for name in _LABELS if name in labels]
    lines += ["", "## Buckets", "", "| histograms | upper bounds |", "| --- | --- |"]
    for row, names in bounds.items():
        shown = ", ".join(f"{bound:.10g}" for bound in row)
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {shown} |")
    return "\n".join(lines) + "\n"


def _row(family: Family) -> str:
    labels = [
        f"`{name}`" + (f" ({', '.join(words)})" if words else "")
        for name, words in family.labels.items()
    ]
    text = family.text if family.servers == BOTH else f"{family.text}; {family.servers} alone"
    return f"| `{family.name}` | {family.kind} | {', '.join(labels)} | {text} |"


def main() -> int:
    """0: the page is current, or was written; 1: it is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the page (default: compare)")
    text = markdown(families())
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"docs/metrics.md does not fit the servers' code: run {WRITE_COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
