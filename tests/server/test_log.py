import dataclasses
import io
import json
import threading

import pytest

from tessera.errors import UserError
from tessera.serving.package.hashes import FileHash
from tessera.serving.server.background import ServerProcess, ServerThread
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.log import make_logger
from tests.patience import PATIENCE_S
from tests.server.server_harness import FakeLoader, config, serving, value


def fail_with_secret(log):
    secret = "what-the-user-sent"  # noqa: F841 - it must not be found in the log
    try:
        int("the cause")
    except ValueError:
        log.exception("failed")


def test_json_lines():
    stream = io.StringIO()
    log = make_logger("info", "json", stream)
    log.debug("hidden")
    log.info("ready", port=1)
    fail_with_secret(log)
    ready, failed = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (ready["event"], ready["level"], ready["port"]) == ("ready", "info", 1)
    assert ready["timestamp"].endswith("Z")
    assert "the cause" in failed["exception"][0]["exc_value"]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_tracebacks_hold_no_variables(log_format):
    stream = io.StringIO()
    fail_with_secret(make_logger("error", log_format, stream))
    assert "the cause" in stream.getvalue()
    assert "fail_with_secret" in stream.getvalue()
    assert "what-the-user-sent" not in stream.getvalue()


def test_text():
    stream = io.StringIO()
    make_logger("warning", "text", stream).warning("slow", seconds=3)
    assert "slow" in stream.getvalue()
    assert "seconds=3" in stream.getvalue()


class BrokenLoader(FakeLoader):
    def load(self, source):
        raise UserError(f"{source.path}: record 3 was changed")


def test_a_server_that_cannot_load_says_why():
    thread = ServerThread(
        config(), loader=BrokenLoader(), log=make_logger("error", "json", io.StringIO())
    )
    with pytest.raises(UserError, match="m: record 3 was changed"), thread:
        pass


class ForgetfulLoader(FakeLoader):
    """Its files are gone before their hash is known."""

    def load(self, source):
        def compute():
            raise UserError(f"{source.path}: cannot be read")

        file_hash = FileHash(compute)
        with pytest.raises(UserError):
            file_hash.wait()
        return dataclasses.replace(super().load(source), file_hash=file_hash)


def test_why_a_files_hash_cannot_be_had():
    with serving(loader=ForgetfulLoader()) as server:
        assert value(server.metrics(), "tessera_model_info", sha256="") == 1
    lines = [json.loads(line) for line in server.log.getvalue().splitlines()]
    assert "file_hash" not in [line["event"] for line in lines]
    (line,) = (line for line in lines if line["event"] == "file_hash_failed")
    assert (line["level"], line["model"], line["version"]) == ("warning", "m", "m-v1")
    assert line["error"] == "m: cannot be read"


def test_workers_that_get_no_thread(monkeypatch):
    start = threading.Thread.start
    workers = []

    def refusing_start(thread):
        if thread.name == "worker-2":
            raise RuntimeError("can't start new thread")
        if thread.name.startswith("worker-"):
            workers.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing_start)
    server = ServerThread(config(limits=ModelLimits(workers=4)), loader=FakeLoader())
    with pytest.raises(UserError, match="no more than 2 of 4 workers could be started"), server:
        pass
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


def test_a_process_that_cannot_start_says_why(tmp_path):
    process = ServerProcess(["--model", str(tmp_path / "none.pt")])
    with pytest.raises(UserError, match=r"the server did not start: .*none.pt"), process:
        pass
    assert process.process.returncode == 2
