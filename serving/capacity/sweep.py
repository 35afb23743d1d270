"""From one host's simulation to what a load needs: rates against latencies, the highest rate, and hosts.

Requests are divided between hosts evenly (round robin).  A host's share of many clients' requests comes at
random times, as all of them do, so one host is simulated with its share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.errors import UserError
from tessera.serving.capacity.model import Costs, Host, Load
from tessera.serving.capacity.policy import BatchLimits
from tessera.serving.capacity.simulate import simulate

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Loads of the table, by the highest rate that a host keeps up with."""

MOST_RATE = 1_000_000.0
"""Up to where totals are drawn, requests/s."""

_STEPS = 10
_KEEPS_UP = 0.98


@dataclass(frozen=True, kw_only=True)
class Point:
    """One host under one rate; times in milliseconds, NaN without answers.

    Attributes:
        rate: requests/s that are sent.
        offered: requests/s that came, which chance makes a little more or less.
        throughput: answers/s.
        p50_ms: half of the answers took no longer.
        p99_ms: 99% of the answers took no longer.
        utilisation: share of the CPUs' time that was used.
        batch_samples: samples of a batch, on average.
        refused: share of the requests that found the queue full.
    """

    rate: float
    offered: float
    throughput: float
    p50_ms: float
    p99_ms: float
    utilisation: float
    batch_samples: float
    refused: float

    @property
    def keeps_up(self) -> bool:
        """Whether the host answers about as many requests as come, and refuses none."""
        return self.refused == 0 and self.throughput >= _KEEPS_UP * self.offered


@dataclass(frozen=True, kw_only=True)
class Total:
    """A rate of all hosts together, the hosts that it needs, and what one of them is like then."""

    rate: float
    hosts: int
    host: Point


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What a load needs.

    Attributes:
        keeps_up_with: requests/s that a host can answer, however late.
        within_limit: requests/s at which its p99 is at the limit.
        planned: requests/s of a host with the headroom.
        points: a host under growing rates.
        needed: the load that was asked for.
        totals: rates up to `MOST_RATE`.
    """

    keeps_up_with: float
    within_limit: float
    planned: float
    points: tuple[Point, ...]
    needed: Total
    totals: tuple[Total, ...]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """One host's simulation, of which only the rate is left open."""

    host: Host
    costs: Costs
    samples: int
    limits: BatchLimits
    requests: int
    seed: int

    def at(self, rate: float) -> Point:
        """The host under ``rate`` requests/s."""
        load = Load(rate=rate, samples=self.samples, requests=self.requests, seed=self.seed)
        found = simulate(self.host, self.costs, load, limits=self.limits)
        return Point(
            rate=rate,
            offered=found.offered,
            throughput=found.throughput,
            p50_ms=1e3 * found.percentile_s(50),
            p99_ms=1e3 * found.percentile_s(99),
            utilisation=found.utilisation,
            batch_samples=float(found.batch_samples.mean()),
            refused=found.refused,
        )

    def highest_rate(self, p99_ms: float = math.inf) -> float:
        """The highest rate that the host keeps up with at a p99 within ``p99_ms``; 0: there is none."""
        busy_s = self.costs.busy_s(
            self.samples, of_batch=self.limits.max_samples, client=self.host.clients > 0
        )
        # All CPUs at work without a pause, and a tenth more.
        low, high = 0.0, 1.1 * self.host.cores / max(busy_s, 1e-9)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            point = self.at(middle)
            if point.keeps_up and point.p99_ms <= p99_ms:
                low = middle
            else:
                high = middle
        return low


def size(one: Simulated, *, rate: float, p99_ms: float, headroom: float) -> Sizing:
    """The hosts that ``rate`` requests/s need.

    Args:
        one: a host.
        rate: requests/s of all hosts together.
        p99_ms: what 99% of the answers must not take longer than, milliseconds.
        headroom: share of a host's highest rate within ``p99_ms`` that is left free.

    Raises:
        UserError: a host without load does not answer within ``p99_ms``.
    """
    keeps_up_with = one.highest_rate()
    if not keeps_up_with:
        raise UserError(
            f"requests is {one.requests}; so few do not show which rate a host keeps up with: simulate more"
        )
    within = one.highest_rate(p99_ms)
    if not within:
        alone = one.at(keeps_up_with / 100)
        raise UserError(
            f"p99_ms is {p99_ms:g}; a host with hardly any load answers 99% of requests within "
            f"{alone.p99_ms:.3g} ms: allow more, or make requests smaller"
        )
    planned = within * (1 - headroom)
    totals = sorted({*(10**exponent for exponent in (3, 3.5, 4, 4.5, 5, 5.5)), MOST_RATE})
    return Sizing(
        keeps_up_with=keeps_up_with,
        within_limit=within,
        planned=planned,
        points=tuple(one.at(share * keeps_up_with) for share in SHARES),
        needed=_total(one, rate, planned),
        totals=tuple(_total(one, total, planned) for total in totals),
    )


def _total(one: Simulated, rate: float, planned: float) -> Total:
    hosts = max(1, math.ceil(rate / planned))
    return Total(rate=rate, hosts=hosts, host=one.at(rate / hosts))
