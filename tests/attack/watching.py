"""The polite client beside a flood, and what the server's process holds meanwhile."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections import Counter
from pathlib import Path

import grpc

from tessera.serving.protocol import predictor_pb2
from tests.patience import PATIENCE_S

PREDICT = "/predictor.Predictor/Predict"


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds: resident bytes, open descriptors, threads."""

    resident_bytes: int
    descriptors: int
    threads: int


def footprint(pid: int) -> Footprint:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Footprint(
        1024 * int(status["VmRSS"].split()[0]),
        len(list(Path(f"/proc/{pid}/fd").iterdir())),
        int(status["Threads"]),
    )


class Peak:
    """Looks at a process ten times a second while it is entered, and keeps the most that it saw."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self.most = self.before = footprint(pid)

    def __enter__(self):
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            try:
                now = footprint(self._pid)
            except (OSError, KeyError):  # it has ended
                return
            self.most = Footprint(
                *(map(max, dataclasses.astuple(self.most), dataclasses.astuple(now)))
            )


def scores(answer: bytes) -> dict[str, list[float]]:
    """An answer's scores by output, without the timings beside them."""
    message = predictor_pb2.PredictionResponse.FromString(answer)
    return {name: list(vector.data) for name, vector in message.predictions.items()}


class PoliteClient:
    """Sends the same request at a steady rate over one connection and compares every answer.

    Requests go out when they are due, whether or not those before were answered, so that a server that stands
    still is seen as slow by every call that it delayed.

    The first answer, got before the flood, is what every later one must equal bit for bit. ``lives`` says whether
    the server is still there: its end ends the wait for that answer.
    """

    def __init__(self, address, request, *, rate=50.0, timeout_s=PATIENCE_S, lives=lambda: True):
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._call = self._channel.unary_unary(PREDICT)
        self._request = request
        self._rate, self._timeout_s = rate, timeout_s
        self._expected = scores(self._first_answer(lives))
        self.latencies_s: list[float] = []
        self.ends: Counter[str] = Counter()
        self._open = threading.Semaphore(0)
        self._lock = threading.Lock()

    def close(self):
        self._channel.close()

    def _first_answer(self, lives):
        done = threading.Event()
        first = self._call.future(self._request, timeout=self._timeout_s, wait_for_ready=True)
        first.add_done_callback(lambda _: done.set())
        while not done.wait(1):
            if not lives():
                raise ConnectionError("the server has ended")
        return first.result()

    def _done(self, began, call):
        took = time.monotonic() - began
        if call.code() is not grpc.StatusCode.OK:
            end = f"{call.code().name}: {call.details()}"
        else:
            end = "OK" if scores(call.result()) == self._expected else "other scores"
        with self._lock:
            self.latencies_s.append(took)
            self.ends[end] += 1
        self._open.release()

    def run(self, until):
        """Sends until ``until()`` says so, then waits for every answer."""
        sent, due = 0, time.monotonic()
        while not until():
            time.sleep(max(0.0, due - time.monotonic()))
            call = self._call.future(self._request, timeout=self._timeout_s)
            call.add_done_callback(lambda done, began=due: self._done(began, done))
            sent += 1
            due += 1 / self._rate
        for _ in range(sent):
            self._open.acquire()

    def quantile_s(self, share):
        """The latency below which ``share`` of the calls stayed."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def median_s(self):
        return statistics.median(self.latencies_s)
