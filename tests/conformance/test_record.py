"""--record: both servers write the same records of the same calls, keep their bounds, and survive what becomes of the folder."""

import collections
import shutil
import subprocess

import pytest

from tessera.serving.server.observe.record_format import read_records
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer, cpp_program
from tests.conformance.conftest import Drawn
from tests.conformance.rest_calls import RestClient, rest_request
from tests.kserve_messages import infer_request, raw_infer


def recording(kind, package, folder, *flags, share=1):
    record = ["--record", folder, "--record-share", share, "--drain-propagation-ms", 0]
    return RunningServer(kind, "--model", package, *record, *flags)


def records_in(folder):
    return [call for path in sorted(folder.iterdir()) for call in read_records(path)]


def written(server, count):
    return lambda: server.value("tessera_records_total", result="written") == count


def ask(method, content, name):
    method(content, timeout=TIMEOUT_S, metadata=(("x-request-id", name),))


def make_calls(server, message):
    """Three calls that are recorded, and two that no model is found for."""
    infer = infer_request(message)
    ask(server.raw, message.SerializeToString(), "predict")
    ask(raw_infer(server), infer.SerializeToString(), "infer")
    with RestClient(server.http_address) as rest:
        body, headers = rest_request(infer, binary=True)
        assert rest.infer(body, {"X-Request-Id": "rest", **headers}).status == 200
    unknown = type(message)()
    unknown.CopyFrom(message)
    unknown.model_name = "nobody"
    assert server.outcome(unknown.SerializeToString())[0] == "NOT_FOUND"
    assert server.outcome(b"\xff")[0] == "INVALID_ARGUMENT"


def test_the_same_calls_leave_the_same_records(both_kinds, package, in_process, tmp_path):
    message = Drawn(in_process.manifest.schema).samples(3)
    found = {}
    for kind in both_kinds:
        folder = tmp_path / kind
        with recording(kind, package, folder) as server:
            make_calls(server, message)
            server.wait_for(written(server, 3))
            (path,) = folder.iterdir()
            assert path.stat().st_mode & 0o777 == 0o600
            assert folder.stat().st_mode & 0o777 == 0o700
            header_bytes = 36
            size = server.value("tessera_record_bytes_total")
            assert size == path.stat().st_size - header_bytes
            assert server.value("tessera_records_total", result="dropped") == 0
        found[kind] = records_in(folder)
    plain = {
        kind: [(c.method, c.protocol, c.model, c.version, c.request_id, c.message) for c in calls]
        for kind, calls in found.items()
    }
    python, cpp = plain.values()
    assert python == cpp
    assert [one[:5] for one in cpp] == [
        ("Predict", "grpc", "ranker", "3", "predict"),
        ("ModelInfer", "grpc", "ranker", "3", "infer"),
        ("ModelInfer", "rest", "ranker", "3", "rest"),
    ]
    assert cpp[0][5] == message.SerializeToString()
    assert cpp[1][5] == infer_request(message).SerializeToString()
    for calls in found.values():
        times = [call.arrival_ns for call in calls]
        assert 0 < times[0] < times[1] < times[2] < TIMEOUT_S * 1e9


def test_a_share_of_nothing_writes_nothing(kind, package, in_process, tmp_path):
    message = Drawn(in_process.manifest.schema).samples(3)
    with recording(kind, package, tmp_path, share=0) as server:
        make_calls(server, message)
        assert server.value("tessera_records_total") == 0
    assert not list(tmp_path.iterdir())


def test_what_becomes_of_the_folder_changes_no_answer(kind, package, in_process, tmp_path):
    content = Drawn(in_process.manifest.schema).samples(3).SerializeToString()
    folder = tmp_path / "records"
    bounds = ["--record-file-bytes", 4_096, "--record-bytes", 12_288]
    with recording(kind, package, folder, *bounds) as server:
        count = 12_288 * 3 // len(content)
        for number in range(count):
            server.raw(content, timeout=TIMEOUT_S)
            if number % 20 == 0:
                # Only then does nothing change between listing the files and looking at their sizes.
                server.wait_for(written(server, number + 1))
                sizes = [path.stat().st_size for path in folder.iterdir()]
                assert sum(sizes) <= 12_288
                assert max(sizes, default=0) <= 4_096
        server.wait_for(written(server, count))
        assert 0 < len(records_in(folder)) < count
        shutil.rmtree(folder)
        lost = lambda: server.value("tessera_records_total", result="dropped") >= 2  # noqa: E731 - it is one line
        server.raw(content, timeout=TIMEOUT_S)
        server.wait_for(lambda: server.value("tessera_records_total", result="dropped") == 1)
        server.raw(content, timeout=TIMEOUT_S)
        server.wait_for(lost)
        folder.mkdir()

        def is_back():
            server.raw(content, timeout=TIMEOUT_S)
            return any(folder.iterdir())

        server.wait_for(is_back)
        server.signal()
        assert server.exit_status() == 0
    events = collections.Counter(line["event"] for line in server.log)
    assert events["records_not_written"] == events["records_written_again"] == 1
    assert records_in(folder)


