"""Connections that become too old: their clients make new ones, and no call is lost."""

import time

import pytest

from tests.conformance.conformance_harness import RunningServer, same_bits, scores_of
from tests.conformance.raw_http2 import Http2Client
from tests.patience import PATIENCE_S


@pytest.fixture
def aging(kind, package):
    with RunningServer(kind, "--model", package, "--max-connection-age-s", 1) as server:
        yield server


def test_no_call_is_lost_while_connections_grow_old(aging, drawn):
    message = drawn.samples(3)
    expected = scores_of(aging.predict(message))
    until = time.monotonic() + PATIENCE_S
    for _ in range(2):
        with Http2Client(aging.address) as watching:
            while not watching.closed and time.monotonic() < until:
                assert same_bits(scores_of(aging.predict(message)), expected)
                watching.turn()
            assert watching.closed
