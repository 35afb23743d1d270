"""The commits of `tessera.serving.bench.freshness`: made before anything is measured, put into logs at their times, looked for in answers."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import grpc
import numpy as np
import torch

from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.bench.processes import METHOD
from tessera.serving.bench.reload_servers import TOLERANCE
from tessera.serving.commits.chain import LOG_FOLDER, commit_name
from tessera.serving.commits.file import ReadCommit, read_commit
from tessera.serving.package.loading import Loading
from tessera.serving.package.runner import HostBatch
from tessera.serving.protocol import predictor_pb2 as pb

_AWAY_S = 60.0
"""How long a call may wait for an answer."""

Answers = Mapping[int, Sequence[frozenset[bytes]]]
"""By the number of a commit, what the state after it may answer to each request: the bytes of its score.

On a CPU that is one answer. A GPU's has other bits in a batch of another size, so there it is one for each size.
"""


def read_answer(content: bytes) -> tuple[int, bytes]:
    """The commit that an answer names, and the bytes of its scores, float32."""
    found = pb.PredictionResponse.FromString(content)
    scores = np.array(found.predictions["default"].data, np.float32)
    return found.model_commit, scores.tobytes()


class Verdict(Enum):
    """What an answer is: right bit by bit, right up to `TOLERANCE`, or neither."""

    RIGHT = "right"
    NEAR = "near"
    WRONG = "wrong"


class Judge:
    """Holds answers against the right ones of the commits that they name; the same answer is read once.

    Args:
        right: the right answers.
        bits: whether only the same bits are right. On a GPU they depend on the batch and on the way in which its kernels
            were chosen, so there an answer may differ by `TOLERANCE`.
    """

    def __init__(self, right: Answers, *, bits: bool) -> None:
        self._right, self._bits = right, bits
        self._known: dict[tuple[int, bytes], Verdict] = {}

    def verdict(self, request: int, answer: bytes) -> Verdict:
        """What the answer to a request is."""
        key = (request, answer)
        if key not in self._known:
            self._known[key] = self._verdict(request, *read_answer(answer))
        return self._known[key]

    def _verdict(self, request: int, commit: int, scores: bytes) -> Verdict:
        right = self._right[commit][request] if commit in self._right else frozenset()
        if scores in right:
            return Verdict.RIGHT
        near = not self._bits and any(_close(scores, one) for one in right)
        return Verdict.NEAR if near else Verdict.WRONG


def _close(scores: bytes, right: bytes) -> bool:
    """Whether scores, float32, are as many and the same up to `TOLERANCE`."""
    one, other = (np.frombuffer(content, np.float32) for content in (scores, right))
    return len(one) == len(other) and np.allclose(one, other, rtol=0, atol=TOLERANCE)


def _batch(contents: Sequence[bytes]) -> HostBatch:
    """Requests of one sample each, whose ids have no weights, as one batch."""
    dense, lengths, ids = [], [], []
    for content in contents:
        request = pb.PredictionRequest.FromString(content)
        group = request.id_list_features
        wide = bool(group.values_int64)
        values = np.frombuffer(
            group.values_int64 if wide else group.values, "<i8" if wide else "<i4"
        )
        own = np.frombuffer(group.lengths, "<i4")
        dense.append(np.frombuffer(request.float_features.values, "<f4"))
        lengths.append(own)
        ids.append(np.split(values, np.cumsum(own)[:-1]))
    # Of all samples the first feature, then the second, ...
    by_feature = [one[feature] for feature in range(len(lengths[0])) for one in ids]
    return HostBatch.of(
        torch.from_numpy(np.stack(dense)),
        (
            torch.from_numpy(np.stack(lengths, axis=1).reshape(-1).copy()),
            torch.from_numpy(np.concatenate(by_feature).copy()),
        ),
    )


class State(Protocol):
    """A package with the commits so far."""

    def forward(self, batch: HostBatch) -> Mapping[str, torch.Tensor]:
        """What it answers."""


class PatchedByTorch:
    """A package on a device, such as a GPU, patched by torch's own operators."""

    def __init__(self, path: Path, device: str) -> None:
        loading = Loading(path, devices=[device], patchable=True)
        loading.read()
        loading.build()
        loading.settle(verify_golden=True)
        self._memory = loading.patchable_memory()
        self._runner = loading.runner

    def apply(self, read: ReadCommit) -> None:
        """Take a commit, which is the next one."""
        for patch in read.commit.patches:
            new = torch.from_numpy(read.new_bytes(patch))
            rows = read.rows(patch)
            for memory in self._memory[patch.record]:
                last = patch.count if rows is None else int(rows[-1]) + 1
                table = memory.as_strided(
                    (last, patch.width), (patch.stride, 1), memory.storage_offset() + patch.offset
                )
                where = torch.arange(patch.count) if rows is None else torch.from_numpy(rows)
                table.index_copy_(0, where.to(memory.device), new.to(memory.device))

    def forward(self, batch: HostBatch) -> Mapping[str, torch.Tensor]:
        """What it answers."""
        return self._runner.forward(batch)


