"""Clients of `tests.attack.lives`: processes that call random models and check each answer against the version it names."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from tessera.serving.protocol import predictor_pb2 as pb
from tests.attack.certain import Call, Calls
from tests.attack.watching import PREDICT, scores

IN_FLIGHT = 16
TIMEOUT_S = 60.0
TELL_S = 0.5
OK, AWAY = "answered rightly", "not there"
TOLD = "told rightly which versions there are"
BARE = "told rightly which version is wanted and not there"
REFUSED = "a steady model refused"
"""Right for a server that is starting, which who started it knows; LOST otherwise."""
LOST, WRONG = "LOST", "WRONG"
LABELS = ("stable", "canary")
_UNKNOWN = re.compile(
    r"model_version '(?P<asked>[^']*)' of model '(?P<model>[^']*)' is unknown; "
    r"(?:none is loaded|there is version (?P<there>'[^']*'(?:, '[^']*')*)(?: and label (?P<labels>.*))?)"
)
_MISSING = re.compile(
    r"version '(?P<version>[0-9]+)' of model '(?P<model>[^']*)' "
    r"(?:is still loading|is not in its folder|could not be loaded; the repository's index says why)"
)
_NO_MODEL = re.compile(r"model_name '(?P<asked>[^']*)' is unknown; this server has (?P<there>.*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What clients know: it never changes.

    Attributes:
        address: the server's.
        contents: which package each version of each model is a copy of, by model and version.
        requests: each request's bytes without model and version.
        right: by package, each request's scores by output.
        steady: models that always answer requests without a version.
    """

    address: str
    contents: Mapping[str, Mapping[int, str]]
    requests: Sequence[bytes]
    right: Mapping[str, Sequence[Mapping[str, list[float]]]]
    steady: frozenset[str]

    def message(self, turn: int, model: str, version: str = "", key: str = "") -> bytes:
        """Request ``turn`` for a model; messages of protobuf may be joined."""
        who = pb.PredictionRequest(model_name=model, model_version=version, traffic_key=key)
        return self.requests[turn] + who.SerializeToString()

    @staticmethod
    def version_of(answer: bytes) -> str:
        """The version that an answer names."""
        return pb.PredictionResponse.FromString(answer).model_version

    def fault(self, turn: int, model: str, version: str, answer: bytes) -> str:
        """What is wrong with an answer; empty where it is right."""
        found = pb.PredictionResponse.FromString(answer)
        named = found.model_version
        if found.model_name != model or not named.isdecimal():
            return f"{model} answered as {found.model_name!r} {named!r}"
        content = self.contents[model].get(int(named))
        if content is None or (version.isdecimal() and named != version):
            return f"version {version!r} of {model} was asked for and {named} answered"
        if scores(answer) != self.right[content][turn]:
            return f"the scores are not those of version {named} of {model}"
        return ""


def ending(world: World, model: str, version: str, error: grpc.RpcError) -> str:
    """How a call without an answer counts.

    Nobody is promised a version that may be unloaded; the requests of steady models, which name none, are
    only refused by a server that is not there, or is starting (`REFUSED`).
    """
    code, why = error.code().name, (error.details() or "").splitlines()[0]
    if code == "UNAVAILABLE" and any(
        part in why for part in ("onnect", "ocket", "GOAWAY", "roken pipe", "draining")
    ):
        return AWAY
    if code == "UNAVAILABLE" and why == f"model '{model}' is still loading":
        return AWAY
    if code in {"NOT_FOUND", "UNAVAILABLE"}:
        if model in world.steady and not version:
            return f"{REFUSED}: {why[:150]}"
        if code == "UNAVAILABLE":
            return BARE if tells_what_is_missing(model, version, why) else f"{WRONG}: {why[:150]}"
        return TOLD if tells_what_there_is(model, version, why) else f"{WRONG}: {why[:150]}"
    return f"{LOST}: {code} {why[:150]}"


def tells_what_is_missing(model: str, version: str, why: str) -> bool:
    """Whether UNAVAILABLE names the model and the version that was asked for, or one where none was."""
    if why == f"no version of model '{model}' is loaded":
        return not version
    found = _MISSING.fullmatch(why)
    return (
        found is not None
        and found["model"] == model
        and (not version.isdecimal() or found["version"] == version)
    )


