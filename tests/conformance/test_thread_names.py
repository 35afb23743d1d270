"""Threads of both servers tell the kernel what they do, for `top -H` and `perf`."""

import re
from pathlib import Path

from tests import REPOSITORY
from tests.conformance.conformance_harness import RunningServer
from tests.conformance.rest_calls import RestClient, rest_request
from tests.kserve_messages import infer_request


def thread_names(server):
    """The kernel's names of the server's threads but for the first one, whose name is the program's."""
    first = server.process.pid
    tasks = [task for task in Path(f"/proc/{first}/task").iterdir() if task.name != str(first)]
    return [(task / "comm").read_text().rstrip("\n") for task in tasks]


def test_threads_have_the_names_of_the_operations_guide(package, kind, drawn, tmp_path):
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    flags = (
        *("--model", package, "--workers", 2, "--drain-propagation-ms", 0),
        *("--access-log", tmp_path / "calls.log", "--record", recorded, "--record-share", 1),
    )
    with RunningServer(kind, *flags) as server:
        server.predict(drawn.samples(3))
        with RestClient(server.http_address) as rest:
            body, headers = rest_request(infer_request(drawn.samples(300)))
            path = "/v2/models/ranker/infer"
            assert rest.infer(body, headers, path=path).status == 200
        names = set(thread_names(server))
    wanted = {"worker-0", "worker-1", "log", "access-log", "recorder", "rest"}
    if kind == "cpp":
        wanted |= {"grpc-loop-0", "http-loop"}
    assert wanted <= names
    guide = (REPOSITORY / "docs/operations.md").read_text()
    for name in wanted:
        assert f"`{re.sub(r'[0-9]+$', 'N', name)}`" in guide
