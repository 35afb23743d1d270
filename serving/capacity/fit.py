"""What a measurement does not tell piece by piece: found by simulating one of its runs until the latencies agree.

Costs that `Calibration.costs` makes of CPU times and of passes know nothing of when a thread that is due begins to run.
The run of calls at random times, a quarter of what the server can answer, shows it: its latencies are those of the
simulation with the same load, and what is different is put where it comes from, in this order.

- A smaller median: waking costs less than a lone call shows, since CPUs that have slept for a short while wake sooner.
  Both costs of waking are multiplied by one factor, between 0 and 1.
- A larger median: answers take so much longer, for which nobody uses a CPU.
- A longer tail: threads begin later than they are due, by the differences of equally likely latencies, multiplied by the
  factor with which the 99th percentiles agree.

Pauses of that kind then delay what queues up behind them under other loads too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tessera.serving.capacity.calibration import Calibration
from tessera.serving.capacity.model import Costs, Host, Load
from tessera.serving.capacity.simulate import simulate

_STEPS = 6
_TAIL = 99.0
_SHARE = 4
"""A call wakes about so many threads, one of which is late where the call is."""


def fitted_costs(calibration: Calibration, samples: int, *, requests: int = 10_000) -> Costs:
    """What calls of ``samples`` samples cost, with what the latencies of the measurement tell beyond CPU times.

    Args:
        calibration: the measurement.
        samples: of a call.
        requests: simulated for each try; there are up to a dozen.

    Raises:
        UserError: what was measured does not fit together.
    """
    calm = calibration.calm
    host = Host.of_server(calibration.server, calibration.cpus, clients=calm.connections)
    load = Load(rate=calm.calls / calm.seconds, samples=calm.samples, requests=requests)
    levels = (np.arange(len(calm.latency_us)) + 0.5) / len(calm.latency_us)
    measured_s = np.array(calm.latency_us) / 1e6

    def said_s(costs: Costs, percent: float) -> float:
        return simulate(host, costs, load).percentile_s(percent)

    raw = replace(calibration.costs(calm.samples), wire_s=0.0)
    median_s = float(np.quantile(measured_s, 0.5))

    def waking(factor: float) -> Costs:
        return replace(
            raw, wake_s=factor * raw.wake_s, client_wake_s=factor * raw.client_wake_s
        )

    factor = _factor(lambda factor: said_s(waking(factor), 50) <= median_s)
    body = waking(factor)
    body = replace(body, wire_s=max(median_s - said_s(body, 50), 0.0))
    said = simulate(host, body, load).measured_s
    more_s = np.maximum.accumulate(np.maximum(measured_s - np.quantile(said, levels), 0.0))
    # The body agrees by now.
    more_s = np.maximum(more_s - np.quantile(more_s, 0.5), 0.0)
    tail_s = float(np.interp(_TAIL / 100, levels, measured_s))

    def late(share: float) -> tuple[float, ...]:
        none = (0.0,) * ((_SHARE - 1) * len(more_s))
        return (*none, *(share * more_s).tolist())

    share = _factor(lambda share: said_s(replace(body, late_s=late(share)), _TAIL) <= tail_s)
    wanted = calibration.costs(samples)
    return replace(
        wanted,
        wake_s=factor * wanted.wake_s,
        client_wake_s=factor * wanted.client_wake_s,
        wire_s=body.wire_s,
        late_s=late(share),
    )


def _factor(within: Callable[[float], bool]) -> float:
    """The largest factor up to 1 with which ``within`` holds, which it does for all below it; 0: for none."""
    if within(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if within(middle):
            low = middle
        else:
            high = middle
    return low
