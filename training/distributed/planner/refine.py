"""Better plans near a good one: another way for one table of the busiest rank."""

from __future__ import annotations

from collections.abc import Iterator

from tessera.training.distributed.planner.types import ShardingOption, per_rank

WAYS = 4
"""Ways of a table that are tried in the place of its own: the fastest ones."""

MOST_TRIALS = 400
SHARDS_PLACED = 40_000
"""Shards that all trials together may place, so that large models are not searched for minutes."""


def trials_for(plan: list[ShardingOption]) -> int:
    """How many proposals near ``plan`` may be tried."""
    shards = sum(option.num_shards for option in plan)
    return min(MOST_TRIALS, SHARDS_PLACED // max(1, shards))


def neighbours(
    proposal: list[ShardingOption],
    plan: list[ShardingOption],
    tables: dict[str, list[ShardingOption]],
    ranks: int,
) -> Iterator[list[ShardingOption]]:
    """Proposals that differ from one in the way of one table.

    The tables that take most time on the busiest rank of the plan come first: that rank's time is the
    rating of the plan.

    Args:
        proposal: a way of each table.
        plan: the same ways, placed.
        tables: the ways of every table, fastest first, by its full name.
        ranks: ranks in all.
    """
    times = per_rank(plan, ranks, lambda shard: shard.time.total)
    busiest = times.index(max(times))

    def time_there(option: ShardingOption) -> float:
        return sum(shard.time.total for shard in option.shards if shard.place == busiest)

    on_busiest = [(time_there(option), option.fqn) for option in plan]
    for _, fqn in sorted((one for one in on_busiest if one[0] > 0), reverse=True):
        place = next(i for i, option in enumerate(proposal) if option.fqn == fqn)
        for way in tables[fqn][:WAYS]:
            if way is not proposal[place]:
                yield [*proposal[:place], way, *proposal[place + 1 :]]
