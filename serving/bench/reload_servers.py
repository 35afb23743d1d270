"""The packages, requests and servers of `tessera.serving.bench.reloads`."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from tessera.durable import replacing
from tessera.serving.bench.call_records import CallRun
from tessera.serving.bench.large_package import make_large
from tessera.serving.bench.processes import LOADER, METHOD
from tessera.serving.client import (
    Draw,
    RepositoryClient,
    RequestDrawer,
    encode_request,
    read_schema,
)
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.background import ServerProcess

if TYPE_CHECKING:
    from typing_extensions import Self

MODEL = "dlrm"
DISTINCT = 256
_PROGRAMS = {
    "cpp": [str(LOADER.with_name("tessera-server"))],
    "python": [sys.executable, "-m", "tessera", "serve"],
}
_START_S = 300.0
TOLERANCE = 1e-6
"""By how much a score of a peer or of a GPU may differ from the one that it gave to the same request alone."""

_TIMINGS = pb.PredictionResponse(timings=pb.StageTimings()).SerializeToString()[:-1]
"""What begins the timings of an answer, before their size."""

Answer = tuple[str, bytes]
"""The version that an answer names, and its scores' bytes."""


def make_versions(
    folder: Path, gigabytes: float, device: str = "cpu", shards: int = 1, count: int = 2
) -> list[Path]:
    """Packages of the same schema with other rows, for the CPU or ``cuda``; those that are there are taken."""
    return [
        make_large(folder, gigabytes, name=MODEL, device=device, seed=seed, shards=shards)
        for seed in range(count)
    ]


def write_requests(path: Path, package: Path, count: int = DISTINCT) -> Path:
    """Requests of one sample for a package, each after its size."""
    drawer = RequestDrawer(read_schema(package), Draw(ids="uniform"), seed=1)
    contents = [encode_request(drawer.samples(1)) for _ in range(count)]
    path.write_bytes(b"".join(struct.pack("<I", len(one)) + one for one in contents))
    return path


def read_requests(path: Path) -> list[bytes]:
    """The requests that `write_requests` wrote."""
    content, found, at = path.read_bytes(), [], 0
    while at < len(content):
        (size,) = struct.unpack_from("<I", content, at)
        found.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    return found


