"""What is fitted to the runs of a measurement: a made-up machine, measured by simulation, is found again."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from tessera.serving.capacity.fit import fitted_costs
from tessera.serving.capacity.model import Host, Load, UnderLoad
from tessera.serving.capacity.simulate import simulate
from tests.capacity.test_calibration import made_up, run_of

HOST = Host.of_server("cpp", 2, clients=1)
US = 1e-6
RATE = 8_000.0
REQUESTS = 10_000
LEVELS = 100 * (np.arange(101) + 0.5) / 101
# What waking costs the server and the client.
WAKES = {"wake_s": 10 * US, "client_wake_s": 5 * US}
# A thread in a thousand begins 2 ms later than it is due, on average.
LATE = {"late_share": 1e-3, "late_s": 2_000 * US}


def percentiles_s(costs, rate, percents, seed=0):
    found = simulate(HOST, costs, Load(rate=rate, samples=1, requests=2 * REQUESTS, seed=seed))
    return np.array([found.percentile_s(one) for one in percents])


def machine(**changes):
    return replace(made_up().costs(1), **{**WAKES, **changes})


@functools.cache
def measured(costs, *rates, requests=30_000):
    """A measurement of the machine that ``costs`` is, at ``rates`` calls a second."""
    rated = []
    for rate in rates:
        outcome = simulate(HOST, costs, Load(rate=rate, samples=1, requests=requests, seed=3))
        server, client = 1e6 * outcome.server_call_s, 1e6 * outcome.client_call_s
        run = run_of(1, 0, server=server, client=client, pass_us=60, latency=1, rate=rate)
        latencies = tuple(1e6 * outcome.percentile_s(one) for one in LEVELS)
        rated.append(replace(run, calls=int(rate * run.seconds), latency_us=latencies))
    good = made_up()
    return replace(good, runs=(*good.runs[:-1], *rated))


def test_a_machine_without_pauses_gets_none():
    found = fitted_costs(measured(machine(wire_s=30 * US), RATE), 1, requests=REQUESTS)
    assert found.wire_s == pytest.approx(30 * US, abs=3 * US)
    (under,) = found.under
    assert under.wake_s == pytest.approx(WAKES["wake_s"], rel=0.05)
    assert under.client_wake_s == pytest.approx(WAKES["client_wake_s"], rel=0.05)
    # Chance may leave some at the very end: less than a microsecond of a wake, where real pauses below make two.
    assert found.late_share * under.late_s < 1 * US
    assert under.late_s < 100 * US


def test_waking_that_costs_less_under_more_load_is_found():
    """A simulation with the costs of the lower load is busier than the machine, and later where it is nearly full."""
    rates = (RATE / 2, 2 * RATE)
    costs = ((20 * US, 12 * US), (4 * US, 3 * US))
    loads = [machine().load_on(HOST, rate, 1) for rate in rates]
    under = tuple(
        UnderLoad(load=load, wake_s=server, client_wake_s=client)
        for load, (server, client) in zip(loads, costs, strict=True)
    )
    true = machine(under=under)
    found = fitted_costs(measured(true, *rates), 1, requests=REQUESTS)
    assert [one.load for one in found.under] == pytest.approx(loads)
    for one, (server, client) in zip(found.under, costs, strict=True):
        assert one.wake_s == pytest.approx(server, rel=0.1, abs=1 * US)
        assert one.client_wake_s == pytest.approx(client, rel=0.1, abs=1 * US)
    of_calm = replace(found, under=found.under[:1])
    for rate in (1.5 * RATE, 2 * RATE, 2.2 * RATE):
        load = Load(rate=rate, samples=1, requests=REQUESTS, seed=9)
        expected, said, more = (simulate(HOST, one, load) for one in (true, found, of_calm))
        assert said.utilisation == pytest.approx(expected.utilisation, rel=0.02)
        assert said.percentile_s(99) == pytest.approx(expected.percentile_s(99), rel=0.1)
        assert more.utilisation > 1.05 * expected.utilisation


def test_passes_that_are_slower_under_more_load_are_found():
    """Waking costs the same under both loads, so that what more CPU time is used must be the passes'."""
    rates, slower = (RATE / 2, 2 * RATE), (1.0, 1.2)
    loads = [machine().load_on(HOST, rate, 1) for rate in rates]
    under = tuple(
        UnderLoad(load=load, slower=one, **WAKES) for load, one in zip(loads, slower, strict=True)
    )
    true = machine(under=under)
    found = fitted_costs(measured(true, *rates), 1, requests=REQUESTS)
    assert [one.slower for one in found.under] == pytest.approx(slower, abs=0.02)
    assert [one.wake_s for one in found.under] == pytest.approx([WAKES["wake_s"]] * 2, rel=0.1)
    for rate in (RATE, 2 * RATE):
        load = Load(rate=rate, samples=1, requests=REQUESTS, seed=9)
        expected, said = (simulate(HOST, costs, load) for costs in (true, found))
        assert said.utilisation == pytest.approx(expected.utilisation, rel=0.02)
        assert said.percentile_s(99) == pytest.approx(expected.percentile_s(99), rel=0.1)


def test_pauses_are_found_and_tell_of_other_loads():
    true = machine(**LATE)
    calibration = measured(true, RATE, requests=60_000)
    found = fitted_costs(calibration, 1, requests=2 * REQUESTS)
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
    under = tuple(
        UnderLoad(load=load, late_s=late_s, **WAKES)
        for load, late_s in zip(loads, (5e-4, 1e-3), strict=True)
    )
    true = machine(late_share=1e-2, under=under)
    found = fitted_costs(measured(true, RATE, 2 * RATE), 1, requests=REQUESTS)
    assert len(found.under) == 2
    unchanging = replace(found, under=found.under[:1])
    for times in (1.5, 2):
        # Of the same random numbers: what is left is what was found.
        expected, said, less = (
            percentiles_s(costs, times * RATE, (99,), seed=9)[0]
            for costs in (true, found, unchanging)
        )
        assert said == pytest.approx(expected, rel=0.25), times
        assert less < 0.75 * expected, times


def test_a_run_that_could_not_keep_up_or_filled_the_cpus_is_left_out():
    calibration = measured(machine(**LATE), RATE, 2 * RATE, requests=5_000)
    queueing = replace(calibration.rated[1], calls=int(RATE * calibration.rated[1].seconds))
    with_it = replace(calibration, runs=(*calibration.runs[:-1], queueing))
    without = replace(calibration, runs=calibration.runs[:-1])
    full = replace(calibration.rated[1], cores_used=0.99 * calibration.cpus)
    with_full = replace(calibration, runs=(*calibration.runs[:-1], full))
    expected = fitted_costs(without, 1, requests=1_000)
    assert fitted_costs(with_it, 1, requests=1_000) == expected
    assert fitted_costs(with_full, 1, requests=1_000) == expected
    assert fitted_costs(calibration, 1, requests=1_000) != expected


def test_other_sizes_have_the_same_pauses():
    calibration = measured(machine(**LATE), RATE, requests=5_000)
    one = fitted_costs(calibration, 1, requests=1_000)
    more = fitted_costs(calibration, 101, requests=1_000)
    assert (more.late_share, more.under, more.wire_s) == (one.late_share, one.under, one.wire_s)
    assert more.call_s > one.call_s
