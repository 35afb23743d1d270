"""A plan as a picture: bytes and time per rank, by table; or as a page with the figures behind it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tessera.errors import UserError
from tessera.training.distributed.planner.rank_bars import (
    add_legends,
    draw_ranks,
    memory_of,
    step_of,
    title_of,
)
from tessera.training.distributed.planner.types import PlanReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    # What draws is slow to import, and rarely needed.
    if ending == ".html":
        from tessera.training.distributed.planner.plan_page import plan_page  # noqa: PLC0415

        path.write_text(plan_page(report), encoding="utf-8")
        return
    from matplotlib.figure import Figure  # noqa: PLC0415

    from tessera.plots import alone, styled, svg_figure  # noqa: PLC0415

    size = (max(7.0, min(18.0, 3 + 0.3 * report.topology.world_size)), 8.5)
    if ending == ".svg":
        svg = svg_figure(title_of(report), lambda figure: _draw_both(figure, report), size=size)
        path.write_text(alone(svg), encoding="utf-8")
        return
    with styled("plan"):
        figure = Figure(figsize=size, layout="constrained")
        _draw_both(figure, report)
        figure.savefig(path, format="png", dpi=120)


def _draw_both(figure: Figure, report: PlanReport) -> None:
    memory, step = figure.subplots(2, 1, sharex=True)
    draw_ranks(memory, report, memory_of(report))
    draw_ranks(step, report, step_of(report))
    memory.set_xlabel("")
    figure.suptitle(title_of(report))
    add_legends(figure, memory, report)
