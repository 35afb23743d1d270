"""What a call leaves behind."""

import gc

import pytest
from grpc._cython import cygrpc

from tessera.serving.server.front.byte_budget import HeldBytes
from tests.server.server_harness import request, serving

CALLS = 40


@pytest.fixture
def no_search_for_cycles():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_answered_calls_are_let_go_without_a_search_for_cycles(no_search_for_cycles):
    """Thousands that wait for one are destroyed at once, and every other call waits meanwhile."""
    with serving() as server:
        for _ in range(CALLS):
            server.predict(request())
        left = [type(kept) for kept in gc.get_objects()]
    assert left.count(cygrpc._ServicerContext) < CALLS / 4
    assert left.count(HeldBytes) < CALLS / 4
