"""Loads, unloads, labels and rollbacks by gRPC, by HTTP and by NVIDIA's client."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import grpc
import pytest

from tessera.serving.client import PredictorClient, RepositoryClient
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import inference_pb2_grpc
from tests.conformance.conformance_harness import TIMEOUT_S
from tests.conformance.live_models import (
    Models,
    asking,
    bits,
    index,
    load,
    ready,
    serve,
    settled,
    unload,
)
from tests.conformance.test_surface import free, run

PROGRAM = Path(__file__).with_name("triton_client.py")


@pytest.fixture(scope="module")
def models(kind, tmp_path_factory, variants):
    """One repository for all tests; each test has a model of its own."""
    return Models(tmp_path_factory.mktemp("repository"), variants)


@pytest.fixture(scope="module")
def server(kind, models, variants):
    for model in (
        "loads",
        "adds",
        "labels",
        "rolls",
        "jumps",
        "unloads",
        "http",
        "triton",
        "python",
    ):
        models.put(model, 1, "a")
    models.put("damaged", 1, "a")
    single = ["--model", f"single={variants['a']}"]
    with serve(kind, models, "explicit", *single) as running:
        yield running


@pytest.fixture
def answer(server, message):
    """The version that answers a model's request without a version, or with one."""
    return lambda model, version="": server.predict(asking(message, model, version)).model_version


def refusal(call, *args, **values):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **values)
    return caught.value.code().name, caught.value.details()


def test_a_load_without_parameters_reads_the_folder_again(server, models, answers, message):
    def answer(model, version=""):
        return server.predict(asking(message, model, version)).model_version

    models.put("loads", 2, "b")
    assert answer("loads") == "1"
    load(server, "loads")
    response = server.predict(asking(message, "loads"))
    assert response.model_version == "2"
    assert bits(response) == answers("b", message).tobytes()
    server.wait_for(lambda: ready(server, "loads") == {2})
    assert refusal(answer, "loads", "1")[0] == "NOT_FOUND"


def test_a_model_that_came_after_the_start_is_loaded(server, models, answer):
    models.put("late", 4, "c")
    load(server, "late")
    assert answer("late") == "4"


def test_a_version_is_loaded_beside_the_chosen_one(server, models, answer):
    models.put("adds", 2, "b")
    load(server, "adds")
    load(server, "adds", version=1)
    assert {version: answer("adds", version) for version in ("", "1", "2")} == {
        "": "2",
        "1": "1",
        "2": "2",
    }
    assert models.record("adds")["add"] == [1]
    load(server, "adds", version="2")  # numbers may be text
    load(server, "adds")
    assert ready(server, "adds") == {1, 2}


class Trials(threading.Thread):
    """The processes of a server that try a package, as long as this is entered."""

    def __init__(self, server):
        super().__init__()
        self._parent = server.process.pid
        self._end = threading.Event()
        self.found = set()

    def run(self):
        while not self._end.is_set():
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    parent = process.joinpath("stat").read_text().rpartition(")")[2].split()[1]
                    arguments = process.joinpath("cmdline").read_bytes().split(b"\0")
                    if int(parent) == self._parent and b"--try-package" in arguments:
                        self.found.add(process.name)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self.join()


def test_a_package_that_comes_again_is_not_tried_again(kind, tmp_path, variants, message, answers):
    if kind != "cpp":
        pytest.skip("tests/server/test_package_checker.py has that of tessera serve")
    models = Models(tmp_path / "models", variants)
    models.put("m", 1, "a")
    with serve(kind, models, "explicit") as running:
        for version, name, new in (
            (2, "b", True),
            (3, "a", False),
            (4, "b", False),
            (5, "c", True),
        ):
            models.put("m", version, name)
            with Trials(running) as trials:
                load(running, "m")
            response = running.predict(asking(message, "m"))
            assert response.model_version == str(version)
            assert bits(response) == answers(name, message).tobytes()
            # One that had too few CPUs is begun again in another process.
            assert bool(trials.found) == new, version


def test_a_label_moves_when_its_version_is_ready(server, models, answer):
    models.put("labels", 2, "b")
    load(server, "labels", version=1, label="canary")
    assert answer("labels", "canary") == "1"
    load(server, "labels", version=2, label="canary")
    assert answer("labels", "canary") == "2"
    load(server, "labels", version=1, label="stable")
    assert (answer("labels"), answer("labels", "stable")) == ("1", "1")
    assert models.record("labels")["labels"] == {"canary": 2, "stable": 1}
    for version in (1, 2):
        code, text = refusal(unload, server, "labels", version=version)
        assert code == "FAILED_PRECONDITION"
        assert ("stable" if version == 1 else "canary") in text
    assert ready(server, "labels") == {1, 2}