class Answering:
    """Asks a state all requests.

    Args:
        requests: of one sample each.
        sizes: of the batches that each of them is asked in.
    """

    def __init__(self, requests: Sequence[bytes], sizes: Sequence[int]) -> None:
        count = len(requests)
        self._count = count
        self._asked = []
        for size in sizes:
            for begin in range(0, count, size):
                places = [place % count for place in range(begin, begin + size)]
                self._asked.append((places, _batch([requests[place] for place in places])))

    def answers(self, state: State) -> list[frozenset[bytes]]:
        """What the state answers to each."""
        found: list[set[bytes]] = [set() for _ in range(self._count)]
        for places, batch in self._asked:
            scores = state.forward(batch)["default"].detach().cpu().numpy()
            for place, score in zip(places, scores, strict=True):
                found[place].add(score.tobytes())
        return [frozenset(one) for one in found]


def _publish(
    orders: Connection, numbers: Connection | None, folder: Path, requests: Sequence[bytes]
) -> None:
    """A process that makes commits in the log of ``folder``, so many of so many rows as it is told; None ends it.

    It gives the answers of each state, or where ``numbers`` is there those of the commits to it, for which another process answers.
    """
    torch.set_num_threads(1)
    publisher = SyntheticPublisher(folder)
    asking = Answering(requests, (1,))
    if numbers is None:
        orders.send({0: asking.answers(publisher.state)})
    while (order := orders.recv()) is not None:
        count, rows = order
        made = {}
        for _ in range(count):
            publisher.publish(rows=rows, newest_example_s=time.time())
            number = publisher.state.log.number
            if numbers is None:
                made[number] = asking.answers(publisher.state)
            else:
                numbers.send(number)
        if numbers is None:
            orders.send(made)


def _answer_on(
    orders: Connection,
    numbers: Connection,
    folder: Path,
    requests: Sequence[bytes],
    *,
    gpu: str,
    largest_batch: int,
) -> None:
    """A process that gives what ``gpu`` answers to commits as they are made, to so many as it is told; None ends it."""
    torch.set_num_threads(1)
    mirror = PatchedByTorch(folder / "model.pt", gpu)
    asking = Answering(requests, range(1, largest_batch + 1))
    orders.send({0: asking.answers(mirror)})
    while (order := orders.recv()) is not None:
        count, _ = order
        made = {}
        for _ in range(count):
            number = numbers.recv()
            mirror.apply(read_commit(folder / LOG_FOLDER / commit_name(number)))
            made[number] = asking.answers(mirror)
        orders.send(made)


