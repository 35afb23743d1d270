"""Calls a server without end from a process of its own, with faults of the client's own, and tells how calls ended.

``python -m tests.attack.calling --address HOST:PORT --answers FILE`` writes a JSON object to stdout every second until
its stdin is closed: under ``ends`` how calls have ended since the last one, and under ``hung_up`` when (seconds of
``time.monotonic``) a connection ended under a call.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import threading
import time
from pathlib import Path

import grpc

from tests.attack.watching import PREDICT, scores

IN_FLIGHT = 32
TIMEOUT_S = 120.0
TELL_S = 1.0
OK = "answered rightly"
LOST, WRONG = "LOST", "WRONG"
REFUSALS = (
    "draining",
    "still loading",
    "Connection refused",
    "connections to all backends failing",
    # Perhaps with "Socket closed" behind it: a server without a descriptor for one more connection closes it at once.
    "failed to connect to all addresses",
    "GOAWAY",
)
"""What UNAVAILABLE says of a call that the server did not accept."""
HUNG_UP = ("Socket closed", "Broken pipe", "Connection reset")
"""What it says when the connection ended under a call, whether that was accepted or not."""


def kind_of_unavailable(details):
    """Why a call ended as UNAVAILABLE: "not accepted", "hung up", or None where nothing explains it."""
    if any(word in details for word in REFUSALS):
        return "not accepted"
    return "hung up" if any(word in details for word in HUNG_UP) else None


def read_answers(path):
    """Each request's bytes and right scores by output."""
    return [
        (bytes.fromhex(one["request"]), one["scores"])
        for one in json.loads(Path(path).read_text(encoding="utf-8"))
    ]


def write_answers(path, answers):
    """Write what `read_answers` reads."""
    content = [{"request": request.hex(), "scores": right} for request, right in answers]
    Path(path).write_text(json.dumps(content), encoding="utf-8")


class Caller:
    """Calls in rounds of `IN_FLIGHT`; some are cancelled at once and some have a deadline too short."""

    def __init__(self, address, answers, seed):
        self._draw = random.Random(seed)
        self._address, self._answers = address, answers
        self._ends = collections.Counter()
        self._hung_up = []
        self._connect()

    def _connect(self):
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        self._channel = grpc.insecure_channel(self._address, options=options)
        self._call = self._channel.unary_unary(PREDICT)

    def _start(self):
        request, right = self._draw.choice(self._answers)
        fault = self._draw.choices(["none", "deadline", "cancel"], [95, 3, 2])[0]
        timeout = self._draw.uniform(0, 0.01) if fault == "deadline" else TIMEOUT_S
        call = self._call.future(request, timeout=timeout)
        if fault == "cancel":
            call.cancel()
        return right, fault, call

    def _end(self, right, fault, call):
        try:
            answer = call.result()
        except grpc.FutureCancelledError:
            return "cancelled by the client"
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and fault == "deadline":
                return "past the client's short deadline"
            if code is grpc.StatusCode.UNAVAILABLE:
                kind = kind_of_unavailable(details)
                if kind == "not accepted":
                    time.sleep(0.002)
                    return kind
                if kind == "hung up":
                    self._hung_up.append(time.monotonic())
                    return None
            return f"{LOST}: {code.name}: {details}"
        return OK if scores(answer) == right else f"{WRONG} scores"

    def turn(self):
        """One round, and now and then another connection."""
        for started in [self._start() for _ in range(IN_FLIGHT)]:
            if (end := self._end(*started)) is not None:
                self._ends[end] += 1
        if self._draw.random() < 0.01:
            self._channel.close()
            self._connect()

    def tell(self):
        """Print how calls have ended since the last time."""
        print(json.dumps({"ends": self._ends, "hung_up": self._hung_up}), flush=True)
        self._ends.clear()
        self._hung_up.clear()

    def close(self):
        self._channel.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--address", required=True, help="HOST:PORT of the gRPC port")
    parser.add_argument("--answers", type=Path, required=True, help="of `write_answers`")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults")
    given = parser.parse_args()
    stopped = threading.Event()

    def wait_for_end():
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    caller = Caller(given.address, read_answers(given.answers), given.seed)
    told = time.monotonic()
    while not stopped.is_set():
        caller.turn()
        if time.monotonic() - told > TELL_S:
            caller.tell()
            told = time.monotonic()
    caller.close()
    caller.tell()
    return 0


if __name__ == "__main__":
    sys.exit(main())
