"""Servers that follow a log of commits: what they answer and what they say of it."""

import fcntl
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tessera.cli import main
from tessera.serving.client import PredictError, RepositoryClient
from tessera.serving.client.prediction import decode_response
from tessera.serving.commits.chain import LOG_FOLDER, commit_name
from tessera.serving.commits.fence import LOCK_NAME
from tessera.serving.commits.file import read_commit
from tessera.serving.protocol import inference_pb2 as ipb
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer
from tests.conformance.followed_logs import FollowedVersion, History, wait_for_commit
from tests.conformance.live_models import asking, bits, index
from tests.kserve_messages import infer as infer_of
from tests.kserve_messages import infer_request, stub_of

FLAGS = ("--follow", "--follow-poll-ms", 20, "--drain-propagation-ms", 0)
COUNT = 6


@pytest.fixture(scope="session")
def history(tmp_path_factory, variants):
    return History(tmp_path_factory.mktemp("history"), variants["a"], COUNT)


@pytest.fixture
def version(tmp_path, history):
    return FollowedVersion(tmp_path / "models", history)


def follow(kind, version, *flags, control="explicit"):
    repository = ("--model-repository", version.repository, "--model-control", control)
    return RunningServer(kind, *repository, *FLAGS, *flags)


def test_commits_are_taken_one_after_the_other(kind, version, history, message):
    asked = asking(message, "m", "3")
    with follow(kind, version) as server:
        answer = server.predict(asked)
        assert (answer.model_version, answer.model_commit) == ("3", 0)
        assert bits(answer) == history.expected(0, message)
        for number in (1, 2, 3):
            version.put(number, history.commits[number])
            answer = wait_for_commit(server, asked, number)
            assert answer.model_version == "3"
            assert bits(answer) == history.expected(number, message)
        _check_what_is_told(server)
        content = server.raw(asked.SerializeToString(), timeout=TIMEOUT_S)
        assert decode_response(content, asked.batch_size).model_commit == 3
        infer = infer_of(server, infer_request(asked))
        assert infer.parameters["commit"].int64_param == 3
        assert bits(answer) == infer.raw_output_contents[0]


def _check_what_is_told(server):
    labels = {"model": "m", "version": "3"}
    # What is told follows what is served, by some milliseconds, or more where others use the CPUs.
    server.wait_for(lambda: server.value("tessera_model_commit", **labels) == 3)
    assert server.value("tessera_commit_rows_total", **labels) > 3
    server.wait_for(lambda: server.value("tessera_commit_apply_seconds_count", **labels) == 3)
    assert server.value("tessera_freshness_seconds", **labels) > 1e8
    assert server.value("tessera_commits_refused_total", **labels) == 0
    assert index(server) == {("m", "3"): ("READY", "")}
    config = stub_of(server).ModelConfig(ipb.ModelConfigRequest(name="m"), timeout=TIMEOUT_S)
    assert config.config.parameters["commit"].string_value == "3"
    server.wait_for(lambda: 'class="freshness"' in server.http("/")[1])
    page = server.http("/")[1]
    assert "<td>3.3</td>" in page
    assert "<polyline" in page
    server.wait_for(lambda: len(_commits_logged(server)) >= 3)
    commits = _commits_logged(server)
    assert [line["commit"] for line in commits] == [1, 2, 3]
    assert all(line["rows"] > 0 and line["seconds"] > 0 for line in commits)


def _commits_logged(server):
    return [line for line in list(server.log) if line["event"] == "commit"]


def test_a_server_that_starts_late_has_the_same_bits(kind, version, history, message):
    for number, content in history.commits.items():
        version.put(number, content)
    with follow(kind, version, control="none") as server:
        answer = server.predict(asking(message, "m"))
        assert answer.model_commit == COUNT
        assert bits(answer) == history.expected(COUNT, message)


def test_who_does_not_follow_serves_the_package(kind, version, history, message):
    version.put(1, history.commits[1])
    repository = ("--model-repository", version.repository, "--model-control", "explicit")
    with RunningServer(kind, *repository, "--drain-propagation-ms", 0) as server:
        answer = server.predict(asking(message, "m"))
        assert answer.model_commit == 0
        assert bits(answer) == history.expected(0, message)
        infer = infer_of(server, infer_request(asking(message, "m")))
        assert "commit" not in infer.parameters
        with RepositoryClient(server.address) as repository, pytest.raises(PredictError) as refused:
            repository.rollback("m", to="3.0")
        assert "rollback to a commit needs --follow; start the server with it" in str(refused.value)