class CommitMaker:
    """Makes commits of a version, in processes of their own, before any server is measured; a context.

    What making them costs is so apart from what following them costs, and several servers follow the same log.

    Args:
        folder: ``MODEL/VERSION``, with the package, where the commits wait.
        requests: of one sample each, whose answers are known of each state.
        gpu: where the answers are computed, such as ``cuda:0``; None: on the CPU.
        largest_batch: with ``gpu``, what the server may answer together at most.

    Attributes:
        right: the answers of the states of all commits so far.
        bytes: of the file of each commit, by its number.
    """

    def __init__(
        self, folder: Path, requests: Sequence[bytes], *, gpu: str | None, largest_batch: int
    ) -> None:
        self._log = folder / LOG_FOLDER
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[tuple[Connection, BaseProcess]] = []
        if gpu is None:
            self._start(_publish, None, folder, requests)
        else:
            reads, writes = self._context.Pipe(duplex=False)
            with reads, writes:  # whose ends are the two processes'
                self._start(_publish, writes, folder, requests)
                self._start(
                    _answer_on, reads, folder, requests, gpu=gpu, largest_batch=largest_batch
                )
        self._answers = self._processes[-1][0]
        self.right: dict[int, list[frozenset[bytes]]] = self._answers.recv()
        self.bytes: dict[int, int] = {}

    def _start(self, target: Callable[..., None], *args: object, **named: object) -> None:
        """A process that is given its orders by a pipe."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=target, args=(theirs, *args), kwargs=named, daemon=True
        )
        process.start()
        theirs.close()  # so that its end is seen here
        self._processes.append((ours, process))

    def make(self, count: int, rows: int) -> range:
        """Make ``count`` more commits of ``rows`` rows each; returns their numbers."""
        for orders, _ in self._processes:
            orders.send((count, rows))
        made = self._answers.recv()
        self.right |= made
        self.bytes |= {one: (self._log / commit_name(one)).stat().st_size for one in made}
        return range(min(made, default=0), max(made, default=-1) + 1)

    def __enter__(self) -> CommitMaker:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        for orders, process in self._processes:
            orders.send(None)
            process.join()


class CommitFeed:
    """Puts commits that are there into the log of one server, one after the other.

    Args:
        made: the log's folder in which they wait.
        log: that of the server's version; made here.

    Attributes:
        last: the number of the commit that was put in last.
        put_in_ns: when each was put in, nanoseconds of ``CLOCK_MONOTONIC``.
    """

    def __init__(self, made: Path, log: Path) -> None:
        self._made, self._log = made, log
        log.mkdir()
        self.last = 0
        self.put_in_ns: dict[int, int] = {}

    def put_in(self) -> None:
        """The next commit appears, whole, in the log."""
        name = commit_name(self.last + 1)
        os.link(self._made / name, self._log / name)
        self.put_in_ns[self.last + 1] = time.monotonic_ns()
        self.last += 1
        self._fetch(self._made / commit_name(self.last + 1))

    @staticmethod
    def _fetch(path: Path) -> None:
        """Have the file of the next one in the page cache, as that of a commit which was written just now is."""
        if path.exists():
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def putting_in(self, every_s: float, until: int) -> Iterator[None]:
        """Inside the block one commit after the other appears, up to the one called ``until``."""
        end = threading.Event()

        def run() -> None:
            due = time.monotonic()
            while not end.wait(max(0.0, due - time.monotonic())) and self.last < until:
                self.put_in()
                due += every_s

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()


class Watcher:
    """Sends one call after the other, and notes when each commit was answered with first; a context.

    Attributes:
        seen_ns: by the number of a commit, when it was seen first, nanoseconds of ``CLOCK_MONOTONIC``.
        now: the commit of the last answer.
        back: answers that named an earlier commit than the answer before them.
    """

    def __init__(self, address: str, request: bytes) -> None:
        self.seen_ns: dict[int, int] = {}
        self.now = 0
        self.back = 0
        self._end = threading.Event()
        self._channel = grpc.insecure_channel(address)
        self._call = self._channel.unary_unary(METHOD, None, pb.PredictionResponse.FromString)
        self._request = request
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.is_set():
            commit = self._call(self._request, timeout=_AWAY_S).model_commit
            self.seen_ns.setdefault(commit, time.monotonic_ns())
            self.back += commit < self.now
            self.now = commit

    def wait_for(self, commit: int, limit_s: float = 120.0) -> None:
        """Return when ``commit`` was answered with.

        Raises:
            TimeoutError: it was not in so many seconds.
        """
        until = time.monotonic() + limit_s
        while self.now != commit:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"no answer of commit {commit} in {limit_s:.0f} s, still of {self.now}"
                )
            time.sleep(0.001)

    def __enter__(self) -> Watcher:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._channel.close()
