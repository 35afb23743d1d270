"""The simulation against schedules that were worked out by hand, and against closed forms of queueing theory."""

import math

import numpy as np
import pytest

from tessera.errors import UserError
from tessera.serving.capacity.model import Costs, Host, Load, QueueLimits, UnderLoad
from tessera.serving.capacity.policy import BatchLimits
from tessera.serving.capacity.simulate import simulate

US = 1e-6
# Passes of 10 us and 5 us for each sample, nothing else.
LINE = Costs(passes=((1, 15 * US), (101, 515 * US)))
ONE_WORKER = Host(cores=2, loops=1, workers=1)


def scheduled(due_us, *, host=ONE_WORKER, costs=LINE, samples=1, **limits):
    """Latencies in microseconds, and the batches."""
    load = Load(rate=1, samples=samples, warm_up=0)
    due = [at * US for at in due_us]
    found = simulate(host, costs, load, limits=BatchLimits(**limits), due_s=due)
    return (found.latency_s / US).tolist(), found.batch_samples.tolist()


def test_a_free_worker_takes_what_is_queued():
    # 0 alone until 15; 5 and 10 together until 35; 20, 21 and 34 together until 60.
    latency, batches = scheduled([0, 5, 10, 20, 21, 34])
    assert batches == [1, 2, 3]
    assert latency == pytest.approx([15, 30, 25, 40, 39, 26])


def test_a_batch_has_at_most_so_many_samples():
    # 0 until 15; then two by two: 1 and 2 until 35, 3 and 4 until 55, 5 until 70.
    latency, batches = scheduled([0, 1, 2, 3, 4, 5], max_samples=2)
    assert batches == [1, 2, 2, 1]
    assert latency == pytest.approx([15, 34, 33, 52, 51, 65])


def test_samples_are_counted_and_not_requests():
    # Three samples each: two requests do not fit into five, and each is computed alone.
    latency, batches = scheduled([0, 1, 2], samples=3, max_samples=5)
    assert batches == [3, 3, 3]
    assert latency == pytest.approx([25, 49, 73])


def test_a_large_request_is_computed_in_parts():
    # 5 samples by 2: parts of 2, 2 and 1, until 20, 40 and 55.
    latency, batches = scheduled([0], samples=5, max_samples=2)
    assert batches == [2, 2, 1]
    assert latency == pytest.approx([55])


def test_a_worker_waits_for_more_requests_but_not_longer_than_told():
    # 0 waits until 100 and takes 30 with it, until 120; 200 to 202 fill a batch at once, until 227.
    latency, batches = scheduled([0, 30, 200, 201, 202], max_delay_s=100 * US, max_samples=3)
    assert batches == [2, 3]
    assert latency == pytest.approx([120, 90, 27, 26, 25])


def test_two_workers_take_turns():
    # 0 and 1 at once on two workers; 2 and 3 wait until the first is free at 15.
    latency, batches = scheduled([0, 1, 2, 3], host=Host(cores=3, loops=1, workers=2))
    assert batches == [1, 1, 2]
    assert latency == pytest.approx([15, 15, 33, 32])


def test_short_passes_run_where_requests_come_in():
    host = Host(cores=2, loops=1, workers=1, spares=1, runs_passes=True)
    costs = Costs(passes=((1, 15 * US),), wake_s=7 * US, call_s=4 * US)
    # Nothing is known of passes at first: loop 7 + 2, worker 7 + 15, loop 7 + 2.  The second one, when it is,
    # wakes the loop alone: 7 + 2 + 15 + 2.
    latency, batches = scheduled([0, 1000], host=host, costs=costs)
    assert batches == [1, 1]
    assert latency == pytest.approx([40, 26])


def test_a_spare_worker_takes_part_in_heavy_work_alone():
    # 400 us a sample: far over what a request's network costs.
    costs = Costs(passes=((1, 400 * US), (2, 800 * US)))
    host = Host(cores=2, loops=1, workers=1, spares=1)
    # Two lone requests teach nothing of sizes; then the four that wait behind 2000 are not yet divided,
    # since the fixed part of a pass is not known, but the spare worker takes what comes behind them.
    latency, batches = scheduled([0, 1000, 2000, 2001, 2002, 2003], host=host, costs=costs)
    assert latency[:2] == pytest.approx([400, 400])
    assert latency[2] == pytest.approx(400)
    assert sum(batches) == 6
    assert latency[3] == pytest.approx(400)  # by the spare worker, at once
    alone, _ = scheduled(
        [0, 1000, 2000, 2001, 2002, 2003], host=Host(cores=2, loops=1, workers=1), costs=costs
    )
    assert alone[3] == pytest.approx(399 + 1200)


