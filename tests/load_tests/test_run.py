"""``load_tests/run.py`` from start to end: a server of its own, and one that fails."""

import re
from concurrent import futures

import grpc
import pytest

from load_tests import run
from tessera.serving.protocol import predictor_pb2_grpc
from tests.package_factory import package_file


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("package"))


def test_a_server_of_its_own(package, tmp_path, capfd):
    flags = ["--users", "10", "--run-time-s", "2"]
    status = run.main(["--model-file", str(package), "--out", str(tmp_path), *flags])
    captured = capfd.readouterr()
    assert status == 0, captured.err + (tmp_path / "locust.log").read_text()
    for name in ("one sample", "one user and many candidates"):
        row = re.search(rf"^Predict, {name} +([\d.]+) .* (\d+)$", captured.out, re.MULTILINE)
        assert float(row[1]) > 0
        assert row[2] == "0"
        sizes = rf"Predict, {name}: \d+ to \d+ bytes a request, \d+ on average"
        assert re.search(sizes, captured.out)
    report = (tmp_path / "report.html").read_text()
    assert "Predict, one sample" in report
    assert '"event": "stop"' in (tmp_path / "server.log").read_text()


class FullServer(predictor_pb2_grpc.PredictorServicer):
    def Predict(self, request, context):  # noqa: N802 - gRPC's name
        context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED, f"queue full at {context.time_remaining()}"
        )


def test_failures_are_counted_by_status(package, tmp_path, capfd):
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    predictor_pb2_grpc.add_PredictorServicer_to_server(FullServer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        flags = ["--address", f"127.0.0.1:{port}", "--users", "2", "--run-time-s", "1"]
        status = run.main([*flags, "--model-file", str(package), "--out", str(tmp_path)])
    finally:
        server.stop(grace=None).wait()
    captured = capfd.readouterr()
    assert status == 1
    failed = re.findall(r"^failed: \d+ x Predict, .*: .*$", captured.out, re.MULTILINE)
    # One line per kind of user that made a call, however many messages there were.
    assert 1 <= len(failed) <= 2
    assert all("RESOURCE_EXHAUSTED" in line for line in failed)


def test_a_package_that_is_none(tmp_path, capfd):
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"no package")
    with pytest.raises(SystemExit) as caught:
        run.main(["--model-file", str(bad), "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "bad.pt: is damaged" in capfd.readouterr().err


def test_a_server_that_does_not_start(package, tmp_path, capfd):
    # The manifest can be read, which is all that is looked at first.
    changed = tmp_path / "changed.pt"
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    assert run.main(["--model-file", str(changed), "--out", str(tmp_path / "out")]) == 1
    error = capfd.readouterr().err
    assert "the server did not start" in error
    assert "changed.pt" in error


@pytest.mark.parametrize(
    "flags",
    [
        ["--users", "0"],
        ["--model-file", "absent.pt"],
        ["--run-time-s", "soon"],
        ["--address", "nowhere"],
        ["--out", __file__],
    ],
)
def test_wrong_flags(flags, package, capsys):
    if "--model-file" not in flags:
        flags = [*flags, "--model-file", str(package)]
    with pytest.raises(SystemExit) as caught:
        run.main(flags)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