def test_a_rollback_leads_to_the_version_before_and_stays(server, models, answer):
    models.put("rolls", 2, "b")
    models.put("rolls", 3, "c")
    load(server, "rolls")
    assert answer("rolls") == "3"
    load(server, "rolls", rollback="previous")
    assert (answer("rolls"), answer("rolls", "stable")) == ("2", "2")
    server.wait_for(lambda: ready(server, "rolls") == {2})
    load(server, "rolls")  # the highest would be chosen, had it not been rolled back
    assert answer("rolls") == "2"
    assert ready(server, "rolls") == {2}
    load(server, "rolls", version=3)
    assert answer("rolls", "3") == "3"


def test_a_rollback_may_name_its_version(server, models, answer):
    for version, name in ((5, "b"), (7, "c")):
        models.put("jumps", version, name)
    load(server, "jumps")
    assert answer("jumps") == "7"
    load(server, "jumps", rollback=1)
    assert answer("jumps") == "1"
    code, text = refusal(load, server, "jumps", rollback="previous")
    assert code == "FAILED_PRECONDITION"
    assert "1" in text
    code, text = refusal(load, server, "jumps", rollback=6)
    assert code == "NOT_FOUND"
    assert "'6'" in text
    assert answer("jumps") == "1"


def test_an_unload_takes_a_version_or_the_model_away_until_it_is_loaded(server, models, answer):
    models.put("unloads", 2, "b")
    load(server, "unloads")
    load(server, "unloads", version=1)
    unload(server, "unloads", version=2)
    server.wait_for(lambda: ready(server, "unloads") == {1})
    assert answer("unloads") == "1"
    assert refusal(answer, "unloads", "2")[0] == "NOT_FOUND"
    unload(server, "unloads")
    server.wait_for(lambda: not ready(server, "unloads"))
    assert models.record("unloads")["unloaded"] is True
    none = ("UNAVAILABLE", "no version of model 'unloads' is loaded")
    assert refusal(answer, "unloads") == none
    load(server, "unloads")
    assert answer("unloads") == "1"
    load(server, "unloads", version=2)
    assert answer("unloads") == "2"


def test_a_version_whose_load_has_begun_is_unloaded_as_well(server, models, answer):
    # The call reads the folder and finds 3, which is wanted; 1 never gets ready, so nothing retires by itself.
    models.put("begun", 1, "a", spoil=lambda content: content[:100])
    models.put("begun", 2, "b")
    models.settings("begun", versions="all")
    load(server, "begun", version=2)
    models.put("begun", 3, "c")
    unload(server, "begun", version=3)
    server.wait_for(lambda: settled(server))
    assert ready(server, "begun") == {2}
    assert refusal(answer, "begun", "3")[0] == "NOT_FOUND"


def test_nothing_is_changed_while_serving_yaml_cannot_be_read(server, models, answer):
    models.put("unread", 1, "a")
    models.put("unread", 2, "b")
    models.settings("unread", versions=[1])
    load(server, "unread")
    models.settings("unread", text="versions: {latest: -1}")
    path = models.folder / "unread" / "serving.yaml"
    why = f"{path}: versions.latest is -1; give how many, a positive whole number"
    for values in ({}, {"version": 2}, {"version": 2, "label": "canary"}, {"rollback": 2}):
        assert refusal(load, server, "unread", **values) == ("FAILED_PRECONDITION", why)
    assert refusal(unload, server, "unread", version=1) == ("FAILED_PRECONDITION", why)
    assert index(server)["unread", "1"] == ("READY", why)
    assert index(server)["unread", "2"] == ("UNAVAILABLE", f"it is not wanted; {why}")
    assert answer("unread") == "1"
    models.settings("unread", versions=[1, 2])
    load(server, "unread")
    assert ready(server, "unread") == {1, 2}
    assert index(server)["unread", "2"] == ("READY", "")


def test_a_model_whose_record_cannot_be_read_is_not_served(server, models, answer):
    models.put("record", 1, "a")
    path = models.folder / "record" / "control.json"
    path.write_text('{"labels": 3}')
    why = f"{path}: labels is 3; give an object"
    assert refusal(load, server, "record") == ("FAILED_PRECONDITION", why)
    assert index(server)["record", "1"] == ("UNAVAILABLE", f"it is not wanted; {why}")
    assert refusal(answer, "record")[0] == "UNAVAILABLE"
    path.unlink()
    load(server, "record")
    assert answer("record") == "1"


