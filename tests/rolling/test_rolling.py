"""Two servers behind one client share its calls, a third gets its share, and a rolling restart loses no call."""

import pytest

from tests.conformance.conformance_harness import commands
from tests.rolling.fleet import Fleet, Load, wait_until

CALLS = 300
SOON = [("grpc.dns_min_time_between_resolutions_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]


@pytest.fixture(params=list(commands()))
def fleet(request, tmp_path):
    flags = ("--max-connection-age-s", 1, "--drain-propagation-ms", 300)
    with Fleet(request.param, tmp_path, (1, 2, 3), *flags) as servers:
        yield servers


def test_calls_are_shared_and_none_is_lost(fleet):
    fleet.start(1, 2)
    with Load(fleet, options=SOON) as load:
        wait_until(lambda: fleet.fair(load.shares(CALLS)))
        fleet.start(3)
        wait_until(lambda: fleet.fair(load.shares(CALLS)))
        for number in (1, 2):
            assert fleet.restart(number) == 0
            wait_until(lambda: fleet.fair(load.shares(CALLS)))
    assert load.failed == {}
    assert load.wrong == 0