def replay(server, *flags):
    command = [cpp_program().with_name("tessera-load"), "--address", server.address, *flags]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


@pytest.fixture(scope="module")
def killed(kind, package, in_process, tmp_path_factory):
    """The folder of a server that was killed while it recorded, and the messages that it may hold."""
    folder = tmp_path_factory.mktemp("killed")
    drawn = Drawn(in_process.manifest.schema)
    contents = [drawn.samples(1).SerializeToString() for _ in range(50)]
    server = recording(kind, package, folder)
    server.__enter__()
    for content in contents:
        server.raw(content, timeout=TIMEOUT_S)
    server.wait_for(lambda: server.value("tessera_records_total", result="written") >= 1)
    for content in contents:
        server.raw(content, timeout=TIMEOUT_S)
    server.kill()
    return folder, contents


def test_what_a_killed_server_has_recorded_is_read_and_replayed(killed, package, tmp_path):
    folder, contents = killed
    if not cpp_program() or not cpp_program().with_name("tessera-load").exists():
        pytest.skip("tessera-load is not built (make build)")
    before = records_in(folder)
    assert before
    assert [call.message for call in before] == (contents * 2)[: len(before)]
    # A record that was being written.
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert records_in(folder) == before[:-1]
    with recording("cpp", package, tmp_path / "again") as server:
        for flags in ((), ("--speed", 20)):
            done = replay(server, "--replay", folder, "--connections", 3, *flags)
            assert done.returncode == 0, done.stderr
            assert "1 files were cut" in done.stderr
            assert f"replay of {len(before) - 1} requests" in done.stdout
            assert f"answered   {len(before) - 1} requests" in done.stdout
        server.wait_for(written(server, 2 * (len(before) - 1)))
        messages = lambda calls: collections.Counter(call.message for call in calls)  # noqa: E731 - it is one line
        assert messages(records_in(tmp_path / "again")) == messages(before[:-1] * 2)
        flags = ("--rate", 200, "--warm-up-s", 0, "--duration-s", 0.2)
        done = replay(server, "--replay", path, *flags)
        assert done.returncode == 0, done.stderr
        assert "open loop, 200 requests/s" in done.stdout


def test_a_replay_that_cannot_be_is_refused(tmp_path):
    if not cpp_program() or not cpp_program().with_name("tessera-load").exists():
        pytest.skip("tessera-load is not built (make build)")

    class Nobody:
        address = "127.0.0.1:1"

    strange, empty = tmp_path / "requests-1-1.rec", tmp_path / "empty"
    strange.write_bytes(b"x" * 100)
    empty.mkdir()
    for flags, words in (
        (["--replay", tmp_path / "none"], "it cannot be read"),
        (["--replay", strange], "it does not begin as a file of recorded requests of version 1"),
        (["--replay", tmp_path], "it does not begin as a file of recorded requests of version 1"),
        (["--replay", empty], "it has no file of recorded requests"),
        (["--replay", strange, "--speed", 0], "--speed is 0; give a number from 0.001 to 1000000"),
        (
            ["--replay", strange, "--speed", 2, "--rate", 5],
            "--speed is for --replay without --rate",
        ),
        (["--replay", strange, "--duration-s", 5], "leave out --warm-up-s and --duration-s"),
        (
            ["--replay", strange, "--model-file", "m.pt"],
            "one of --model-file, --requests and --replay",
        ),
    ):
        done = replay(Nobody, *flags)
        assert done.returncode == 2, flags
        assert done.stderr.startswith("tessera-load: error: ")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