class Reloading(ABC):
    """A server that runs while it is entered, whose model is one of some versions.

    Attributes:
        versions: how many.
        name: what it is called in the table.
        method: that of its requests.
        request_file: they, as ``tessera-load`` reads them.
        address: its gRPC port, once it is entered.
        pid: its process, likewise.
    """

    name = ""
    method = METHOD
    address = ""
    pid = 0
    versions = 2

    def __init__(self, request_file: Path) -> None:
        self.request_file = request_file
        self.requests = read_requests(request_file)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._start()
        channel = self._stack.enter_context(grpc.insecure_channel(self.address))
        self._call = channel.unary_unary(self.method, None, None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def ask(self, request: bytes) -> bytes:
        """The answer to one call."""
        return bytes(self._call(request, timeout=_START_S))

    @abstractmethod
    def _start(self) -> None:
        """Start it, and wait until it is ready."""

    @abstractmethod
    def reload(self) -> None:
        """Let the next version answer, behind the last one the first; returns when it does and the one before is gone."""

    @abstractmethod
    def read(self, answer: bytes) -> Answer:
        """What an answer holds."""

    def told(self, run: CallRun) -> Iterator[CallRun]:
        """The calls of ``run``, with answers that `read` takes and that are the same where the same was told."""
        yield run

    def is_right(self, answer: Answer, right: Sequence[Answer]) -> bool:
        """Whether it is one of the ``right`` ones, bit by bit."""
        return answer in right


class ReloadingServer(Reloading):
    """One of ours, with a repository of all versions of which one is loaded.

    Args:
        kind: ``cpp`` or ``python``.
        folder: where its repository is made, anew.
        versions: the packages of versions 1, 2, ...
        requests: see `Reloading`.
        control: ``explicit`` (calls) or ``poll`` (serving.yaml).
        flags: more of them, for the server.
        bits: whether the same request has the same answer in each batch, bit by bit, which a GPU does not promise.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        versions: Sequence[Path],
        requests: Path,
        control: str,
        *,
        flags: Sequence[str] = (),
        bits: bool = True,
    ) -> None:
        super().__init__(requests)
        self._flags, self._bits = flags, bits
        self.name = {"cpp": "tessera-server", "python": "tessera serve"}[kind]
        self._program, self._control = _PROGRAMS[kind], control
        self._model = folder / f"repository-{kind}" / MODEL
        shutil.rmtree(self._model.parent, ignore_errors=True)
        for number, package in enumerate(versions, 1):
            place = self._model / str(number)
            place.mkdir(parents=True)
            os.link(package, place / "model.pt")
        self.versions = len(versions)
        self._now = 1
        self._choose(1)

    def _choose(self, version: int) -> None:
        with replacing(self._model / "serving.yaml") as stream:
            stream.write(f"versions: [{version}]\n".encode())

    def _start(self) -> None:
        flags = ["--model-repository", str(self._model.parent), "--model-control", self._control]
        flags += ["--poll-s", "0.2", *self._flags]
        server = self._stack.enter_context(ServerProcess(flags, self._program))
        self.address, self.pid = server.address, server.process.pid
        self._repository = self._stack.enter_context(
            RepositoryClient(self.address, timeout_s=_START_S)
        )

    def reload(self) -> None:
        """See `Reloading`."""
        before, self._now = self._now, self._now % self.versions + 1
        if self._control == "poll":
            self._choose(self._now)
            while self._states() != {str(self._now)}:
                time.sleep(0.05)
        else:
            self._repository.load(MODEL, version=self._now)
            self._repository.unload(MODEL, version=before)

    def _states(self) -> set[str]:
        return {row.version for row in self._repository.index() if row.state != "UNAVAILABLE"}

    def read(self, answer: bytes) -> Answer:
        """See `Reloading`."""
        found = pb.PredictionResponse.FromString(answer)
        scores = np.array(found.predictions["default"].data, np.float32)
        return found.model_version, scores.tobytes()

    def told(self, run: CallRun) -> Iterator[CallRun]:
        """See `Reloading`: without the timings, which differ from call to call and come last."""
        answers, size = run.answers, run.answers.shape[1]
        answered = np.flatnonzero(run.code == 0)
        told = _without_timings(answers[answered[0]].tobytes()) if len(answered) else size
        if told + len(_TIMINGS) < size:
            tag = np.frombuffer(_TIMINGS, np.uint8)
            rest = answers[:, told + len(tag)]  # how many bytes the timings have, if they are few
            alike = (answers[:, told : told + len(tag)] == tag).all(1)
            alike &= rest == size - told - len(tag) - 1
            yield run.where(alike, told)
            run = run.where(~alike, size)
        yield run

    def is_right(self, answer: Answer, right: Sequence[Answer]) -> bool:
        """Whether it is what the version that it names gave before: bit by bit, or on a GPU up to `TOLERANCE`."""
        return answer in right or (not self._bits and _close(answer, right))


class ReloadingPeer(Reloading):
    """Another server with KServe's calls; see the module for what describes it."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        super().__init__(Path(described["requests"]))
        self.name, self.method = described["name"], described["method"]
        self._described = described
        self.versions = len(described["versions"])
        self._now = 0

    def _start(self) -> None:
        described = self._described
        self._place(0)
        with closing(socket.socket()) as one, closing(socket.socket()) as two:
            for each in (one, two):
                each.bind(("127.0.0.1", 0))
            port, http_port = one.getsockname()[1], two.getsockname()[1]
        command = [part.format(port=port, http_port=http_port) for part in described["command"]]
        process = subprocess.Popen(
            command,
            env={**os.environ, **described.get("environment", {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        self.address, self.pid = f"127.0.0.1:{port}", process.pid
        channel = self._stack.enter_context(grpc.insecure_channel(self.address))
        self._load = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryModelLoad", None, None
        )
        call = channel.unary_unary(self.method, None, None)
        call(self.requests[0], timeout=_START_S, wait_for_ready=True)

    def _place(self, version: int) -> None:
        """Put one of the files in the model's place, as a file that has changed."""
        place = Path(self._described["file"])
        draft = place.with_name(".draft")
        draft.unlink(missing_ok=True)
        os.link(self._described["versions"][version], draft)
        os.utime(draft)
        draft.replace(place)

    def reload(self) -> None:
        """See `Reloading`."""
        self._now = (self._now + 1) % self.versions
        self._place(self._now)
        request = ipb.RepositoryModelLoadRequest(model_name=self._described["model"])
        self._load(request.SerializeToString(), timeout=_START_S)

    def read(self, answer: bytes) -> Answer:
        """See `Reloading`."""
        return "", ipb.ModelInferResponse.FromString(answer).raw_output_contents[0]

    def is_right(self, answer: Answer, right: Sequence[Answer]) -> bool:
        """Whether its scores are those of one of the files, up to `TOLERANCE`."""
        return answer in right or _close(answer, right)


def _without_timings(answer: bytes) -> int:
    """How many bytes the answer of one of ours has beside its timings."""
    found = pb.PredictionResponse.FromString(answer)
    found.ClearField("timings")
    return found.ByteSize()


def _close(answer: Answer, right: Sequence[Answer]) -> bool:
    """Whether the scores are those of a right answer of the same version, up to `TOLERANCE`."""
    scores = np.frombuffer(answer[1], np.float32)
    return any(
        version == answer[0]
        and np.allclose(scores, np.frombuffer(each, np.float32), rtol=0, atol=TOLERANCE)
        for version, each in right
    )
