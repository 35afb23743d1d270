"""Pictures of the dashboard's panels with what Prometheus answers, and of traces, for machines without Grafana."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from span_collector import Span

_COLUMNS = 24
_ROW_INCHES = 0.32
_COLORS = ("#4269d0", "#ef9b20", "#3ca951", "#d04a6e", "#8c6bb1", "#7f6a56", "#22a6b3", "#888888")
_SCALES = {"percentunit": (100, "%"), "s": (1_000, "ms"), "bytes": (2**-20, "MiB")}
Series = list[tuple[str, list[float], list[float]]]
"""Legend, seconds before the end, and values of each series."""


def legend(form: str, labels: dict[str, str]) -> str:
    """A legend of Grafana, filled in."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), form)


def draw_dashboard(
    panels: Sequence[dict[str, Any]], ask: Callable[[str, str], Series], title: str, path: Path
) -> int:
    """Draw each panel at its place with the series that ``ask(query, legend)`` gives; how many have some."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(18, rows * _ROW_INCHES + 0.8), dpi=80)
    figure.suptitle(title, fontsize=12)
    grid = figure.add_gridspec(
        rows, _COLUMNS, left=0.03, right=0.985, top=1 - 0.8 / (rows * _ROW_INCHES), bottom=0.01
    )
    filled = 0
    for panel in panels:
        place = panel["gridPos"]
        axes = figure.add_subplot(
            grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]]
        )
        if panel["type"] == "row":
            axes.axis("off")
            axes.text(0, 0.3, panel["title"], fontsize=12, weight="bold")
            continue
        series = [
            one
            for target in panel["targets"]
            for one in ask(target["expr"], target["legendFormat"])
        ]
        filled += bool(series)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axes.set_position(_inset(axes.get_position().bounds))
        (_draw_stat if panel["type"] == "stat" else _draw_graph)(axes, panel["title"], unit, series)
    figure.savefig(path)
    return filled


def _inset(bounds: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    """The place of the axes within a panel, beside its labels and below its title."""
    x, y, width, height = bounds
    return x + 0.012, y + 0.14 * height, width - 0.03, 0.7 * height


def _draw_stat(axes: Any, title: str, unit: str, series: Series) -> None:
    scale, word = _SCALES.get(unit, (1, ""))
    axes.axis("off")
    axes.set_title(title, fontsize=9, loc="left")
    lines = [f"{name}: {values[-1] * scale:,.4g} {word}" for name, _, values in series[:3]]
    axes.text(0, 0.9, "\n".join(lines) or "no data", fontsize=11, va="top")


def _draw_graph(axes: Any, title: str, unit: str, series: Series) -> None:
    scale, word = _SCALES.get(unit, (1, ""))
    axes.set_title(f"{title}{f' ({word})' if word else ''}", fontsize=9, loc="left")
    for index, (name, times, values) in enumerate(series):
        color = _COLORS[index % len(_COLORS)]
        axes.plot(times, [value * scale for value in values], lw=1.2, label=name, color=color)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if series:
        low, high = axes.get_ylim()
        axes.set_ylim(min(0, low), 1.3 * high)  # the legend is above the lines
        axes.legend(fontsize=6, ncols=2, loc="upper left", framealpha=0.7)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes)


def draw_traces(traces: Sequence[Sequence[Span]], path: Path) -> None:
    """Draw each trace as bars over time, below one another: the call, then its stages."""
    heights = [len(trace) + 1 for trace in traces]
    figure = Figure(figsize=(14, 0.42 * sum(heights) + 0.6), dpi=80)
    every = figure.subplots(len(traces), 1, height_ratios=heights, squeeze=False)
    for axes, trace in zip(every[:, 0], traces, strict=True):
        _draw_trace(axes, sorted(trace, key=lambda span: (span.child, span.begin_ns)))
    figure.tight_layout()
    figure.savefig(path)


def _draw_trace(axes: Any, spans: list[Span]) -> None:
    begin = min(span.begin_ns for span in spans)
    for row, span in enumerate(spans):
        left, width = (span.begin_ns - begin) / 1e6, (span.end_ns - span.begin_ns) / 1e6
        axes.barh(row, max(width, 1e-4), left=left, color=_COLORS[row % len(_COLORS)], height=0.7)
        facts = ", ".join(f"{key}={value}" for key, value in span.attributes.items())
        axes.text(
            left, row, f" {width:.3f} ms  {textwrap.shorten(facts, 150)}", va="center", fontsize=8
        )
    axes.set_yticks(range(len(spans)), [span.name for span in spans], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * max(span.end_ns - begin for span in spans) / 1e6)
    axes.set_xlabel("milliseconds", fontsize=8)
    axes.set_title(f"{spans[0].service}: trace {spans[0].trace}", fontsize=9, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
