"""Locust users of the gRPC protocol, with requests drawn from the served package's schema.

    locust -f load_tests/locustfile.py --host 127.0.0.1:50051 --model-file model.pt

opens locust's page; ``load_tests/run.py`` (``make load-test``) does the same without a screen.
``load_tests/README.md`` says how to read the result.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.experimental.gevent as grpc_gevent
from locust import User, constant, events, task
from locust.env import Environment
from locust.exception import StopUser

from tessera.serving.client import (
    Credentials,
    PredictError,
    PredictorClient,
    RequestDrawer,
    encode_request,
    read_schema,
)

# Locust runs every user in one thread, as greenlets, and has patched Python's blocking calls to
# switch between them.  gRPC waits in C++, where no patch reaches: without this its first call
# would stop all users until the answer comes.  It must run before any channel is made.
grpc_gevent.init_gevent()

# Requests of each kind, sent in turn.  Drawing one costs about as much as the server needs to
# answer it, so all are drawn before the first is sent.
POOL_SIZE = 256


class StatusError(Exception):
    """A failed call, told apart by its status alone.

    Locust counts failures by their text, and the server's messages differ from call to call.
    """


@dataclass
class RequestPool:
    """Encoded requests of one kind, and how many bytes they have."""

    requests: list[bytes]
    turn: Iterator[bytes]

    @classmethod
    def of(cls, requests: list[bytes]) -> RequestPool:
        """A pool that hands out ``requests`` in turn."""
        return cls(requests, itertools.cycle(requests))

    def sizes(self) -> str:
        """The sizes on the wire, in a few words."""
        sizes = sorted(map(len, self.requests))
        return (
            f"{sizes[0]} to {sizes[-1]} bytes a request,"
            f" {sum(sizes) / len(sizes):.0f} on average, {sizes[len(sizes) // 2]} in the middle"
        )


# Filled before the first user starts, by the name under which locust shows the calls.
POOLS: dict[str, RequestPool] = {}

ONE_SAMPLE = "Predict, one sample"
RANKING = "Predict, one user and many candidates"


def add_arguments(parser: Any) -> None:
    """Tessera's own flags of the ``locust`` command."""
    group = parser.add_argument_group("Tessera")
    group.add_argument(
        "--model-file",
        env_var="TESSERA_MODEL",
        default="",
        help="the served package, for its schema; or set TESSERA_MODEL (required)",
    )
    group.add_argument(
        "--model-name", default="", help="the model's name at the server (default: its first)"
    )
    group.add_argument(
        "--candidates",
        type=int,
        default=100,
        help="candidates of a ranking request, on average (default: 100)",
    )
    group.add_argument("--timeout-ms", type=int, default=1000, help="of a call (default: 1000 ms)")
    # --tls-cert and --tls-key are locust's own flags.
    group.add_argument(
        "--tls-ca",
        default="",
        help="the authorities that the server's certificate is held against, in PEM (default: no TLS)",
    )
    group.add_argument(
        "--token-file",
        default="",
        help="a file whose first word is each call's token (default: none)",
    )
    group.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    group.add_argument(
        "--result", default="", help="a JSON file to write what was measured to (default: none)"
    )


def draw_requests(environment: Environment, **_: Any) -> None:
    """Draw the pools; a missing flag or a bad package ends locust with one line."""
    options = environment.parsed_options
    assert options is not None
    if not options.model_file:
        raise SystemExit("locustfile: give --model-file MODEL.pt, or set TESSERA_MODEL")
    if options.candidates < 1:
        raise SystemExit(f"locustfile: --candidates is {options.candidates}; at least 1 is needed")
    try:
        schema = read_schema(options.model_file)
    except ValueError as error:
        raise SystemExit(f"locustfile: {error}") from error
    drawer = RequestDrawer(schema, seed=options.seed)
    # From half to one and a half times the average, as result lists differ in length.
    low, span = (options.candidates + 1) // 2, options.candidates
    counts = [low + i * span // POOL_SIZE for i in range(POOL_SIZE)]
    name = options.model_name
    POOLS[ONE_SAMPLE] = RequestPool.of(
        [encode_request(drawer.samples(1), model=name) for _ in range(POOL_SIZE)]
    )
    POOLS[RANKING] = RequestPool.of(
        [encode_request(drawer.ranking(count), model=name) for count in _shuffled(counts)]
    )


def report(environment: Environment, **_: Any) -> None:
    """Print the sizes of what was sent, and write ``--result`` if it is asked for."""
    sent = [name for name in POOLS if environment.stats.get(name, "gRPC").num_requests]
    for name in sent:
        print(f"{name}: {POOLS[name].sizes()}")
    options = environment.parsed_options
    if options is not None and options.result:
        Path(options.result).write_text(json.dumps(result(environment, sent), indent=1) + "\n")


def result(environment: Environment, names: Sequence[str]) -> dict[str, Any]:
    """What was measured, for a program to read; times in milliseconds."""
    entries = [environment.stats.get(name, "gRPC") for name in names]
    return {
        "calls": [
            {
                "name": entry.name,
                "calls": entry.num_requests,
                "failures": entry.num_failures,
                "calls_per_s": entry.total_rps,
                "p50_ms": entry.get_response_time_percentile(0.50),
                "p99_ms": entry.get_response_time_percentile(0.99),
                "max_ms": entry.max_response_time,
            }
            for entry in entries
        ],
        "failures": [
            {"name": error.name, "error": str(error.error), "calls": error.occurrences}
            for error in environment.stats.errors.values()
        ],
    }


def _shuffled(counts: Sequence[int]) -> list[int]:
    """Every count once, far from its neighbours: 101 is prime to the pool's size."""
    return [counts[i * 101 % len(counts)] for i in range(len(counts))]


class PredictUser(User):
    """Sends its next request as soon as the last is answered, over a connection of its own."""

    abstract = True
    wait_time = constant(0)
    pool_name = ""

    def on_start(self) -> None:
        address = (self.host or "").removeprefix("grpc://")
        parsed = self.environment.parsed_options
        try:
            self.client = PredictorClient(
                address,
                timeout_s=parsed.timeout_ms / 1e3,
                credentials=Credentials(
                    tls_ca=parsed.tls_ca or None, token_file=parsed.token_file or None
                ),
                options=[("grpc.use_local_subchannel_pool", 1)],
            )
        except ValueError as error:
            print(f"locustfile: {error}")
            self.environment.process_exit_code = 2
            self.environment.runner.quit()
            raise StopUser from error

    def on_stop(self) -> None:
        self.client.close()

    @task
    def predict(self) -> None:
        request = next(POOLS[self.pool_name].turn)
        response = b""
        failure: Exception | None = None
        began = time.perf_counter()
        try:
            response = self.client.send(request)
        except PredictError as error:
            failure = StatusError(error.code.name)
        self.environment.events.request.fire(
            request_type="gRPC",
            name=self.pool_name,
            response_time=(time.perf_counter() - began) * 1e3,
            response_length=len(response),
            exception=failure,
            context={"request_bytes": len(request)},
        )


class OneSampleUser(PredictUser):
    """Asks for one score at a time, as an ad exchange does."""

    weight = 9
    pool_name = ONE_SAMPLE


class RankingUser(PredictUser):
    """Has a list ranked: one user's features once, and many candidates."""

    weight = 1
    pool_name = RANKING


hooks: Any = events  # locust leaves add_listener untyped
hooks.init_command_line_parser.add_listener(add_arguments)
hooks.init.add_listener(draw_requests)
hooks.quitting.add_listener(report)
