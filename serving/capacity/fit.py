"""What a measurement does not tell piece by piece: found by simulating one of its runs until the latencies agree.

Costs that `Calibration.costs` makes of CPU times and of passes know nothing of when a thread that is due begins to run.
The run of calls at random times, a quarter of what the server can answer, shows it: it is simulated, and what its measured
latencies have beyond the simulated ones is put where it comes from.

- A smaller median: waking costs less than a lone call shows, since CPUs that have slept for a short while wake sooner.
  Both costs of waking are multiplied by one factor, between 0 and 1.
- A larger median: answers take so much longer, for which nobody uses a CPU.
- A larger 99th percentile: now and then a thread begins later than it is due.  Pauses are exponentially distributed.  A
  request that comes within one waits for what is left of it, which then has the same distribution; so their mean is the
  slope of the measured latencies' highest quantiles over -log(1 - level).  How often they come is what makes the 99th
  percentiles agree.

Under other loads such pauses delay all that queues up behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tessera.serving.capacity.calibration import Calibration, Run
from tessera.serving.capacity.model import Costs, Host, Load
from tessera.serving.capacity.simulate import simulate

_STEPS = 6
_TAIL = 0.97
"""Where latencies begin to be those of pauses, if there are some."""

_SELDOM = 1e-5
"""The smallest share of pauses that is looked for: of a hundred thousand wakes one."""


def fitted_costs(calibration: Calibration, samples: int, *, requests: int = 30_000) -> Costs:
    """What calls of ``samples`` samples cost, with what the latencies of the measurement tell beyond CPU times.

    Args:
        calibration: the measurement.
        samples: of a call.
        requests: simulated for each try; there are about two dozen.

    Raises:
        UserError: what was measured does not fit together.
    """
    fit = _Fit(calibration, requests)
    fit.fit_body()
    fit.fit_pauses()
    fit.fit_body()
    wanted = calibration.costs(samples)
    return replace(
        wanted,
        wake_s=fit.waking * wanted.wake_s,
        client_wake_s=fit.waking * wanted.client_wake_s,
        wire_s=fit.wire_s,
        late_share=fit.late_share,
        late_s=fit.late_s,
    )


class _Fit:
    """The factor of the costs of waking, and what comes on top of the costs."""

    def __init__(self, calibration: Calibration, requests: int) -> None:
        calm = calibration.calm
        self._host = Host.of_server(calibration.server, calibration.cpus, clients=calm.connections)
        self._load = Load(rate=calm.calls / calm.seconds, samples=calm.samples, requests=requests)
        self._raw = calibration.costs(calm.samples)
        self._median_s = _quantile_s(calm, 0.5)
        self._p99_s = _quantile_s(calm, 0.99)
        self.late_s = _tail_s(calm)
        self.late_share = 0.0
        self.waking = 1.0
        self.wire_s = 0.0

    def fit_body(self) -> None:
        """Let the medians agree."""
        self.wire_s = 0.0

        def within(factor: float) -> bool:
            self.waking = factor
            return self._said_s(50) <= self._median_s

        self.waking = _largest(within, [*np.linspace(0, 1, 2**_STEPS + 1).tolist()])
        self.wire_s = max(self._median_s - self._said_s(50), 0.0)

    def fit_pauses(self) -> None:
        """Let the 99th percentiles agree."""

        def within(share: float) -> bool:
            self.late_share = share
            return self._said_s(99) <= self._p99_s

        self.late_share = _largest(within, [0.0, *np.geomspace(_SELDOM, 1, 2**_STEPS).tolist()])

    def _said_s(self, percent: float) -> float:
        costs = replace(
            self._raw,
            wake_s=self.waking * self._raw.wake_s,
            client_wake_s=self.waking * self._raw.client_wake_s,
            wire_s=self.wire_s,
            late_share=self.late_share,
            late_s=self.late_s,
        )
        return simulate(self._host, costs, self._load).percentile_s(percent)


def _largest(within: Callable[[float], bool], values: list[float]) -> float:
    """The largest of the ascending ``values`` with which ``within`` holds, as with those below it; else the first."""
    if within(values[-1]):
        return values[-1]
    low, high = 0, len(values) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if within(values[middle]):
            low = middle
        else:
            high = middle
    return values[low]


def _quantile_s(run: Run, level: float) -> float:
    count = len(run.latency_us)
    return float(np.interp(level, (np.arange(count) + 0.5) / count, run.latency_us)) / 1e6


def _tail_s(run: Run) -> float:
    """The mean of the exponential distribution that the highest quantiles lie on; 0 where they do not grow."""
    levels = (np.arange(len(run.latency_us)) + 0.5) / len(run.latency_us)
    tail = levels > _TAIL
    if np.count_nonzero(tail) < 2:
        return 0.0
    slope_us, _ = np.polyfit(-np.log(1 - levels[tail]), np.array(run.latency_us)[tail], 1)
    return max(float(slope_us), 0.0) / 1e6