def test_threads_share_the_cpus_by_their_weights():
    # One CPU: a pass of 1000 us (weight 335) beside a request of 100 us, half of it before the queue (weight
    # 1024), which takes 50 * (1024 + 335) / 1024 us of the clock.
    costs = Costs(passes=((1, 1000 * US),), call_s=100 * US)
    host = Host(cores=1, loops=1, workers=1)
    latency, _ = scheduled([0, 200], host=host, costs=costs)
    beside = 50 * (1024 + 335) / 1024
    # The first pass ends at 1100, since 50 us of its time went to the second request; from then on the second
    # pass and the first answer share the CPU.
    assert latency[0] == pytest.approx(50 + 1000 + 50 + beside)
    assert latency[1] == pytest.approx(1100 + beside + (1000 - beside * 335 / 1359) + 50 - 200)


def test_a_full_queue_refuses():
    load = Load(rate=1, warm_up=0)
    limits = QueueLimits(max_requests=2)
    found = simulate(
        ONE_WORKER, LINE, load, queue_limits=limits, due_s=[0, US, 2 * US, 3 * US, 100 * US]
    )
    assert np.isnan(found.latency_s).tolist() == [False, False, False, True, False]
    assert found.refused == pytest.approx(0.2)


def test_a_client_on_the_same_cpus_uses_them():
    costs = Costs(passes=((1, 100 * US),), client_call_s=20 * US, wire_s=5 * US)
    host = Host(cores=2, loops=1, workers=1, clients=1)
    latency, _ = scheduled([0, 1000], host=host, costs=costs)
    assert latency == pytest.approx([125, 125])


# Closed forms.  A mean of simulated waits is held to four standard errors, which means of 25 batches of
# requests side by side give (waits that are near each other are alike).
BATCHES, ERRORS = 25, 4.0
ALONE = BatchLimits(max_samples=1)


def mean_and_error(values):
    means = np.array([part.mean() for part in np.array_split(values, BATCHES)])
    return values.mean(), means.std(ddof=1) / math.sqrt(BATCHES)


def assert_near(values, expected):
    mean, error = mean_and_error(values)
    assert abs(mean - expected) < ERRORS * error, (mean, expected, error)
    assert error < 0.1 * expected  # else the bound says nothing


@pytest.mark.parametrize("load", [0.3, 0.7, 0.85])
def test_mean_wait_of_m_d_1(load):
    service = 100 * US
    found = simulate(
        ONE_WORKER,
        Costs(passes=((1, service),)),
        Load(rate=load / service, requests=40_000, seed=3),
        limits=ALONE,
    )
    # Pollaczek and Khinchine.
    assert_near(found.measured_s - service, load * service / (2 * (1 - load)))
    # A loop, which costs nothing, and the worker: half of two CPUs at most.
    assert found.utilisation == pytest.approx(load / 2, rel=0.03)
    assert found.throughput == pytest.approx(load / service, rel=0.03)


def erlang_c(servers, offered):
    """The probability that a request waits, offered erlangs at so many servers."""
    top = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return top / (sum(offered**k / math.factorial(k) for k in range(servers)) + top)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.6), (2, 0.7), (8, 0.85)])
def test_mean_wait_of_m_m_c(servers, load):
    service, requests = 100 * US, 40_000
    ratios = np.random.default_rng(11).exponential(1, requests)
    found = simulate(
        Host(cores=servers + 1, loops=1, workers=servers),
        Costs(passes=((1, service),)),
        Load(rate=load * servers / service, requests=requests, seed=5),
        limits=ALONE,
        ratios=ratios,
    )
    wait = erlang_c(servers, load * servers) * service / (servers * (1 - load))
    assert_near(found.measured_s, wait + service)


