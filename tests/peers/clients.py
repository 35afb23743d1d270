"""The clients that are there, and how each is run against a server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.toolchains import JAVA_ARGUMENTS, go_environment, go_lacks, java_lacks

HERE = Path(__file__).parent
CALLS = 400
TIMEOUT_S = 300
HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
PATH = "/predictor.Predictor/Predict"


def run(*command, **environment):
    """What a command prints; its failure is an AssertionError with it."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def framed(content: bytes) -> bytes:
    """A message as gRPC sends it."""
    return b"\0" + len(content).to_bytes(4, "big") + content


def grpcio(address: str, small: Path, large: Path, python: str = sys.executable) -> str:
    return run(python, HERE / "grpcio_cases.py", address, small, large)


def kserve(address: str, http_address: str, case: Path, python: str) -> str:
    return run(python, HERE / "kserve_cases.py", address, http_address, case)


def grpc_js(address: str, small: Path, large: Path, modules: str) -> str:
    return run("node", HERE / "grpc_js_cases.js", address, small, large, NODE_PATH=modules)


def grpc_go(address: str, small: Path, large: Path) -> str:
    program = small.with_suffix(".grpc-go")
    if not program.exists():
        run("go", "build", "-o", program, HERE / "grpc_go_cases.go", **go_environment())
    return run(program, address, small, large)


def grpc_java(address: str, small: Path, large: Path) -> str:
    return run("java", f"@{JAVA_ARGUMENTS}", HERE / "GrpcJavaCases.java", address, small, large)


def curl(address: str, small: Path, large: Path) -> str:
    """HTTP/2 with prior knowledge."""
    body = small.with_suffix(".framed")
    for message in (small, large):
        body.write_bytes(framed(message.read_bytes()))
        answer = small.with_suffix(".answer")
        seen = run(
            *("curl", "-sS", "--http2-prior-knowledge", "-D", "-", "-o", answer, *HEADERS),
            *("--data-binary", f"@{body}", f"http://{address}{PATH}"),
        )
        assert seen.startswith("HTTP/2 200"), seen
        assert "grpc-status: 0" in seen, seen
        size = int.from_bytes(answer.read_bytes()[1:5], "big")
        assert answer.stat().st_size == 5 + size > 5
    return run("curl", "--version").split("\n")[0]


def h2load(address: str, small: Path, large: Path) -> str:
    del large  # its windows are tried by the others
    body = small.with_suffix(".framed")
    body.write_bytes(framed(small.read_bytes()))
    for clients, in_flight in ((1, 1), (4, 32)):
        seen = run(
            *("h2load", "-n", CALLS, "-c", clients, "-m", in_flight, "-d", body, *HEADERS),
            f"http://{address}{PATH}",
        )
        assert re.search(rf"{CALLS} succeeded, 0 failed, 0 errored, 0 timeout", seen), seen
    return run("h2load", "--version")


PROGRAMS = {
    name: client for name, client in (("curl", curl), ("h2load", h2load)) if shutil.which(name)
}
LIBRARIES = {"grpc-go": (grpc_go, go_lacks), "grpc-java": (grpc_java, java_lacks)}
"""How each is run, and the function that says what this machine lacks for it."""
