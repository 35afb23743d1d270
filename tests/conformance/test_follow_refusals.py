"""Commits that are not the next one, or not whole: noticed, told, not taken in part, and passed once the right file is there."""

from collections import Counter

import pytest

from tessera.serving.package.signing import (
    generate_keys,
    read_private_key,
    sign_package,
)
from tests.conformance.conformance_harness import RunningServer
from tests.conformance.followed_logs import FollowedVersion, History, wait_for_commit
from tests.conformance.live_models import asking, bits, index
from tests.conformance.log_faults import Faults

FAULTS = 11


@pytest.fixture(scope="session")
def signed(tmp_path_factory, variants):
    """A signed history and its faults, and the public key."""
    folder = tmp_path_factory.mktemp("signed")
    keys = []
    for name in ("trusted", "other"):
        generate_keys(folder / name, folder / f"{name}.pub")
        keys.append(read_private_key(folder / name))
    package = folder / "model.pt"
    sign_package(variants["a"], keys[0], package)
    history = History(folder / "right", package, FAULTS + 3, key=keys[0])
    faults = Faults(folder, history, key=keys[0], other_key=keys[1], other_package=variants["b"])
    return history, faults, folder / "trusted.pub"


def test_every_fault_stops_the_log_until_it_is_mended(kind, signed, tmp_path, message):
    history, faults, public_key = signed
    assert len(faults.all) == FAULTS
    version, asked = FollowedVersion(tmp_path / "models", history), asking(message, "m")
    version.put(1, history.commits[1])
    flags = ("--follow", "--follow-poll-ms", 20, "--drain-propagation-ms", 0)
    keys = ("--require-signature", "--public-key", public_key)
    repository = ("--model-repository", version.repository)
    with RunningServer(kind, *repository, *flags, *keys) as server:
        at = 1
        expected = Counter()
        for fault in faults.all:
            next_one = at + 1
            for number, content in fault.files(next_one).items():
                version.put(number, content)
            expected[fault.reason] += 1
            told = f"commit {next_one}: "
            server.wait_for(lambda told=told: index(server)["m", "3"][1].startswith(told))
            _check_it_goes_on(server, history, asked, at)
            server.wait_for(lambda: _refused(server, expected) == expected)
            version.put(next_one, history.commits[next_one])
            at = next_one + (fault.name == "missing")
            assert bits(wait_for_commit(server, asked, at)) == history.expected(at, asked), fault
            server.wait_for(lambda: index(server)["m", "3"] == ("READY", ""))
        lines = [line for line in server.log if line["event"] == "commit_refused"]
    assert Counter(line["reason"] for line in lines) == expected
    assert all(line["level"] == "warning" and line["message"] for line in lines)


def _refused(server, reasons):
    name = "tessera_commits_refused_total"
    return {reason: server.value(name, reason=reason) for reason in reasons}


def _check_it_goes_on(server, history, asked, commit):
    assert index(server)["m", "3"][0] == "READY"
    answer = server.predict(asked)
    assert answer.model_commit == commit
    assert bits(answer) == history.expected(commit, asked)
