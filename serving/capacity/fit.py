"""What a measurement does not tell piece by piece: found by simulating some of its runs until they agree with what was measured.

Costs that `Calibration.costs` makes of lone calls and of those of a busy server know nothing of what threads cost that
have to be woken, and when they begin to run.  The runs of calls at random times show it.  Each is simulated, from the lowest
rate to the highest, and what was measured beyond it is put where it comes from:

- More CPU time of the server and of the client: that is what waking costs them under this load, with the colder caches that
  threads find then.  It is more the longer CPUs have slept, and higher loads wake fewer threads on CPUs that sleep, so
  that a call needs less CPU time the more calls there are.  A simulation that counts on the time of a calm server fills
  its CPUs too early, and its latencies grow without bound where those of the server do not yet.
- Still more CPU time of the server, where waking costs as much as at the lowest rate: passes are slower where both CPUs
  are busy, which share caches, and of which two may be one core's.
- A larger median of the lowest rate: answers take so much longer, for which nobody uses a CPU.
- A larger 99th percentile: now and then a thread begins later than it is due.  Pauses are exponentially distributed.  A
  request that comes within one waits for what is left of it, which then has the same distribution; so in the run of the
  lowest rate their mean is the slope of the measured latencies' highest quantiles over -log(1 - level).  How often they
  come is what makes the 99th percentiles agree.

Pauses delay all that queues up behind them, and they come of more than one thing.  The machine takes a CPU away whatever the load.  The
system's scheduler leaves two busy threads on one CPU beside one that is mostly idle, which hardly happens before CPUs are half busy
and which the simulation, whose threads share all CPUs evenly, does not know.  So of the runs of higher rates it is found how long pauses are
under their loads, as often as before, until their 99th percentiles agree; a load between takes what lies between.  (Where both
are found for each load, a few of the longest latencies decide on both, and loads between are further off.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tessera.serving.capacity.calibration import Calibration, Run
from tessera.serving.capacity.model import Costs, Host, Load, UnderLoad
from tessera.serving.capacity.simulate import Outcome, simulate

_TAIL = 0.97
"""Where latencies begin to be those of pauses, if there are some."""

_KEEPS_UP, _FULL = 0.95, 0.98
"""A run that answered less than the first share of its calls in its time, or used more than the second of the CPUs,
tells of a growing queue and not of a load."""

_SHARES = (1e-5, 0.3)
"""The share of wakes that are late: of a hundred thousand one at least, and hardly a third."""

_PAUSES = (1e-3, 1.0)
"""How long pauses are at least and at most, by the measured 99th percentile."""

_NEAR = 0.02
"""A simulated 99th percentile as near as this to the measured one agrees with it; chance makes more."""

_TRIES = 9


def fitted_costs(calibration: Calibration, samples: int, *, requests: int = 30_000) -> Costs:
    """What calls of ``samples`` samples cost, with what the runs at random times tell beyond lone and busy ones.

    Args:
        calibration: the measurement.
        samples: of a call.
        requests: simulated for each try; there are about ten for each rate.

    Raises:
        UserError: what was measured does not fit together.
    """
    fit = _Fit(calibration, requests)
    calm, *busier = calibration.rated
    fit.take(calm)
    fit.fit_cpu_times()
    fit.fit_median()
    fit.fit_pauses()
    fit.fit_cpu_times()
    fit.fit_median()
    for run in busier:
        keeps_up = _rate(run) >= _KEEPS_UP * run.rate
        if keeps_up and run.cores_used <= _FULL * calibration.cpus:
            fit.take(run)
            fit.fit_cpu_times()
            fit.fit_pauses()
            fit.fit_cpu_times()
    return fit.of(calibration.costs(samples))


class _Fit:
    """What comes on top of the costs, found of one run after the other."""

    def __init__(self, calibration: Calibration, requests: int) -> None:
        self._server, self._cpus = calibration.server, calibration.cpus
        self._requests = requests
        self._raw = calibration.costs(calibration.samples)
        self._wire_s, self._late_share = 0.0, 0.0
        self._before: list[UnderLoad] = []
        self._run = calibration.calm
        self._now = UnderLoad(load=0.0)

    def of(self, costs: Costs) -> Costs:
        """``costs`` with what has been found."""
        return replace(
            costs,
            wire_s=self._wire_s,
            late_share=self._late_share,
            under=(*self._before, self._now),
        )

    def take(self, run: Run) -> None:
        """Go on with ``run``, which has a higher rate than those before it."""
        if self._now.load:
            self._before.append(self._now)
        load = self._raw.load_on(self._host(run), _rate(run), run.samples)
        self._run, self._now = run, replace(self._now, load=load)

    def fit_cpu_times(self) -> None:
        """Let the CPU times of server and client agree: by what waking costs, and above the lowest rate by slower passes.

        Waking costs at most what it does at the lowest rate, where CPUs have slept longest.
        """
        most = self._before[0] if self._before else None
        for _ in range(2):
            found, count, now = self._simulated(), self._requests, self._now
            wakes, client_wakes = found.wakes / count, found.client_wakes / count
            more_s = self._run.server_cpu_us / 1e6 - found.server_call_s
            client_more_s = self._run.client_cpu_us / 1e6 - found.client_call_s
            passes_s = found.server_call_s - self._raw.call_s - now.wake_s * wakes
            plain_s = passes_s / now.slower
            both_s = now.wake_s * wakes + passes_s + more_s
            wake_s, client_wake_s, slower = now.wake_s, now.client_wake_s, now.slower
            if wakes:
                wake_s = max((both_s - plain_s) / wakes, 0.0)
                wake_s = min(wake_s, most.wake_s) if most else wake_s
            if client_wakes:
                client_wake_s = max(client_wake_s + client_more_s / client_wakes, 0.0)
                client_wake_s = min(client_wake_s, most.client_wake_s) if most else client_wake_s
            if most and plain_s > 0:
                slower = max((both_s - wake_s * wakes) / plain_s, 1.0)
            self._now = replace(now, wake_s=wake_s, client_wake_s=client_wake_s, slower=slower)

    def fit_median(self) -> None:
        """Let the medians agree where the measured one is larger."""
        self._wire_s = 0.0
        more_s = self._run.latency_s(0.5) - self._simulated().percentile_s(50)
        self._wire_s = max(more_s, 0.0)

    def fit_pauses(self) -> None:
        """Let the 99th percentiles agree: by how often pauses come, or, where that is known, by how long they are."""

        def with_share(share: float) -> float:
            self._late_share = share
            return self._simulated().percentile_s(99)

        def with_mean(mean_s: float) -> float:
            self._now = replace(self._now, late_s=mean_s)
            return self._simulated().percentile_s(99)

        p99_s = self._run.latency_s(0.99)
        if self._late_share:
            bounds_s = (_PAUSES[0] * p99_s, _PAUSES[1] * p99_s)
            self._now = replace(self._now, late_s=_where(with_mean, p99_s, bounds_s))
            return
        self._before = [replace(one, late_s=0.0) for one in self._before]
        self._now = replace(self._now, late_s=_tail_s(self._run))
        self._late_share = _where(with_share, p99_s, _SHARES)

    def _host(self, run: Run) -> Host:
        return Host.of_server(self._server, self._cpus, clients=run.connections)

    def _simulated(self) -> Outcome:
        run = self._run
        load = Load(rate=_rate(run), samples=run.samples, requests=self._requests)
        return simulate(self._host(run), self.of(self._raw), load)


def _rate(run: Run) -> float:
    return run.calls / run.seconds


def _where(said: Callable[[float], float], wanted: float, bounds: tuple[float, float]) -> float:
    """Where ``said``, which grows, comes near to ``wanted`` between the ``bounds``; 0 if it is more at the lower one.

    Bisection of the logarithm, and in every other try a straight line between the logarithms of both sides.
    """
    low, high = bounds
    at_low, at_high = said(low), said(high)
    if at_low >= wanted:
        return 0.0
    if at_high <= wanted:
        return high
    for i in range(_TRIES):
        part = math.log(wanted / at_low) / math.log(at_high / at_low) if i % 2 else 0.5
        middle = low * math.pow(high / low, part)
        at_middle = said(middle)
        if abs(at_middle - wanted) <= _NEAR * wanted:
            return middle
        if at_middle < wanted:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    return low


def _tail_s(run: Run) -> float:
    """The mean of the exponential distribution that the highest quantiles lie on; 0 where they do not grow."""
    levels = (np.arange(len(run.latency_us)) + 0.5) / len(run.latency_us)
    tail = levels > _TAIL
    if np.count_nonzero(tail) < 2:
        return 0.0
    slope_us, _ = np.polyfit(-np.log(1 - levels[tail]), np.array(run.latency_us)[tail], 1)
    return max(float(slope_us), 0.0) / 1e6
