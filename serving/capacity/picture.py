"""Latency over load as SVG: how long answers take at every rate, for one host and for many."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from tessera.plots import BLUE, GREEN, GREY, ORANGE, alone, svg_of
from tessera.serving.capacity.sweep import MOST_RATE, Point, Sizing


def latency_over_load(sizing: Sizing, *, p99_ms: float) -> str:
    """An ``<svg>`` of p50 and p99 over the rate of one host, of those needed, and of those for `MOST_RATE`."""

    def draw(axes: Axes) -> None:
        largest = sizing.totals[-1].hosts
        counts = sorted({1, sizing.needed.hosts, largest})
        for hosts, colour in zip(counts, (BLUE, ORANGE, GREEN), strict=False):
            name = f"{hosts} host" if hosts == 1 else f"{hosts} hosts"
            _curve(axes, sizing.points, hosts, colour, name)
        axes.axhline(p99_ms, color=GREY, linewidth=1, linestyle=":", label=f"limit {p99_ms:g} ms")
        axes.axvline(sizing.needed.rate, color=GREY, linewidth=1)
        axes.set(xscale="log", yscale="log")
        axes.set_xlim(right=max(2 * MOST_RATE, 2 * sizing.needed.rate))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:g}")

    svg = svg_of(
        "requests/s of all hosts (the line: what was asked for)",
        "latency in ms: p99, and p50 dashed",
        draw,
        size=(7, 4.5),
    )
    return alone(svg)


def _curve(axes: Axes, points: Sequence[Point], hosts: int, colour: str, name: str) -> None:
    rates = [hosts * point.rate for point in points]
    axes.plot(rates, [point.p99_ms for point in points], color=colour, label=name)
    axes.plot(rates, [point.p50_ms for point in points], color=colour, linestyle="--")
