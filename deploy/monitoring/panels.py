"""The panels of the Grafana dashboard: what each asks Prometheus, and how to read it.

Rows and panels stand in the order in which somebody looks who was called because of an incident.
`SELECTED` stands for the variables of the dashboard: job, servers and models.
"""

from __future__ import annotations

from dataclasses import dataclass

SERVER = 'job=~"$job", instance=~"$instance"'
SELECTED = f'{SERVER}, model=~"$model"'
COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows.
        unit: Grafana's name of the unit.
        text: how to read it.
        queries: by legend the PromQL of its series.
        kind: Grafana's panel type.
        width: in columns.
    """

    title: str
    unit: str
    text: str
    queries: dict[str, str]
    kind: str
    width: int


def _stat(title: str, unit: str, text: str, queries: dict[str, str]) -> Panel:
    return Panel(title, unit, text, queries, "stat", COLUMNS // 4)


def _graph(title: str, unit: str, text: str, queries: dict[str, str]) -> Panel:
    return Panel(title, unit, text, queries, "timeseries", COLUMNS // 3)


def rate(name: str, by: str, *matchers: str) -> str:
    """PromQL of a counter that has the label ``model``, per second."""
    selected = ", ".join((SELECTED, *matchers))
    return f"sum by ({by}) (rate({name}{{{selected}}}[$__rate_interval]))"


def quantile(fraction: float, name: str, by: str = "model", *matchers: str) -> str:
    """PromQL of a quantile of a histogram that has the label ``model``."""
    return f"histogram_quantile({fraction}, {rate(f'{name}_bucket', f'le, {by}', *matchers)})"


def mean(name: str, by: str = "model") -> str:
    """PromQL of the mean of a histogram that has the label ``model``."""
    return f"{rate(f'{name}_sum', by)} / {rate(f'{name}_count', by)}"


def share(code: str) -> str:
    """PromQL of the share of calls that the matcher ``code`` selects."""
    return f"{rate('tessera_requests_total', 'model', code)} / {rate('tessera_requests_total', 'model')}"


def spread(offset: str) -> str:
    """PromQL of the share of an hour's scores at or below each bound; ``offset`` is PromQL's."""
    shares = [
        f"sum by ({by}) (rate(tessera_score_{end}{{{SELECTED}}}[1h]{offset}))"
        for end, by in (("bucket", "model, output, le"), ("count", "model, output"))
    ]
    return " / ignoring (le) group_left ".join(shares)


_DURATION = "tessera_request_duration_seconds"
_STAGES = "tessera_stage_duration_seconds"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        _stat(
            "Servers",
            "short",
            "Servers that are scraped, by kind and version. Two versions stand here during a "
            "rolling restart.",
            {
                "{{server}} {{version}}": f"count by (server, version) (tessera_build_info{{{SERVER}}})"
            },
        ),
        _stat(
            "Models that answer",
            "short",
            "Versions that answer, over all servers. Fewer than models times servers: look at "
            "Loads.",
            {
                "{{model}} {{version}}": f"sum by (model, version) (tessera_model_ready{{{SELECTED}}})"
            },
        ),
        _stat(
            "Calls",
            "reqps",
            "Calls for scores that ended, however they ended.",
            {"{{model}}": rate("tessera_requests_total", "model")},
        ),
        _stat(
            "99th percentile",
            "s",
            "From a call's first byte to its answer; bounded by the histogram's buckets.",
            {"{{model}}": quantile(0.99, _DURATION)},
        ),
    ),
    "Answers": (
        _graph(
            "Calls by how they ended",
            "reqps",
            "RESOURCE_EXHAUSTED: the queue was full. DEADLINE_EXCEEDED: the caller's time was "
            "over before the work began. UNAVAILABLE: the server drained or loaded. INTERNAL: a "
            "bug, whose id is in the log.",
            {"{{code}}": rate("tessera_requests_total", "code")},
        ),
        _graph(
            "Share that did not succeed",
            "percentunit",
            "Of all calls; what clients got wrong themselves (INVALID_ARGUMENT, NOT_FOUND, "
            "CANCELLED) left out.",
            {
                "{{model}} refused": share('code="RESOURCE_EXHAUSTED"'),
                "{{model}} too late": share('code="DEADLINE_EXCEEDED"'),
                "{{model}} unavailable": share('code="UNAVAILABLE"'),
                "{{model}} failed": share('code="INTERNAL"'),
            },
        ),
        _graph(
            "Calls by model and version",
            "reqps",
            "During a change of versions the traffic moves from one line to the other.",
            {
                "{{model}} {{version}}": rate(
                    "tessera_requests_total", "model, version", 'code="OK"'
                )
            },
        ),
    ),
    "Where the time goes": (
        _graph(
            "Time of a call",
            "s",
            "From its first byte to its answer.",
            {
                "{{model}} p50": quantile(0.5, _DURATION),
                "{{model}} p95": quantile(0.95, _DURATION),
                "{{model}} p99": quantile(0.99, _DURATION),
            },
        ),
        _graph(
            "Mean time of each stage",
            "s",
            "Where queue grows and forward does not, there is more work than workers: add "
            "replicas. Where forward grows, batches are larger or the CPUs are taken by something"
            " else.",
            {"{{stage}}": mean(_STAGES, "stage")},
        ),
        _graph(
            "99th percentile of each stage",
            "s",
            "The stages of different calls: they do not add up to the percentile of a call.",
            {"{{stage}}": quantile(0.99, _STAGES, "stage")},
        ),
    ),
    "Queue and batches": (
        _graph(
            "Samples that wait",
            "short",
            "By server. The limit is --max-queue-samples (65,536 by default); beyond it calls are"
            " refused.",
            {
                "{{instance}} {{model}}": f"sum by (instance, model) (tessera_queue_samples{{{SELECTED}}})"
            },
        ),
        _graph(
            "Mean batch",
            "short",
            "Samples and calls of a forward pass. Batches near --max-batch-samples all the time "
            "mean that there is more work than workers.",
            {
                "{{model}} samples": mean("tessera_batch_samples"),
                "{{model}} calls": mean("tessera_batch_requests"),
            },
        ),
        _graph(
            "Why batches were cut",
            "ops",
            "idle: a free worker took what was there. full: a batch's limit was reached. delay: "
            "--max-delay-us was over. deadline: a call could not wait longer. drain: the server "
            "is ending.",
            {"{{reason}}": rate("tessera_batches_total", "reason")},
        ),
        _graph(
            "Samples each second",
            "short",
            "What the forward passes have computed.",
            {"{{model}}": rate("tessera_batch_samples_sum", "model")},
        ),
        _graph(
            "Calls refused or dropped",
            "reqps",
            "queue_full, deadline and draining are the server's state; invalid and cancelled are "
            "the clients'.",
            {"{{reason}}": rate("tessera_rejected_total", "reason")},
        ),
        _graph(
            "Batches in work",
            "short",
            "By device. At the number of workers all the time: every worker is busy.",
            {
                "{{instance}} {{device}}": f"sum by (instance, device) (tessera_inflight_batches{{{SELECTED}}})"
            },
        ),
    ),
    "Models and commits": (
        _graph(
            "Loads",
            "short",
            "Loads of a repository's versions in the last hour, by how they ended.",
            {
                "{{model}} {{result}}": f"sum by (model, result) (increase(tessera_model_loads_total{{{SELECTED}}}[1h]))"
            },
        ),
        _graph(
            "Age of the newest training example",
            "s",
            "Of versions that follow a log of commits. It grows while nothing is published, or "
            "while commits are refused.",
            {
                "{{model}} {{version}}": f"max by (model, version) (tessera_freshness_seconds{{{SELECTED}}})"
            },
        ),
        _graph(
            "Commits refused",
            "short",
            "In the last hour, by reason; docs/repository.md explains each.",
            {
                "{{model}} {{reason}}": f"sum by (model, reason) (increase(tessera_commits_refused_total{{{SELECTED}}}[1h])) > 0"
            },
        ),
    ),
    "Values": (
        _graph(
            "Values outside of the training rows",
            "short",
            "The ten features with the most, by how many a sample has of them: more than one is possible of a feature "
            "with several ids. A step here is a feed that has changed, not a server.",
            {
                "{{model}} {{feature}}": f"topk(10, {rate('tessera_feature_outside_range_total', 'model, feature')} / on (model) group_left {rate('tessera_batch_samples_sum', 'model')})"
            },
        ),
        _graph(
            "Missing dense values",
            "percentunit",
            "The ten features with the most, per sample.",
            {
                "{{model}} {{feature}}": f"topk(10, {rate('tessera_feature_missing_total', 'model, feature')} / on (model) group_left {rate('tessera_batch_samples_sum', 'model')})"
            },
        ),
        _graph(
            "Where dense values lie in the training rows' range",
            "percentunit",
            "The mean of each feature, 0 for the least value that a training row had and 1 for the largest. A line that leaves "
            "its level is a feed that has changed within the range, such as its unit.",
            {"{{model}} {{feature}}": mean("tessera_feature_range_position", "model, feature")},
        ),
        _graph(
            "Ids outside of their table",
            "percentunit",
            "Of the ids that were looked up; they were clamped or hashed.",
            {
                "{{model}}": f"{rate('tessera_out_of_range_ids_total', 'model')} / {rate('tessera_ids_total', 'model')}"
            },
        ),
    ),
    "Scores": (
        _graph(
            "Mean score",
            "short",
            "By version and output. A new version beside an old one should have about the mean of the old one, or a reason "
            "for another.",
            {"{{model}} {{version}} {{output}}": mean("tessera_score", "model, version, output")},
        ),
        _graph(
            "Quantiles of the scores",
            "short",
            "Over all versions, bounded by the histogram's buckets.",
            {
                "{{model}} {{output}} p10": quantile(0.1, "tessera_score", "model, output"),
                "{{model}} {{output}} p50": quantile(0.5, "tessera_score", "model, output"),
                "{{model}} {{output}} p90": quantile(0.9, "tessera_score", "model, output"),
                "{{model}} {{output}} p99": quantile(0.99, "tessera_score", "model, output"),
            },
        ),
        _graph(
            "Shift of the scores since the day before",
            "percentunit",
            "The largest share of the scores that has moved past one bound, between the last hour and the same hour of the "
            "day before; NaN and infinite scores, as a share of all, beside it. docs/observe.md says how to read it.",
            {
                "{{model}} {{output}}": f"max by (model, output) (abs({spread('')} - {spread(' offset 1d')}))",
                "{{model}} {{output}} not finite": f"{rate('tessera_score_not_finite_total', 'model, output')} / on (model) group_left {rate('tessera_batch_samples_sum', 'model')}",
            },
        ),
    ),
    "The process": (
        _graph(
            "CPU time",
            "short",
            "CPUs in use, by server.",
            {"{{instance}}": f"rate(process_cpu_seconds_total{{{SERVER}}}[$__rate_interval])"},
        ),
        _graph(
            "Memory",
            "bytes",
            "Resident memory by server, and the tables' part of it.",
            {
                "{{instance}}": f"process_resident_memory_bytes{{{SERVER}}}",
                "{{instance}} tables": f'sum by (instance) (tessera_device_memory_bytes{{{SELECTED}, kind="tables"}})',
            },
        ),
        _graph(
            "Open files and connections",
            "short",
            "The C++ server also tells the connections of its gRPC port and the calls that are "
            "open on them.",
            {
                "{{instance}} files": f"process_open_fds{{{SERVER}}}",
                "{{instance}} connections": f"tessera_connections{{{SERVER}}}",
                "{{instance}} calls": f"tessera_streams{{{SERVER}}}",
            },
        ),
    ),
}