def tells_what_there_is(model: str, version: str, why: str) -> bool:
    """Whether NOT_FOUND names what was asked for, and that is not among what it says there is."""
    if found := _UNKNOWN.fullmatch(why):
        there = re.findall("'([^']*)'", f"{found['there']} {found['labels']}")
        return (found["asked"], found["model"]) == (version, model) and version not in there
    found = _NO_MODEL.fullmatch(why)
    return (
        found is not None
        and found["asked"] == model
        and model not in re.findall("'([^']*)'", found["there"])
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    begin: float
    turn: int
    model: str
    version: str
    future: Any

    def end(self, world: World, calls: list[Call]) -> str:
        """Wait for the call and say how it ended; what it says of a version goes to ``calls``."""
        try:
            answer = self.future.result()
        except grpc.RpcError as error:
            end = ending(world, self.model, self.version, error)
            if end in {TOLD, BARE} and self.version.isdecimal():
                calls.append(self._call(int(self.version), answered=False))
            return end
        if fault := world.fault(self.turn, self.model, self.version, answer):
            return f"{WRONG}: {fault}"
        calls.append(self._call(int(world.version_of(answer)), answered=True))
        return OK

    def _call(self, version: int, *, answered: bool) -> Call:
        return Call(self.begin, time.monotonic(), self.model, version, answered)


def call_until_told(world: World, orders, seed: int) -> None:
    """A client's process: tells how its calls ended twice a second, until it is told to end."""
    draw = random.Random(seed)
    models = sorted(world.contents)
    ends: collections.Counter[str] = collections.Counter()
    refused: list[tuple[float, str]] = []
    calls: list[Call] = []
    with grpc.insecure_channel(
        world.address, options=[("grpc.max_reconnect_backoff_ms", 200)]
    ) as channel:
        call = channel.unary_unary(PREDICT)
        flight: collections.deque[_Asked] = collections.deque()
        told, failed = time.monotonic(), 0
        while True:
            while len(flight) < IN_FLIGHT and not orders.poll():
                model, turn = draw.choice(models), draw.randrange(len(world.requests))
                named = (*LABELS, *map(str, world.contents[model]))
                version = draw.choice((*("" for _ in named), *named))  # half of them name none
                content = world.message(turn, model, version, str(draw.random()))
                begin = time.monotonic()
                future = call.future(content, timeout=TIMEOUT_S)
                flight.append(_Asked(begin, turn, model, version, future))
            if not flight:
                break
            asked = flight.popleft()
            end = asked.end(world, calls)
            if end.startswith(REFUSED):
                refused.append((time.monotonic(), end))
            else:
                ends[end] += 1
            failed = 0 if asked.future.code() is grpc.StatusCode.OK else failed + 1
            if failed >= IN_FLIGHT:
                time.sleep(0.05)  # nobody is there
                failed = 0
            if time.monotonic() - told > TELL_S:
                orders.send((ends, refused, calls))
                ends, refused, calls, told = collections.Counter(), [], [], time.monotonic()
    orders.send((ends, refused, calls))
    orders.send(None)


class Clients:
    """Client processes and the sum of what they tell.

    Attributes:
        ends: how calls have ended.
        refused: when (``time.monotonic``) steady models were refused, and why.
        calls: those that say whether a version is there.
    """

    def __init__(self, world: World, count: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends: collections.Counter[str] = collections.Counter()
        self.refused: list[tuple[float, str]] = []
        self.calls = Calls()
        self._pipes, self._processes = [], []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=call_until_told, args=(world, theirs, seed + number), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def listen(self) -> int:
        """Take in what clients have told; how many calls were answered."""
        for pipe in self._pipes:
            while pipe.poll():
                self._take(*pipe.recv())
        return self.ends[OK]

    def stop(self) -> None:
        """End them when their last calls have ended."""
        for pipe in self._pipes:
            pipe.send("end")
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            while (told := pipe.recv()) is not None:
                self._take(*told)
            process.join()

    def _take(
        self,
        ends: collections.Counter[str],
        refused: Sequence[tuple[float, str]],
        calls: Sequence[Call],
    ) -> None:
        self.ends += ends
        self.refused += refused
        self.calls.add(calls)
