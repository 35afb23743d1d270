"""The commits of `tessera.serving.bench.freshness`: made ahead, put into a log at their times, and looked for in answers."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import torch

from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.bench.processes import METHOD
from tessera.serving.commits.chain import LOG_FOLDER, commit_name
from tessera.serving.package.runner import HostBatch
from tessera.serving.protocol import predictor_pb2 as pb

_AWAY_S = 60.0
"""How long a call may wait for an answer."""

Answers = Mapping[int, Sequence[bytes]]
"""By the number of a commit, what the state after it answers to each request: the bytes of its score."""


def read_answer(content: bytes) -> tuple[int, bytes]:
    """The commit that an answer names, and the bytes of its scores, float32."""
    found = pb.PredictionResponse.FromString(content)
    scores = np.array(found.predictions["default"].data, np.float32)
    return found.model_commit, scores.tobytes()


def _batch(content: bytes) -> HostBatch:
    """The batch of a request whose ids have no weights."""
    request = pb.PredictionRequest.FromString(content)
    group, dense = request.id_list_features, request.float_features.values
    wide = bool(group.values_int64)
    ids = np.frombuffer(group.values_int64 if wide else group.values, "<i8" if wide else "<i4")
    lengths = np.frombuffer(group.lengths, "<i4")
    return HostBatch.of(
        torch.from_numpy(np.frombuffer(dense, "<f4").copy()).view(request.batch_size, -1),
        (torch.from_numpy(lengths.copy()), torch.from_numpy(ids.copy())),
    )


def _make(orders: Connection, folder: Path, requests: Sequence[bytes]) -> None:
    """A process that makes commits in the log of ``folder``, so many of so many rows as it is told; None ends it."""
    torch.set_num_threads(1)
    publisher = SyntheticPublisher(folder)
    batches = [_batch(request) for request in requests]

    def answers() -> list[bytes]:
        found = (publisher.state.forward(batch)["default"] for batch in batches)
        return [scores.detach().numpy().tobytes() for scores in found]

    orders.send({0: answers()})
    while (order := orders.recv()) is not None:
        count, rows = order
        made = {}
        for _ in range(count):
            path = publisher.publish(rows=rows, newest_example_s=time.time())
            made[int(path.name.partition(".")[0])] = answers()
        orders.send(made)


class CommitSource:
    """Makes commits of a version, in a process of its own and in another folder, and puts them into the version's log.

    What making them costs is so apart from what following them costs.

    Args:
        folder: of the version, where servers look.
        ahead: where the commits wait; with a copy of the package.
        requests: whose answers are known of each state.

    Attributes:
        right: the answers of the states of all commits so far.
        last: the number of the commit that was put in last.
        put_in_ns: when each was put in, nanoseconds of ``CLOCK_MONOTONIC``.
    """

    def __init__(self, folder: Path, ahead: Path, requests: Sequence[bytes]) -> None:
        self._log, self._ahead = folder / LOG_FOLDER, ahead / LOG_FOLDER
        self._log.mkdir()
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_make, args=(theirs, ahead, requests))
        self._process.start()
        self.right: dict[int, list[bytes]] = self._orders.recv()
        self.last = 0
        self.put_in_ns: dict[int, int] = {}

    def prepare(self, count: int, rows: int) -> int:
        """Have ``count`` more commits of ``rows`` rows; returns the bytes of the last one's file."""
        self._orders.send((count, rows))
        self.right |= self._orders.recv()
        return (self._ahead / commit_name(max(self.right))).stat().st_size

    def put_in(self) -> None:
        """The next commit appears, whole, in the log."""
        name = commit_name(self.last + 1)
        os.link(self._ahead / name, self._log / name)
        self.put_in_ns[self.last + 1] = time.monotonic_ns()
        (self._ahead / name).unlink()
        self.last += 1

    @contextmanager
    def putting_in(self, every_s: float) -> Iterator[None]:
        """Inside the block one commit after the other appears, at most as many as there are."""
        end = threading.Event()

        def run() -> None:
            due = time.monotonic()
            while not end.wait(max(0.0, due - time.monotonic())) and self.last < max(self.right):
                self.put_in()
                due += every_s

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def close(self) -> None:
        """End the process."""
        self._orders.send(None)
        self._process.join()


class Watcher:
    """Sends one call after the other, and notes when each commit was answered with first; a context.

    Attributes:
        seen_ns: by the number of a commit, when it was seen first, nanoseconds of ``CLOCK_MONOTONIC``.
        now: the commit of the last answer.
    """

    def __init__(self, address: str, request: bytes) -> None:
        self.seen_ns: dict[int, int] = {}
        self.now = 0
        self._end = threading.Event()
        self._channel = grpc.insecure_channel(address)
        self._call = self._channel.unary_unary(METHOD, None, pb.PredictionResponse.FromString)
        self._request = request
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.is_set():
            commit = self._call(self._request, timeout=_AWAY_S).model_commit
            self.seen_ns.setdefault(commit, time.monotonic_ns())
            self.now = commit

    def wait_for(self, commit: int, limit_s: float = 120.0) -> None:
        """Return when ``commit`` was answered with, or after so many seconds."""
        until = time.monotonic() + limit_s
        while self.now != commit and time.monotonic() < until:
            time.sleep(0.001)

    def __enter__(self) -> Watcher:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._channel.close()
