"""Commits that are taken, and taken back, while requests are in flight: no answer mixes two, none is lost."""

import time

import pytest

from tessera.serving.client import RepositoryClient
from tests.conformance.callers import Callers, commit_of
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer
from tests.conformance.followed_logs import FollowedVersion, History
from tests.conformance.live_models import asking

COUNT = 12


@pytest.fixture(scope="session")
def history(tmp_path_factory, variants):
    return History(tmp_path_factory.mktemp("history"), variants["a"], COUNT)


def test_each_answer_has_the_bits_of_the_commit_that_it_names(kind, tmp_path, history, drawn_live):
    version = FollowedVersion(tmp_path / "models", history)
    # The larger ones are cut into parts, between which commits come.
    messages = [asking(drawn_live.samples(size), "m") for size in (1, 2, 7, 40, 150)]
    expected = [
        {number: history.expected(number, message) for number in range(COUNT + 1)}
        for message in messages
    ]
    flags = ("--follow", "--follow-poll-ms", 5, "--max-batch-samples", 16, "--workers", 2)
    repository = ("--model-repository", version.repository, "--model-control", "explicit")
    with (
        RunningServer(kind, *repository, *flags, "--drain-propagation-ms", 0) as server,
        RepositoryClient(server.address, timeout_s=TIMEOUT_S) as calls,
        Callers(server, messages, expected, commit_of) as callers,
    ):
        for number, content in history.commits.items():
            version.put(number, content)
            time.sleep(0.02)
        server.wait_for(lambda: callers.answered[COUNT] > 5)
        for back in (COUNT - 3, 2):
            calls.rollback("m", to=f"3.{back}")
            seen = callers.answered[back]
            server.wait_for(lambda back=back, seen=seen: callers.answered[back] > seen + 5)
    assert callers.wrong == []
    assert {2, COUNT - 3, COUNT} <= callers.answered.keys()