def test_mean_time_of_a_shared_cpu():
    """Any number of equal threads on one CPU: M/G/1 with processor sharing, service / (1 - load)."""
    service, load = 100 * US, 0.6
    found = simulate(
        Host(cores=1, loops=1, workers=64),
        Costs(passes=((1, service),)),
        Load(rate=load / service, requests=30_000, seed=7),
        limits=ALONE,
    )
    assert_near(found.measured_s, service / (1 - load))


def test_the_same_seed_gives_the_same_figures():
    costs = Costs(
        passes=((1, 50 * US), (64, 900 * US)), spread_s=(-5 * US, 0.0, 100 * US), call_s=20 * US
    )
    host = Host.of_server("cpp", 2, clients=1)
    one, same, other = (
        simulate(host, costs, Load(rate=8000, requests=2000, seed=seed)) for seed in (1, 1, 2)
    )
    assert (one.latency_s == same.latency_s).all()
    assert one.percentile_s(50) != other.percentile_s(50)
    assert one.utilisation < 1


def test_passes_vary_by_the_same_time_whatever_their_size():
    costs = Costs(passes=LINE.passes, spread_s=(7 * US,))
    # 0 until 22; 5 and 10 together until 49.
    latency, batches = scheduled([0, 5, 10], costs=costs)
    assert batches == [1, 2]
    assert latency == pytest.approx([22, 44, 39])


def test_overload_answers_what_can_be_answered():
    # At most 1 request in 15 us, and no batch of more.
    found = simulate(
        ONE_WORKER,
        LINE,
        Load(rate=200_000, requests=20_000),
        limits=ALONE,
        queue_limits=QueueLimits(max_requests=100),
    )
    assert found.throughput == pytest.approx(1 / (15 * US), rel=0.02)
    assert found.refused == pytest.approx(1 - 1 / 3, abs=0.02)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Host(cores=0, loops=1, workers=1), "cores is 0"),
        (lambda: Host(cores=1, loops=1, workers=1, spares=-1), "spares is -1"),
        (lambda: Costs(passes=()), "passes is"),
        (lambda: Costs(passes=((4, 1.0), (4, 2.0))), "passes is"),
        (lambda: Costs(passes=((1, math.nan),)), "passes is nan"),
        (lambda: Costs(passes=((1, 1.0),), call_s=-1.0), "call_s is -1"),
        (lambda: Costs(passes=((1, 1.0),), spread_s=(2.0, 1.0)), "spread_s is"),
        (lambda: Load(rate=0), "rate is 0"),
        (lambda: Load(rate=math.inf), "rate is inf"),
        (lambda: Load(rate=1, samples=0), "samples is 0"),
        (lambda: Load(rate=1, requests=5), "requests is 5"),
    ],
)
def test_what_cannot_be_simulated_is_refused(make, field):
    with pytest.raises(UserError, match=field):
        make()


def test_times_of_passes_between_and_beyond_what_was_measured():
    costs = Costs(passes=((1, 10.0), (11, 20.0), (21, 60.0)))
    assert [costs.pass_s(n) for n in (1, 6, 11, 16, 21, 31)] == [10, 15, 20, 40, 60, 100]
    assert Costs(passes=((8, 3.0),)).pass_s(100) == 3


def test_costs_between_loads_lie_between():
    """Half-way: the mean, but for how late threads are, whose logarithm has it; beside none the mean as well."""
    costs = Costs(
        passes=((1, 100 * US),),
        under=(
            UnderLoad(load=0.2, wake_s=40 * US, client_wake_s=20 * US, late_s=0.0),
            UnderLoad(load=0.4, wake_s=20 * US, client_wake_s=10 * US, late_s=100 * US, slower=1.1),
            UnderLoad(
                load=0.8, wake_s=10 * US, client_wake_s=8 * US, late_s=10_000 * US, slower=1.3
            ),
        ),
    )
    half = costs.at(0.6)
    assert half.wake_s == pytest.approx(15 * US)
    assert half.client_wake_s == pytest.approx(9 * US)
    assert half.slower == pytest.approx(1.2)
    assert half.pass_s(1) == pytest.approx(120 * US)
    assert half.late_s == pytest.approx(1_000 * US)
    assert costs.at(0.3).late_s == pytest.approx(50 * US)
    assert costs.at(0.1).late_s == 0
    assert costs.at(0.9) == costs.at(0.8)
    assert costs.at(0.8).late_s == pytest.approx(10_000 * US)
