"""What a measurement does not tell piece by piece: found by simulating some of its runs until the latencies agree.

Costs that `Calibration.costs` makes of CPU times and of passes know nothing of when a thread that is due begins to run.
The runs of calls at random times show it: each is simulated, and what its measured latencies have beyond the simulated ones is
put where it comes from.  Of the one of the lowest rate:

- A smaller median: waking costs less than a lone call shows, since CPUs that have slept for a short while wake sooner.
  Both costs of waking are multiplied by one factor, between 0 and 1.
- A larger median: answers take so much longer, for which nobody uses a CPU.

- A larger 99th percentile: now and then a thread begins later than it is due.  Pauses are exponentially distributed.  A
  request that comes within one waits for what is left of it, which then has the same distribution; so their mean is the
  slope of the measured latencies' highest quantiles over -log(1 - level).  How often they come is what makes the 99th
  percentiles agree.

Pauses delay all that queues up behind them, and they come of more than one thing.  The machine takes a CPU away whatever the load.  The
system's scheduler leaves two busy threads on one CPU beside one that is mostly idle, which hardly happens before CPUs are half busy
and which the simulation, whose threads share all CPUs evenly, does not know.  So of the runs of higher rates it is found how long pauses are
under their loads, as often as before, until their 99th percentiles agree; a load between takes what lies between.
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

_KEEPS_UP = 0.95
"""A run that answered less than this share of its calls in its time tells of a growing queue and not of a load."""

_SELDOM = 1e-5
"""The smallest share of pauses that is looked for: of a hundred thousand wakes one."""

_PAUSES_S = (1e-5, 1.0)
"""How long pauses are at least and at most, seconds."""


def fitted_costs(calibration: Calibration, samples: int, *, requests: int = 30_000) -> Costs:
    """What calls of ``samples`` samples cost, with what the latencies of the measurement tell beyond CPU times.

    Args:
        calibration: the measurement.
        samples: of a call.
        requests: simulated for each try; there are about two dozen, and half a dozen more for each rate.

    Raises:
        UserError: what was measured does not fit together.
    """
    fit = _Fit(calibration, requests)
    calm, *busier = calibration.rated
    fit.fit_body(calm)
    fit.fit_pauses(calm)
    fit.fit_body(calm)
    for run in busier:
        if _rate(run) >= _KEEPS_UP * run.rate:
            fit.fit_pauses(run)
    return fit.of(calibration.costs(samples))


class _Fit:
    """The factor of the costs of waking, and what comes on top of the costs."""

    def __init__(self, calibration: Calibration, requests: int) -> None:
        self._server, self._cpus = calibration.server, calibration.cpus
        self._requests = requests
        self._raw = calibration.costs(calibration.samples)
        self._waking, self._wire_s = 1.0, 0.0
        self._late_share = 0.0
        self._late_s: tuple[tuple[float, float], ...] = ()

    def of(self, costs: Costs) -> Costs:
        """``costs`` with what has been found."""
        return replace(
            costs,
            wake_s=self._waking * costs.wake_s,
            client_wake_s=self._waking * costs.client_wake_s,
            wire_s=self._wire_s,
            late_share=self._late_share,
            late_s=self._late_s,
        )

    def fit_body(self, run: Run) -> None:
        """Let the medians agree."""
        self._wire_s = 0.0
        median_s = _quantile_s(run, 0.5)

        def within(factor: float) -> bool:
            self._waking = factor
            return self._said_s(run, 50) <= median_s

        self._waking = _largest(within, [*np.linspace(0, 1, 2**_STEPS + 1).tolist()])
        self._wire_s = max(median_s - self._said_s(run, 50), 0.0)

    def fit_pauses(self, run: Run) -> None:
        """Let the 99th percentiles agree; ``run`` has a higher rate than those before it."""
        p99_s = _quantile_s(run, 0.99)
        load = self._raw.load_on(self._host(run), _rate(run), run.samples)
        before = self._late_s

        def with_share(share: float) -> bool:
            self._late_share = share
            return self._said_s(run, 99) <= p99_s

        def with_mean(mean_s: float) -> bool:
            self._late_s = (*before, (load, mean_s))
            return self._said_s(run, 99) <= p99_s

        if self._late_share:
            with_mean(_largest(with_mean, [0.0, *np.geomspace(*_PAUSES_S, 2**_STEPS).tolist()]))
            return
        self._late_s = (*((one, 0.0) for one, _ in before), (load, _tail_s(run)))
        with_share(_largest(with_share, [0.0, *np.geomspace(_SELDOM, 1, 2**_STEPS).tolist()]))

    def _host(self, run: Run) -> Host:
        return Host.of_server(self._server, self._cpus, clients=run.connections)

    def _said_s(self, run: Run, percent: float) -> float:
        load = Load(rate=_rate(run), samples=run.samples, requests=self._requests)
        return simulate(self._host(run), self.of(self._raw), load).percentile_s(percent)


def _rate(run: Run) -> float:
    return run.calls / run.seconds


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
