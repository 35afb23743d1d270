"""What is fitted to the latencies of a measurement: a made-up machine, measured by simulation, is found again."""

from dataclasses import replace

import numpy as np
import pytest

from tessera.serving.capacity.fit import fitted_costs
from tessera.serving.capacity.model import Host, Load
from tessera.serving.capacity.simulate import simulate
from tests.capacity.test_calibration import made_up, run_of

HOST = Host.of_server("cpp", 2, clients=1)
US = 1e-6
RATE = 8_000.0
REQUESTS = 20_000
LEVELS = 100 * (np.arange(101) + 0.5) / 101
# A thread in a thousand begins 2 ms later than it is due, on average.
LATE = {"late_share": 1e-3, "late_s": ((0.0, 2_000 * US),)}


def percentiles_s(costs, rate, percents, seed=0):
    load = Load(rate=rate, samples=1, requests=REQUESTS, seed=seed)
    return np.array([simulate(HOST, costs, load).percentile_s(one) for one in percents])


def measured(costs, *more_rates):
    """A measurement of the machine that ``costs`` is, at `RATE` and ``more_rates`` calls a second."""
    rated = []
    for rate in (RATE, *more_rates):
        load = Load(rate=rate, samples=1, requests=60_000, seed=3)
        outcome = simulate(HOST, costs, load)
        run = run_of(1, 0, server=60, client=20, pass_us=72, latency=1, rate=rate)
        latencies = tuple(1e6 * outcome.percentile_s(one) for one in LEVELS)
        rated.append(replace(run, calls=int(rate * run.seconds), latency_us=latencies))
    good = made_up()
    return replace(good, runs=(*good.runs[:-1], *rated))


def machine(*, wakes=1.0, **changes):
    costs = made_up().costs(1)
    wake = {"wake_s": wakes * costs.wake_s, "client_wake_s": wakes * costs.client_wake_s}
    return replace(costs, **{"wire_s": 0.0, **wake, **changes})


def test_a_machine_without_pauses_gets_none():
    found = fitted_costs(measured(machine(wire_s=30 * US)), 1, requests=REQUESTS)
    assert found.wire_s == pytest.approx(30 * US, abs=3 * US)
    assert found.wake_s == made_up().costs(1).wake_s
    # Chance may leave some at the very end: less than a microsecond of a wake, where real pauses below make two.
    ((_, late_s),) = found.late_s
    assert found.late_share * late_s < 1 * US
    assert late_s < 100 * US


def test_waking_that_costs_less_than_a_lone_call_shows_is_found():
    found = fitted_costs(measured(machine(wakes=0.3)), 1, requests=REQUESTS)
    ratio = found.wake_s / made_up().costs(1).wake_s
    assert ratio == pytest.approx(0.3, abs=0.15)
    assert found.client_wake_s / made_up().costs(1).client_wake_s == pytest.approx(ratio)


def test_pauses_are_found_and_tell_of_other_loads():
    true = machine(**LATE)
    calibration = measured(true)
    found = fitted_costs(calibration, 1, requests=REQUESTS)
    without = calibration.costs(1)
    for share in (0.3, 0.6, 0.8):
        rate = share * 4 * RATE
        expected = percentiles_s(true, rate, (50, 99), seed=5)
        said = percentiles_s(found, rate, (50, 99))
        assert said == pytest.approx(expected, rel=0.25), share
        if share < 0.8:
            assert percentiles_s(without, rate, (99,))[0] < 0.6 * expected[1]


def test_pauses_that_grow_with_the_load_are_found():
    """They are twice as long at twice the lowest rate; a rate between the two is told, too."""
    loads = [machine().load_on(HOST, rate, 1) for rate in (RATE, 2 * RATE)]
    true = machine(late_share=1e-2, late_s=tuple(zip(loads, (5e-4, 1e-3), strict=True)))
    found = fitted_costs(measured(true, 2 * RATE), 1, requests=REQUESTS)
    assert len(found.late_s) == 2
    unchanging = replace(found, late_s=found.late_s[:1])
    for times in (1.5, 2):
        # Of the same random numbers: what is left is what was found.
        expected, said, less = (
            percentiles_s(costs, times * RATE, (99,), seed=9)[0]
            for costs in (true, found, unchanging)
        )
        assert said == pytest.approx(expected, rel=0.25), times
        assert less < 0.75 * expected, times


def test_a_run_that_could_not_keep_up_is_left_out():
    calibration = measured(machine(**LATE), 2 * RATE)
    queueing = replace(calibration.rated[1], calls=int(RATE * calibration.rated[1].seconds))
    with_it = replace(calibration, runs=(*calibration.runs[:-1], queueing))
    without = replace(calibration, runs=calibration.runs[:-1])
    assert fitted_costs(with_it, 1, requests=1_000) == fitted_costs(without, 1, requests=1_000)


def test_other_sizes_have_the_same_pauses():
    calibration = measured(machine(**LATE))
    one = fitted_costs(calibration, 1, requests=1_000)
    more = fitted_costs(calibration, 101, requests=1_000)
    assert (more.late_share, more.late_s) == (one.late_share, one.late_s)
    assert more.wire_s == one.wire_s
    assert more.call_s > one.call_s
