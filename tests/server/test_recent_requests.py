"""The requests with which a version that comes is called before it answers."""

import asyncio
from types import SimpleNamespace

import pytest

from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.front.recent_requests import (
    ALL_BYTES,
    KEPT,
    MOST_BYTES,
    ONE_IN,
    RecentRequests,
    warm_up_with,
)


@pytest.fixture
def recent():
    return RecentRequests()


def note(recent, model, kept, size=1):
    """One request that is kept, and the others until the next is due."""
    recent.note(model, kept, size)
    for _ in range(ONE_IN - 1):
        recent.note(model, "passed over", 1)


def test_one_in_64_is_kept_and_the_last_of_each_model_stay(recent):
    for number in range(KEPT + 3):
        note(recent, "m", number)
    note(recent, "other", "o")
    assert recent.of("m") == list(range(3, KEPT + 3))
    assert recent.of("other") == ["o"]
    recent.forget("m")
    assert (recent.of("m"), recent.of("other"), recent.of("nobody")) == ([], ["o"], [])


def test_what_is_too_large_is_not_kept(recent):
    note(recent, "m", "large", MOST_BYTES + 1)
    assert recent.of("m") == []
    most = ALL_BYTES // MOST_BYTES
    models = [str(number) for number in range(2 * most // KEPT)]
    for model in models:
        for number in range(KEPT):
            note(recent, model, number, MOST_BYTES)
    assert sum(len(recent.of(model)) for model in models) == most
    recent.forget("0")
    note(recent, "m", "there is room again", MOST_BYTES)
    assert recent.of("m") == ["there is room again"]


def test_a_version_is_called_with_them():
    called = []

    async def submit(request, *, priority, deadline):
        called.append(request)
        if request == "fails":
            raise InvalidRequestError("x")

    def unfit(_model):
        raise InvalidRequestError("feature 'a' is unknown")

    model = SimpleNamespace(scheduler=SimpleNamespace(submit=submit))
    sample = [lambda _: "first", unfit, lambda _: "fails", lambda _: "last"]
    counts = asyncio.run(warm_up_with(sample, model))
    assert called == ["first", "fails", "last"]
    assert (counts.answered, counts.unfit, counts.failed) == (2, 1, 1)
