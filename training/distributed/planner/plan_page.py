"""A plan as a page: what each rank holds and how long its step takes, as pictures and as tables."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from tessera.plots import SIZE, svg_figure
from tessera.report_page import render_page
from tessera.training.distributed.planner.constants import GIB
from tessera.training.distributed.planner.rank_bars import (
    NAMED_TABLES,
    Quantity,
    add_legends,
    draw_ranks,
    memory_of,
    share_text,
    step_of,
    title_of,
)
from tessera.training.distributed.planner.stats import RankUse, report_text, use_per_rank
from tessera.training.distributed.planner.types import PlanReport, ShardingOption

_LEGEND_LINE = 0.2  # inches


def plan_page(report: PlanReport) -> str:
    """The page as HTML that needs nothing else."""
    ranks = use_per_rank(report.best, report.topology.world_size)
    times = [use.perf.total for use in ranks]
    slowest = max(times)
    busiest = times.index(slowest)
    return render_page(
        Path(__file__).parent / "plan.html",
        title=title_of(report),
        topology=repr(report.topology),
        figures=[
            (f"{slowest:.3g} ms", f"estimated step of the busiest rank, {busiest}"),
            (
                f"{sum(times) / len(times) / slowest:.0%}" if slowest else "100%",
                "mean over ranks of the busiest's time",
            ),
            (_fullest(report, ranks), "of the memory left for tables, on the fullest rank"),
            (f"{report.num_proposals:,}", f"proposals, of which {report.num_plans:,} fitted"),
        ],
        pictures=[
            _picture(report, "Memory by rank", memory_of(report)),
            _picture(report, "Time by rank", step_of(report)),
        ],
        ranks=[_rank_row(report, rank, use, slowest) for rank, use in enumerate(ranks)],
        table_head=["table", "sharding type", "kernel", "rows", "dim", "bytes", "ms", "ranks"],
        tables=[_table_row(option) for option in _slowest_first(report)],
        text=report_text(report),
    )


def _slowest_first(report: PlanReport) -> list[ShardingOption]:
    return sorted(report.best, key=lambda option: (-option.total_perf, option.fqn))


def _picture(report: PlanReport, name: str, quantity: Quantity) -> tuple[str, str]:
    """A picture's title and its ``<svg>``."""

    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw_ranks(axes, report, quantity)
        add_legends(figure, axes, report)

    lines = (min(len(report.best), NAMED_TABLES) + 5) / 2
    return name, svg_figure(name, fill, size=(SIZE[0], SIZE[1] + _LEGEND_LINE * lines))


def _fullest(report: PlanReport, ranks: list[RankUse]) -> str:
    device = report.topology.compute_device
    pairs = [
        (use.storage.on(device), each.storage.on(device))
        for use, each in zip(ranks, report.left_for_tables.devices, strict=True)
    ]
    return share_text(*max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0))


def _rank_row(report: PlanReport, rank: int, use: RankUse, slowest: float) -> dict[str, object]:
    left = report.left_for_tables.devices[rank].storage
    memories = {
        "device": (use.storage.hbm, left.hbm),
        "host": (use.storage.ddr, left.ddr),
    }
    return {
        "rank": rank,
        "memories": [
            (kind, bytes_text(used), share_text(used, limit), used / limit if limit else 0.0)
            for kind, (used, limit) in memories.items()
            if used or limit
        ],
        "forward": f"{use.perf.fwd_compute + use.perf.prefetch_compute:.3f}",
        "backward": f"{use.perf.bwd_compute:.3f}",
        "communication": f"{use.perf.comms:.3f}",
        "step": f"{use.perf.total:.3f}",
        "share": use.perf.total / slowest if slowest else 0.0,
        "shards": ", ".join(f"{count} {kind}" for kind, count in sorted(use.kinds.items())) or "-",
    }


def _table_row(option: ShardingOption) -> list[str]:
    storage = option.total_storage
    ranks = sorted({shard.place for shard in option.shards})
    consecutive = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return [
        option.fqn,
        option.sharding_type,
        option.compute_kernel,
        f"{option.tensor.shape[0]:,}",
        str(option.tensor.shape[1]),
        bytes_text(storage.hbm + storage.ddr),
        f"{option.total_perf:.3f}",
        f"{ranks[0]} to {ranks[-1]}" if consecutive else ", ".join(map(str, ranks)),
    ]


def bytes_text(count: float) -> str:
    """Bytes in the binary unit in which they are 1 or more."""
    for unit, scale in (("GiB", GIB), ("MiB", GIB / 1024), ("KiB", GIB / 1024**2)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
