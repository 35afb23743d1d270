"""What the ranks of a plan hold and how long they take, as bars: stacked by table, hatched by how each is sharded.

Every bar says what it comes to, and a line says what all ranks have on the mean, so that a rank that waits or is full
is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.training.distributed.planner.constants import GIB
from tessera.training.distributed.planner.types import PlanReport, Shard, ShardingOption, per_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED_TABLES = 12
"""Tables with a colour of their own; the rest are drawn together."""

_LABELLED_RANKS = 12
"""Up to so many bars say what they come to; the labels of more would lie on one another."""

_HATCHES = ("", "///", "xxx", "...", "\\\\\\", "+++", "ooo")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What the bars of a picture show.

    Attributes:
        label: of the vertical axis, with its unit.
        of_shard: how much of it a shard is.
        texts: what stands on the bar of each rank.
        limits: the most that each rank has room for; empty: there is no such thing.
    """

    label: str
    of_shard: Callable[[Shard], float]
    texts: Sequence[str]
    limits: Sequence[float] = ()


def title_of(report: PlanReport) -> str:
    """How many tables are on how many ranks."""
    return f"Sharding plan: {len(report.best)} tables on {report.topology.world_size} ranks"


def memory_of(report: PlanReport) -> Quantity:
    """The memory of the device that the plan is for: of GPUs their own, else the host's."""
    ranks, device = report.topology.world_size, report.topology.compute_device
    used = per_rank(report.best, ranks, lambda shard: shard.used.on(device))
    limits = [each.storage.on(device) for each in report.left_for_tables.devices]
    unit, scale = _unit(max(used))
    return Quantity(
        label=f"{'device' if device == 'cuda' else 'host'} memory, {unit}",
        of_shard=lambda shard: shard.used.on(device) / scale,
        texts=[
            f"{mine / scale:.3g}\n{share_text(mine, limit)}"
            for mine, limit in zip(used, limits, strict=True)
        ],
        limits=[limit / scale for limit in limits],
    )


def step_of(report: PlanReport) -> Quantity:
    """The estimated time of a step."""
    times = per_rank(report.best, report.topology.world_size, lambda shard: shard.time.total)
    return Quantity(
        label="estimated step, ms",
        of_shard=lambda shard: shard.time.total,
        texts=[f"{each:.3g}" for each in times],
    )


def share_text(used: float, limit: float) -> str:
    """A share of a limit in percent; of a small share its first digit that is not 0."""
    if not limit:
        return "-"
    share = 100 * used / limit
    return f"{share:.0f}%" if share >= 1 or share == 0 else f"{share:.1g}%"


def _unit(most: float) -> tuple[str, float]:
    """The binary unit in which ``most`` bytes are 1 or more, and its bytes."""
    for unit, scale in (("GiB", GIB), ("MiB", GIB / 1024)):
        if most >= scale:
            return unit, scale
    return "KiB", GIB / 1024**2


def _by_weight(report: PlanReport) -> list[ShardingOption]:
    """The tables, first the one with the largest share of either all tables' time or their bytes."""
    times = {option.fqn: option.total_perf for option in report.best}
    sizes = {
        option.fqn: option.total_storage.hbm + option.total_storage.ddr for option in report.best
    }
    all_times, all_sizes = sum(times.values()) or 1.0, sum(sizes.values()) or 1

    def weight(option: ShardingOption) -> float:
        return max(times[option.fqn] / all_times, sizes[option.fqn] / all_sizes)

    return sorted(report.best, key=lambda option: (-weight(option), option.fqn))


def draw_ranks(axes: Axes, report: PlanReport, quantity: Quantity) -> None:
    """A bar for each rank: tables with many bytes or much time by name, the mean over ranks, and near limits."""
    from tessera.plots import GREY, INK, PALETTE, prepare, short  # noqa: PLC0415

    prepare(axes)
    ranks = range(report.topology.world_size)
    hatches = hatches_of(report)
    bottom = [0.0] * len(ranks)

    def stack(options: Sequence[ShardingOption], look: dict[str, Any]) -> None:
        heights = per_rank(options, len(ranks), quantity.of_shard)
        axes.bar(ranks, heights, bottom=list(bottom), edgecolor=INK, linewidth=0.4, **look)
        bottom[:] = [a + b for a, b in zip(bottom, heights, strict=True)]

    tables, colours = _by_weight(report), PALETTE[:-1]
    for index, option in enumerate(tables[:NAMED_TABLES]):
        stack(
            [option],
            {
                "color": colours[index % len(colours)],
                "alpha": 1.0 if index < len(colours) else 0.5,
                "hatch": hatches[option.sharding_type],
                "label": short(option.fqn),
            },
        )
    rest = tables[NAMED_TABLES:]
    if rest:
        stack(rest, {"color": GREY, "label": f"{len(rest)} other tables"})
    axes.axhline(sum(bottom) / len(ranks), color=INK, linestyle=":", linewidth=1, label="mean")
    if quantity.limits and max(bottom) > 0.3 * max(quantity.limits):
        axes.plot(ranks, quantity.limits, color=INK, linestyle="--", label="left for tables")
    if len(ranks) <= _LABELLED_RANKS:
        axes.set_xticks(list(ranks))
        for rank, top, text in zip(ranks, bottom, quantity.texts, strict=True):
            axes.annotate(
                text,
                (rank, top),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize="small",
            )
    axes.margins(y=0.16)
    axes.set_ylabel(quantity.label)
    axes.set_xlabel("rank")


def hatches_of(report: PlanReport) -> dict[str, str]:
    """How the bars of each sharding type of the plan are hatched."""
    types = sorted({option.sharding_type for option in report.best})
    return {kind: _HATCHES[place % len(_HATCHES)] for place, kind in enumerate(types)}


def add_legends(figure: Figure, axes: Axes, report: PlanReport) -> None:
    """Below the bars: the colours of the tables that ``axes`` have, and the hatches of the sharding types."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    from tessera.plots import INK  # noqa: PLC0415

    handles, labels = axes.get_legend_handles_labels()
    kinds = hatches_of(report)
    handles += [Patch(facecolor="none", edgecolor=INK, hatch=hatch) for hatch in kinds.values()]
    labels += list(kinds)
    figure.legend(
        handles, labels, loc="outside lower center", ncols=2, fontsize="small", frameon=False
    )
