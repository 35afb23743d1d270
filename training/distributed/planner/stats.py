"""A plan as readable tables of text."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.planner.constants import GIB
from tessera.training.distributed.planner.types import (
    Perf,
    PlanReport,
    ShardingOption,
    Stats,
    Storage,
)
from tessera.training.distributed.sharding.registry import strategy_of

logger = logging.getLogger(__name__)

MAX_ROWS = 40
"""Tables of text with more rows than this are cut, and say so."""


class RankUse:
    """What one rank holds and does; ``kinds`` counts shards by the short name of their strategy."""

    def __init__(self) -> None:
        self.storage = Storage()
        self.perf = Perf()
        self.kinds: Counter[str] = Counter()


def use_per_rank(options: Sequence[ShardingOption], world_size: int) -> list[RankUse]:
    """What every rank holds and does under placed options."""
    ranks = [RankUse() for _ in range(world_size)]
    for option in options:
        for shard in option.shards:
            use = ranks[shard.place]
            use.storage += shard.used
            use.perf += shard.time
            use.kinds[strategy_of(option.sharding_type).short_name] += 1
    return ranks


def report_text(report: PlanReport) -> str:
    """The plan's summary, a table of ranks and a table of tables."""
    topology = report.topology
    ranks = use_per_rank(report.best, topology.world_size)
    busiest = max(range(len(ranks)), key=lambda rank: ranks[rank].perf.total)
    mean = sum(use.perf.total for use in ranks) / len(ranks)
    balance = mean / ranks[busiest].perf.total if ranks[busiest].perf.total else 1.0
    head = [
        f"Plan for {len(report.best)} tables on {topology!r}",
        (
            f"{report.num_options} ways enumerated, {report.num_proposals} proposals, "
            f"{report.num_plans} fitted, {report.run_time_s:.2f} s"
        ),
        (
            f"Estimated step of the busiest rank ({busiest}): {ranks[busiest].perf.total:.3f} ms, "
            f"{ranks[busiest].perf.comms:.3f} ms of it communication; mean over ranks / busiest: "
            f"{balance:.0%}"
        ),
    ]
    return "\n".join([*head, "", _rank_table(report, ranks), "", _table_table(report.best)])


def _rank_table(report: PlanReport, ranks: list[RankUse]) -> str:
    rows = [
        ("rank", "HBM GiB", "of it", "DDR GiB", "of it", "fwd ms", "bwd ms", "comms ms", "shards")
    ]
    for rank, use in enumerate(ranks):
        cap = report.left_for_tables.devices[rank].storage
        perf = use.perf
        kinds = " ".join(f"{kind}:{count}" for kind, count in sorted(use.kinds.items()))
        rows.append(
            (
                str(rank),
                f"{use.storage.hbm / GIB:.2f}",
                _share(use.storage.hbm, cap.hbm),
                f"{use.storage.ddr / GIB:.2f}",
                _share(use.storage.ddr, cap.ddr),
                f"{perf.fwd_compute + perf.prefetch_compute:.3f}",
                f"{perf.bwd_compute:.3f}",
                f"{perf.comms:.3f}",
                kinds or "-",
            )
        )
    note = "'of it': share of the memory that is left for tables"
    return f"{format_table(rows, 'ranks')}\n{note}"


def _share(used: int, cap: int) -> str:
    return f"{used / cap:.0%}" if cap else "-"


def _table_table(options: Sequence[ShardingOption]) -> str:
    rows = [("table", "type", "kernel", "rows", "dim", "ids/bag", "GiB", "ms", "ranks")]
    for option in sorted(options, key=lambda option: -option.total_perf):
        storage = option.total_storage
        rows.append(
            (
                option.fqn,
                strategy_of(option.sharding_type).short_name,
                option.compute_kernel,
                str(option.tensor.shape[0]),
                str(option.tensor.shape[1]),
                ",".join(f"{length:g}" for length in option.input_lengths[:4])
                + (",..." if len(option.input_lengths) > 4 else ""),
                f"{(storage.hbm + storage.ddr) / GIB:.3f}",
                f"{option.total_perf:.3f}",
                _ranks(option),
            )
        )
    return format_table(rows, "tables, slowest first")


def _ranks(option: ShardingOption) -> str:
    ranks = [shard.rank for shard in option.shards]
    if ranks == list(range(len(ranks))) and len(ranks) > 1:
        return f"0-{len(ranks) - 1}"
    shown = ",".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown},... ({len(ranks)})"


def format_table(rows: Sequence[tuple[str, ...]], what: str) -> str:
    """Aligned columns under a heading row, at most `MAX_ROWS` of them."""
    cut = len(rows) - 1 - MAX_ROWS
    shown = rows[: MAX_ROWS + 1]
    widths = [max(len(cell) for cell in column) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if cut > 0:
        lines.append(f"... and {cut} more ({what})")
    return "\n".join(lines)


class EmbeddingStats(Stats):
    """Logs `report_text` at level INFO."""

    def log(self, sharding_plan: ShardingPlan, report: PlanReport) -> None:
        """One log record with the whole text."""
        del sharding_plan
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", report_text(report))


class NoopEmbeddingStats(Stats):
    """Tells nobody about a plan."""

    def log(self, sharding_plan: ShardingPlan, report: PlanReport) -> None:
        """Do nothing."""
        del sharding_plan, report
