"""A repository of small packages, a server process for it, and clients that check every answer."""

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import grpc
import numpy as np

from tessera.serving.client import RequestDrawer, read_schema
from tessera.serving.client.encode import encode_request
from tessera.serving.package.loading import load_package
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import inference_pb2_grpc
from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import RunningServer
from tests.conformance.test_answers import run_in_process
from tests.patience import PATIENCE_S
from tests.server.server_harness import parse_metrics


def put(package, model, version):
    """Let ``package`` appear as a version, by rename."""
    hidden = model / f".{version}"
    hidden.mkdir(parents=True)
    shutil.copyfile(package, hidden / "model.pt")
    hidden.rename(model / str(version))


def wait_until(holds):
    """Wait until ``holds()``."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


class Answers:
    """What each package gives for a few messages."""

    def __init__(self, packages):
        first, *_ = packages.values()
        drawer = RequestDrawer(read_schema(first), seed=3)
        self.messages = [
            pb.PredictionRequest.FromString(encode_request(drawer.samples(count)))
            for count in (1, 3, 20)
        ]
        self.expected = {}
        for version, package in packages.items():
            loaded = load_package(package)
            self.expected[str(version)] = [
                run_in_process(loaded, message).tobytes() for message in self.messages
            ]

    def request(self, number, **fields):
        message = pb.PredictionRequest()
        message.CopyFrom(self.messages[number])
        for name, value in fields.items():
            setattr(message, name, value)
        return message

    def check(self, number, response):
        """The version that answered, whose bits the answer has."""
        scores = np.asarray(response.predictions["default"].data, np.float32)
        version = response.model_version
        assert scores.tobytes() == self.expected[version][number], version
        return version


class Repository:
    """A server process with one repository, and calls to it."""

    def __init__(self, server):
        self.server = server
        self.channel = grpc.insecure_channel(server.address)
        self._predict = self.channel.unary_unary("/predictor.Predictor/Predict")
        self._kserve = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def predict(self, message, **options):
        options.setdefault("timeout", PATIENCE_S)
        content = self._predict(message.SerializeToString(), **options)
        return pb.PredictionResponse.FromString(content)

    def refused(self, message, **options):
        try:
            self.predict(message, **options)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError("the server answered")

    def index(self):
        """Version to (state, reason) of the one model."""
        found = self._kserve.RepositoryIndex(ipb.RepositoryIndexRequest(), timeout=PATIENCE_S)
        return {row.version: (row.state, row.reason) for row in found.models}

    def wait(self, holds):
        """Wait until ``holds(index)``; returns the index."""
        wait_until(lambda: holds(self.index()))
        return self.index()

    def call(self, name, model, **parameters):
        """A repository call; None, or the code and text of its refusal."""
        kind = {"load": ipb.RepositoryModelLoadRequest, "unload": ipb.RepositoryModelUnloadRequest}
        request = kind[name](model_name=model)
        for key, given in parameters.items():
            field = "int64_param" if isinstance(given, int) else "string_param"
            setattr(request.parameters[key], field, given)
        method = {
            "load": self._kserve.RepositoryModelLoad,
            "unload": self._kserve.RepositoryModelUnload,
        }[name]
        try:
            method(request, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return None

    def post(self, path, body=b"", **headers):
        """Status and body of a POST."""
        url = f"http://{self.server.http_address}{path}"
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def page(self, path):
        url = f"http://{self.server.http_address}{path}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            return reply.read().decode()

    def metrics(self):
        return parse_metrics(self.page("/metrics"))


@contextmanager
def serving(folder, *flags):
    """A server of the repository ``folder`` that drains at the end."""
    arguments = ["--model-repository", folder, "--drain-propagation-ms", 0, *flags]
    with RunningServer("python", *arguments) as server:
        yield Repository(server)


class Load:
    """Clients that ask all the time and check every answer."""

    def __init__(self, repository, answers, clients=3):
        self._repository = repository
        self._answers = answers
        self._stop = threading.Event()
        self.versions = set()
        self.count = 0
        self.failures = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def _run(self, seed):
        draw = np.random.default_rng(seed)
        while not self._stop.is_set():
            number = int(draw.integers(len(self._answers.messages)))
            try:
                response = self._repository.predict(self._answers.messages[number])
                self.versions.add(self._answers.check(number, response))
                self.count += 1
            except (grpc.RpcError, AssertionError) as failure:
                self.failures.append(repr(failure))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


def rows_of(text):
    """An index over HTTP as version to (state, reason)."""
    return {row["version"]: (row["state"], row.get("reason", "")) for row in json.loads(text)}
