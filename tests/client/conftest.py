"""Fixtures of the client's tests."""

import pytest
from fake_predictor import FakeServer, running


@pytest.fixture
def server():
    with running(FakeServer()) as fake:
        yield fake
