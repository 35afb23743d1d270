"""Seconds that ids, vectors and gradients of one shard are on their way."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.bandwidths import (
    CollectiveType,
    GeneralizedCommsBandwidth,
)
from tessera.training.distributed.sharding.costs import Traffic


@dataclass(frozen=True, slots=True)
class Links:
    """Between which ranks they travel.

    Attributes:
        bandwidths: of collectives.
        ranks: in all.
        local_ranks: of a host.
        group_ranks: that add their vectors up before they send them on: a host's.
    """

    bandwidths: GeneralizedCommsBandwidth
    ranks: int
    local_ranks: int
    group_ranks: int

    def seconds(
        self, number: float, local_ranks: int, all_ranks: int, kind: CollectiveType
    ) -> float:
        """What a collective takes for so many bytes, its start included."""
        latency = constants.COLLECTIVE_LATENCY_MS * 1e-3
        return number / self.bandwidths.get_bw(local_ranks, all_ranks, kind) + latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What travels for one shard, in bytes each.

    Attributes:
        id_bytes: of an id with its weight.
        vector_bytes: of a vector, and ``gradient_bytes`` of its gradient.
        summed_bytes: of a vector that is added up on its way, and ``summed_gradient_bytes``.
        table_bytes: of the shard's weights.
        is_summed: several ranks hold parts of the sum of a bag.
    """

    id_bytes: float
    vector_bytes: float
    gradient_bytes: float
    summed_bytes: float
    summed_gradient_bytes: float
    table_bytes: float
    is_summed: bool


def exchange_seconds(
    traffic: Traffic, links: Links, exchanged: Exchanged
) -> tuple[float, float, float]:
    """Seconds of ids, of vectors and of gradients; none is assumed to overlap with another.

    Args:
        traffic: how many of them travel.
        links: between which ranks.
        exchanged: how large they are.
    """
    ranks, local = links.ranks, links.local_ranks
    if ranks == 1:
        return 0.0, 0.0, 0.0
    away = (ranks - 1) / ranks
    if traffic.averages_gradient:
        moved = 2 * away * exchanged.table_bytes
        return 0.0, 0.0, links.seconds(moved, local, ranks, CollectiveType.ALL_REDUCE)
    # Sums of rows on several ranks are reduced and scattered; their gradients are gathered.
    exchange = CollectiveType.ALL_TO_ALL
    forth, back = exchange, exchange
    sent, returned = exchanged.vector_bytes, exchanged.gradient_bytes
    if exchanged.is_summed and not traffic.summed_on_host:
        forth, back = CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER
        sent, returned = exchanged.summed_bytes, exchanged.summed_gradient_bytes
    ids = links.seconds(traffic.ids * exchanged.id_bytes * away, local, ranks, exchange)
    vectors = traffic.sent_vectors * away
    forward = links.seconds(vectors * sent, local, ranks, forth)
    backward = links.seconds(vectors * returned, local, ranks, back)
    if traffic.summed_on_host:
        group = links.group_ranks
        inside, near = (group - 1) / group * traffic.vectors, min(group, local)
        forward += links.seconds(
            inside * exchanged.summed_bytes, near, group, CollectiveType.REDUCE_SCATTER
        )
        backward += links.seconds(
            inside * exchanged.summed_gradient_bytes, near, group, CollectiveType.ALL_GATHER
        )
    return ids, forward, backward
