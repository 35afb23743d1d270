"""The capacity of a server in an open loop is found by halving."""

import pytest

from tessera.serving.bench.capacity import BOUND_S, STEPS, open_capacity


def server(limit, *, late=()):
    """The p99 of a server that takes ``limit`` calls a second; it is late in the runs of these numbers, whatever the rate."""
    asked = []

    def p99_s(rate):
        asked.append(rate)
        return 2 * BOUND_S if rate > limit or len(asked) - 1 in late else BOUND_S / 10

    return p99_s, asked


@pytest.mark.parametrize("limit", [2.0, 33.3, 64.0, 99.9])
def test_is_within_a_step_below_the_highest_rate_that_is_kept(limit):
    p99_s, asked = server(limit)
    found = open_capacity(p99_s, 100.0)
    assert limit - 100 / 2**STEPS < found <= limit
    assert all(0 < rate < 100 for rate in asked)


def test_a_run_that_something_else_delayed_does_not_count():
    p99_s, _ = server(80.0, late={0, 2})
    assert open_capacity(p99_s, 100.0) > 75


def test_a_server_that_keeps_up_with_nothing_is_an_error():
    p99_s, _ = server(1.0)
    with pytest.raises(
        ValueError,
        match=r"p99 is above 50 ms even at 2 calls a second, where a closed loop reached 100",
    ):
        open_capacity(p99_s, 100.0)