def test_a_damaged_version_is_refused_and_changes_nothing(server, models, answer):
    content = bytearray(models.content("b"))
    content[len(content) // 2] ^= 1
    models.put("damaged", 2, "b")
    models.replace("damaged", 2, bytes(content))
    failed = server.value("tessera_model_loads_total", model="damaged", result="failed")
    for values in ({"version": 2}, {"version": 2, "label": "canary"}, {"rollback": 2}, {}):
        code, text = refusal(load, server, "damaged", **values)
        assert code == "FAILED_PRECONDITION"
        assert text.startswith("version '2' of model 'damaged' could not be loaded: package ")
        assert "model.pt" in text
        assert "\n" not in text
    state, reason = index(server)["damaged", "2"]
    assert state == "UNAVAILABLE"
    assert "model.pt" in reason
    assert answer("damaged") == "1"
    assert refusal(answer, "damaged", "canary")[0] == "NOT_FOUND"
    server.wait_for(
        lambda: server.value("tessera_model_loads_total", model="damaged", result="failed") > failed
    )
    models.replace("damaged", 2, models.content("b"))
    load(server, "damaged")
    assert answer("damaged") == "2"


@pytest.mark.parametrize(
    ("call", "values", "code", "part"),
    [
        (load, {"model": "nobody"}, "NOT_FOUND", "nobody"),
        (unload, {"model": "nobody"}, "NOT_FOUND", "nobody"),
        (load, {"version": 77}, "NOT_FOUND", "77"),
        (unload, {"version": 77}, "NOT_FOUND", "77"),
        (load, {"version": 0}, "INVALID_ARGUMENT", "version"),
        (load, {"version": "x"}, "INVALID_ARGUMENT", "version"),
        (load, {"label": "canary"}, "INVALID_ARGUMENT", "version"),
        (load, {"version": 1, "label": "7"}, "INVALID_ARGUMENT", "label"),
        (load, {"version": 1, "rollback": 1}, "INVALID_ARGUMENT", "rollback"),
        (load, {"verson": 1}, "INVALID_ARGUMENT", "verson"),
        (unload, {"label": "x"}, "INVALID_ARGUMENT", "label"),
        (load, {"model": "single"}, "FAILED_PRECONDITION", "single"),
        (unload, {"model": "single"}, "FAILED_PRECONDITION", "single"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(server, call, values, code, part):
    given = {"model": "labels", **values}
    # What the test before has replaced may still be on its way out.
    server.wait_for(lambda: settled(server))
    before = index(server)
    found, text = refusal(call, server, given.pop("model"), **given)
    assert found == code, text
    assert part in text
    assert index(server) == before


def test_calls_wait_in_a_bounded_number(server, models, answer):
    """A load, and while it goes on more calls than may wait for it."""
    models.put("waits", 1, "a")
    load(server, "waits")
    request = ipb.RepositoryModelLoadRequest(model_name="waits")
    with contextlib.ExitStack() as stack:
        # Of several connections: each has a limit of its own.
        stubs = []
        for _ in range(8):
            own = ("grpc.use_local_subchannel_pool", 1)
            channel = stack.enter_context(grpc.insecure_channel(server.address, options=[own]))
            stubs.append(inference_pb2_grpc.GRPCInferenceServiceStub(channel))
        # On a busy machine a load may end before the calls have come.
        for version in range(2, 12):
            models.put("waits", version, "ab"[version % 2])
            calls = [
                stub.RepositoryModelLoad.future(request, timeout=TIMEOUT_S)
                for _ in range(25)
                for stub in stubs
            ]
            refused = [call.exception() for call in calls if call.exception() is not None]
            if refused:
                break
    assert {error.code().name for error in refused} == {"RESOURCE_EXHAUSTED"}
    assert {error.details() for error in refused} == {
        "64 calls about repositories wait already; try again when one has been answered"
    }
    assert len(refused) < 200
    assert answer("waits") == str(version)


def http(server, path, body=None):
    """Status and JSON of a POST; ``body`` is bytes, or what is written as JSON."""
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    request = urllib.request.Request(
        f"http://{server.http_address}/v2/repository/{path}", data=content, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return reply.status, json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_http_has_the_same_calls(server, models, answer):
    models.put("http", 2, "b")
    assert http(server, "models/http/load")[0] == 200
    assert answer("http") == "2"
    status, _ = http(server, "models/http/load", {"parameters": {"version": 1, "label": "canary"}})
    assert status == 200
    assert answer("http", "canary") == "1"
    status, rows = http(server, "index")
    assert status == 200
    found = {(row["name"], row["version"]): row["state"] for row in rows}
    assert found == {place: state for place, (state, _) in index(server).items()}
    _, rows = http(server, "index", {"ready": True})
    assert {row["state"] for row in rows} == {"READY"}
    assert http(server, "models/http/unload", {"parameters": {"version": "2"}})[0] == 200
    assert answer("http") == "1"
    assert http(server, "models/http/unload")[0] == 200
    assert refusal(answer, "http")[0] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("models/nobody/load", None, 404, "nobody"),
        ("models/labels/load", {"parameters": {"version": 77}}, 404, "77"),
        ("models/labels/load", {"parameters": {"verson": 1}}, 400, "verson"),
        ("models/labels/load", {"parameters": {"version": [1]}}, 400, "version"),
        ("models/labels/load", {"parameters": 3}, 400, "parameters"),
        ("models/labels/load", [], 400, ""),
        ("models/labels/load", b'{"parameters": {"version": 1, "version": 2}}', 400, "version"),
        ("models/single/load", None, 400, "single"),
    ],
)
def test_http_refuses_with_an_error(server, path, body, status, part):
    found, told = http(server, path, body)
    assert found == status
    assert part in told["error"]


def test_the_clients_of_python_load_and_choose(server, models, message):
    models.put("python", 2, "b")
    with RepositoryClient(server.address) as repository:
        repository.load("python")
        repository.load("python", version=1, label="canary")
        repository.unload("python", version=2)
        states = {row.version: row.state for row in repository.index() if row.name == "python"}
    assert states["1"] == "READY"
    assert states["2"] != "READY"
    with PredictorClient(server.address) as client:
        raw = asking(message, "python", "canary").SerializeToString()
        assert client.send(raw)


@pytest.mark.skipif(
    find_spec("tritonclient") is None, reason="tritonclient is not installed (make install-dev)"
)
def test_nvidias_client_loads_and_unloads(server, models):
    models.put("triton", 2, "b")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--repository", server.address, "triton"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    told = json.loads(done.stdout)
    assert told == {
        "before": {"1": "READY"},
        "loaded": True,
        "after": {"1": "UNAVAILABLE", "2": "READY"},
        "unloaded": True,
        "again": True,
        "refused": "StatusCode.NOT_FOUND",
    }


def test_calls_are_refused_without_explicit_control(kind, tmp_path, variants):
    models = Models(tmp_path / "models", variants)
    models.put("m", 1, "a")
    models.put("m", 2, "b")
    with serve(kind, models, "poll", "--poll-s", "30") as running:
        for call, values in ((load, {}), (load, {"version": 1}), (unload, {})):
            code, text = refusal(call, running, "m", **values)
            assert code == "FAILED_PRECONDITION"
            assert "--model-control" in text
        assert http(running, "models/m/load")[0] == 400
        assert ready(running, "m") == {2}
        assert models.record("m") == {}


def test_a_repository_that_is_not_there_ends_with_2(kind, tmp_path):
    status, lines = run(kind, *free("--model-repository", tmp_path / "none"))
    assert status == 2
    assert lines[-1].endswith(
        f"--model-repository is '{tmp_path / 'none'}'; "
        "give a folder that can be read (No such file or directory)"
    )


def test_a_killed_server_starts_with_the_same_state(kind, tmp_path, variants, message):
    models = Models(tmp_path / "models", variants)
    for version, name in ((1, "a"), (2, "b"), (3, "c")):
        models.put("m", version, name)
        models.put("gone", version, name)
    models.settings("m", versions={"latest": 2}, labels={"canary": 3})
    with serve(kind, models, "explicit") as running:
        load(running, "m", version=1, label="stable")
        unload(running, "m", version=2)
        load(running, "m", version=2, label="canary")
        unload(running, "gone")
        running.wait_for(lambda: not ready(running, "gone"))
        running.wait_for(lambda: ready(running, "m") == {1, 2, 3})
        running.wait_for(lambda: settled(running))
        before = index(running)
        running.signal(signal.SIGKILL)
        running.exit_status()
    with serve(kind, models, "explicit") as running:
        assert {place: state for place, (state, _) in index(running).items()} == {
            place: state for place, (state, _) in before.items()
        }
        for asked, version in (("", "1"), ("canary", "2"), ("stable", "1"), ("3", "3")):
            assert running.predict(asking(message, "m", asked)).model_version == version
        assert refusal(running.predict, asking(message, "gone"))[0] == "UNAVAILABLE"