# What going back needs: kept in memory, or nothing of it.
@pytest.mark.parametrize("kept", [1 << 28, 0])
def test_going_back_and_on(kind, kept, version, message, tmp_path):
    asked, history = asking(message, "m"), version.history
    for number in range(1, 5):
        version.put(number, history.commits[number])
    with follow(kind, version, "--rollback-bytes", kept) as server:
        with RepositoryClient(server.address, timeout_s=TIMEOUT_S) as repository:
            command = ["rollback", "--model", "m", "--address", server.address, "--to"]
            assert _while_another_fences_off(version, 90, lambda: main([*command, "3.2"])) == 0
            assert main([*command, "3.3"]) == 2
            answer = server.predict(asked)
            assert answer.model_commit == 2
            assert bits(answer) == history.expected(2, message)
            for to, said in (
                ("3.2", "FAILED_PRECONDITION: state '3.2' of model 'm' answers already"),
                ("3.3", "NOT_FOUND: model 'm' has no state '3.3'; version 3 is at 3.2"),
                ("4.1", "NOT_FOUND: version '4' of model 'm' is not in its folder"),
                ("3.x", "INVALID_ARGUMENT: parameter 'rollback' is '3.x', expected 'previous', a"),
            ):
                with pytest.raises(PredictError) as refused:
                    repository.rollback("m", to=to)
                assert said in str(refused.value)
        fenced = json.loads((version.log / "fenced.json").read_text())["fenced"]
        assert [one["number"] for one in fenced] == [3, 4, 90]
        # What was published on top of a commit that is fenced off is not taken.
        version.put(5, history.commits[5])
        server.wait_for(lambda: "which was fenced off" in index(server)["m", "3"][1])
        assert server.value("tessera_commits_refused_total", reason="fenced") == 1
        other = _branch(history, tmp_path)
        version.put(5, other.commits[5])
        answer = wait_for_commit(server, asked, 5)
        assert bits(answer) == other.expected(5, message)
        # Whoever can write to the folder can do it, too, even to the package itself.
        version.fence(
            {1: None, 2: None, 5: None} | {one["number"]: one["sha256"] for one in fenced}
        )
        answer = wait_for_commit(server, asked, 0)
        assert bits(answer) == history.expected(0, message)


def _while_another_fences_off(version, number, call):
    """What ``call()`` gives, which adds to the fence while somebody else does."""
    with (version.log / LOCK_NAME).open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        called = pool.submit(call)
        time.sleep(0.3)  # by now it would have written its entries, which would be lost
        version.fence({number: None})
        fcntl.flock(lock, fcntl.LOCK_UN)
        return called.result(TIMEOUT_S)


def _branch(history, tmp_path):
    """A history that has the first two commits of ``history``, and then a commit 5 of its own."""
    branch = History(tmp_path / "branch", history.package, 0, seed=1)
    for number in (1, 2):
        branch.publisher.state.apply(read_commit(history.folder / LOG_FOLDER / commit_name(number)))
    branch.publish(number=5)
    return branch


def test_follow_needs_a_repository(kind):
    server = RunningServer(kind, "--model", "m.pt", "--follow")
    assert server.exit_status() == 2
    server.wait_for(lambda: server.noise)
    assert "--follow needs versions with logs of commits; add --model-repository DIR" in "".join(
        server.noise
    )


def test_a_version_that_is_not_loaded_does_not_go_back(kind, version):
    other = version.folder.with_name("4")
    other.mkdir()
    (other / "model.pt").write_bytes((version.folder / "model.pt").read_bytes())
    with follow(kind, version) as server, RepositoryClient(server.address) as repository:
        with pytest.raises(PredictError, match="version '3' of model 'm' is not loaded"):
            repository.rollback("m", to="3.0")
        with pytest.raises(PredictError, match=r"has no state '4\.1'; version 4 is at 4\.0"):
            repository.rollback("m", to="4.1")
