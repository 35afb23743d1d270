"""Starts either server as a program, or takes a given one, and speaks to it as any client would.

What the suite knows of a server is what its users see: flags, protocols, status codes,
metrics, log lines with ``"event": "ready"``, signals and exit statuses.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tessera.serving.protocol import predictor_pb2 as pb
from tests import forked_program
from tests.package_factory import string_columns
from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = PATIENCE_S

MODELS = {"ranker": {"version": "3", "columns": string_columns()}, "other": {"seed": 1}}
"""The packages of the suite and how `make_package` makes them."""

LIMITS = ("--max-request-samples", "1000", "--max-request-ids", "100000")
"""Limits of the server that most tests use, near enough to be reached."""


CPP_PROGRAM = Path(
    os.environ.get("TESSERA_CPP_SERVER", REPOSITORY / "build/cpp/release/tessera-server")
)
"""The C++ server; its other programs are beside it.  ``TESSERA_CPP_SERVER`` names another build."""


def cpp_program():
    """The C++ server, or None where it is not built."""
    return CPP_PROGRAM if CPP_PROGRAM.exists() else None


def commands():
    """How each server that is there is started, by its name in ``tessera_build_info``."""
    found = {"python": [sys.executable, "-m", "tessera", "serve"]}
    if cpp_program():
        found["cpp"] = [str(cpp_program())]
    return found


def start_server(kind, flags, *, stderr):
    """The process of a server of our own, in this folder; ``stderr`` as ``subprocess.Popen`` takes it.

    Python's is forked where it can be (`forked_program`).
    """
    if kind == "python":
        return forked_program.start(["serve", *flags], stderr=stderr)
    return subprocess.Popen(
        [*commands()[kind], *map(str, flags)],
        stderr=stderr,
        text=True,
        errors="backslashreplace",  # gRPC's own lines hold what clients sent
        env=forked_program.usual_environment(),
    )


def start_that_ends(kind, *flags, anew=False):
    """What a server does that must not start: a ``subprocess.CompletedProcess``.

    ``anew``: by the command that users give, which imports everything itself.
    """
    if kind == "python" and not anew:
        return forked_program.run(["serve", *flags])
    return subprocess.run(
        [*commands()[kind], *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


class Server:
    """A server that speaks on ``address`` and ``http_address``, whoever started it."""

    address = http_address = ""
    channel = None

    def __enter__(self):
        self.channel = grpc.insecure_channel(self.address)
        self.raw = self.channel.unary_unary("/predictor.Predictor/Predict")
        return self

    def __exit__(self, *_):
        self.channel.close()

    def predict(self, message, **options):
        options.setdefault("timeout", TIMEOUT_S)
        return pb.PredictionResponse.FromString(self.raw(message.SerializeToString(), **options))

    def start(self, message, **options):
        """A call that is not waited for."""
        return self.raw.future(message.SerializeToString(), **options)

    def outcome(self, content):
        """Status name and details of a call with these bytes; details are empty for OK."""
        try:
            self.raw(content, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", ""

    def http(self, path):
        """Status and text of a page."""
        url = f"http://{self.http_address}{path}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def families(self):
        """The metrics page as parsed families by name."""
        text = self.http("/metrics")[1]
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name, **labels):
        """The sum of the samples called ``name`` whose labels include ``labels``."""
        wanted = labels.items()
        # The rest of the page, which is long, is not looked at.
        lines = [line for line in self.http("/metrics")[1].splitlines() if line.startswith(name)]
        return sum(
            sample.value
            for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines))
            for sample in family.samples
            if sample.name == name and wanted <= sample.labels.items()
        )

    def wait_for(self, condition):
        """Until ``condition()`` holds: for counts that follow an answer, not precede it.

        Most conditions ask the server; what takes long is asked for less and less often, but at least ten times a second.
        """
        deadline, pause = time.monotonic() + TIMEOUT_S, 0.01
        while not condition():
            assert time.monotonic() < deadline, "did not become true"
            time.sleep(pause)
            pause = min(1.3 * pause, 0.1)

    def settle(self):
        """Until every batch is counted: the C++ server counts a batch after its answers are on their way."""
        self.wait_for(lambda: self.value("tessera_inflight_batches") == 0)


class GivenServer(Server):
    """One that somebody else has started and will stop."""

    def __init__(self, address, http_address):
        self.address, self.http_address = address, http_address


class RunningServer(Server):
    """A server on free ports of a loopback address; ready inside the ``with`` block."""

    def __init__(self, kind, *flags, host="127.0.0.1", port=0):
        if kind == "given":
            pytest.skip("needs a server with flags of its own")
        self.kind = kind
        self._host = host
        self.log = []
        self.noise = []
        arguments = [*flags, "--host", host, "--port", port, "--http-port", 0]
        self.process = start_server(kind, arguments, stderr=subprocess.PIPE)
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                self.noise.append(line)
                continue
            self.log.append(entry)
            if entry["event"] == "ready":
                self.address = f"{self._host}:{entry['port']}"
                self.http_address = f"{self._host}:{entry['http_port']}"
                self._ready.set()
        self._ready.set()

    def __enter__(self):
        assert self._ready.wait(TIMEOUT_S)
        assert self.address, "".join(self.noise)
        return super().__enter__()

    def __exit__(self, *_):
        super().__exit__()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self._reader.join()
        self.process.stderr.close()
        # A build with sanitizers reports on stderr, at the latest when it ends.
        reports = [line for line in self.noise if "Sanitizer" in line or "runtime error" in line]
        assert not reports, "".join(self.noise)

    def kill(self):
        """End it with SIGKILL at any time, before it is ready too; there is nothing left to leave then."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()
        if self.channel is not None:
            self.channel.close()

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def exit_status(self):
        return self.process.wait(TIMEOUT_S)


def scores_of(response):
    return np.array(response.predictions["default"].data, "<f4")


def same_bits(a, b):
    return np.asarray(a, "<f4").tobytes() == np.asarray(b, "<f4").tobytes()


def i32(numbers):
    return np.asarray(numbers, "<i4").tobytes()


def i64(numbers):
    return np.asarray(numbers, "<i8").tobytes()


def f32(numbers):
    return np.asarray(numbers, "<f4").tobytes()
