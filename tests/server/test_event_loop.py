"""The processes of tessera serve give the interpreter's lock to others sooner than Python does by itself."""

import sys

import pytest

from tessera.serving.server.event_loop import SWITCH_INTERVAL_S, run_loop


def test_other_threads_have_their_turn_soon():
    async def body():
        return sys.getswitchinterval()

    before = sys.getswitchinterval()
    try:
        assert run_loop(body()) == pytest.approx(SWITCH_INTERVAL_S)
    finally:
        sys.setswitchinterval(before)
