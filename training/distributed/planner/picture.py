"""A plan as a picture: bytes and time per rank, stacked by table."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.errors import UserError
from tessera.training.distributed.planner.constants import GIB
from tessera.training.distributed.planner.stats import report_text
from tessera.training.distributed.planner.types import PlanReport, Shard, per_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED_TABLES = 12
"""Tables with a colour of their own; the rest are drawn together."""


def save_picture(report: PlanReport, path: str | Path) -> None:
    """Draw a plan into a ``.png`` or ``.svg`` file, or into an ``.html`` page with the tables too.

    Args:
        report: `EmbeddingShardingPlanner.report`.
        path: where to.

    Raises:
        UserError: another ending.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in {".png", ".svg", ".html"}:
        raise UserError(f"{path}: a plan is drawn as .png, .svg or .html; name the file so")
    figure = _draw(report)
    if ending != ".html":
        figure.savefig(path, format=ending[1:])
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sharding plan</title>'
        "<style>body{font-family:sans-serif;margin:2em}pre{overflow-x:auto}"
        "svg{max-width:100%;height:auto}</style></head><body><h1>Sharding plan</h1>"
        f"{svg[svg.index('<svg') :]}<pre>{html.escape(report_text(report))}</pre></body></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _draw(report: PlanReport) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and rarely needed

    ranks, device = report.topology.world_size, report.topology.compute_device
    figure = Figure(figsize=(max(7.0, min(18.0, 3 + 0.3 * ranks)), 7.5), layout="constrained")
    memory, step = figure.subplots(2, 1, sharex=True)

    def gib(shard: Shard) -> float:
        return shard.used.on(device) / GIB

    _stack(memory, report, gib)
    caps = [d.storage.on(device) for d in report.left_for_tables.devices]
    highest = max(per_rank(report.best, ranks, gib))
    if highest > 0.3 * max(caps) / GIB:
        memory.plot(range(ranks), [cap / GIB for cap in caps], "k--", label="left for tables")
    memory.set_ylabel(f"{'device' if device == 'cuda' else 'host'} memory, GiB")
    memory.set_title(
        f"{len(report.best)} tables on {ranks} ranks; {max(caps) / GIB:.1f} GiB a rank left for tables"
    )
    _stack(step, report, lambda shard: shard.time.total)
    step.set_ylabel("estimated step, ms")
    step.set_xlabel("rank")
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    return figure


def _stack(axes: Axes, report: PlanReport, value: Callable[[Shard], float]) -> None:
    """Bars of every rank, the tables with most bytes and time by name."""
    by_size = sorted(report.best, key=lambda option: (-option.total_perf, option.fqn))
    ranks = range(report.topology.world_size)
    bottom = [0.0] * len(ranks)
    rest = [0.0] * len(ranks)
    colours: Any = [f"C{index % 10}" for index in range(_NAMED_TABLES)]
    for index, option in enumerate(by_size):
        heights = per_rank([option], len(ranks), value)
        if index >= _NAMED_TABLES:
            rest = [a + b for a, b in zip(rest, heights, strict=True)]
            continue
        hatch = "//" if index >= 10 else None
        axes.bar(ranks, heights, bottom=bottom, color=colours[index], hatch=hatch, label=option.fqn)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    if len(by_size) > _NAMED_TABLES:
        label = f"{len(by_size) - _NAMED_TABLES} other tables"
        axes.bar(ranks, rest, bottom=bottom, color="0.75", label=label)
