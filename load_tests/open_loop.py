"""Open-loop load: requests leave at times fixed beforehand, whatever the server does.

Why: a closed loop (a locust user, a benchmark with n requests in flight) sends its next request
only when the last one is answered.  A server that stalls for a second so receives one request
less in that second instead of hundreds, and the stall appears as one slow answer among
thousands of fast ones: the load generator has omitted, in coordination with the server, just
the requests that would have been slow.  Here every latency counts from the moment at which the
request was *meant* to leave, so a stall is charged to each request that it delayed, as it would
be to each user.  (G. Tene named this coordinated omission.)

The generator reports its own lateness (actual minus intended time of sending).  Where its p99
comes near the measured latencies, the generator and not the server is the limit: lower the rate
or run several generators.

    python load_tests/open_loop.py --rate 500 --address HOST:PORT --model-file MODEL.pt

Writes calls.csv (one line per call) and latency.svg into --out, prints a summary, and exits
with 1 if a call failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import math
import selectors
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tessera.errors import UserError
from tessera.serving.client import (
    AsyncPredictorClient,
    Draw,
    PredictError,
    RequestDrawer,
    encode_request,
    read_schema,
)
from tessera.serving.client.arrays import Array
from tessera.serving.client.latency import LatencySummary

OK = "OK"
# Distinct requests, sent in turn: drawing them costs more than sending.
POOL_SIZE = 512
POOL_BYTES = 64 << 20
# What is kept in memory: four numbers and a task per call, a request of so many samples.
MOST_CALLS = 10_000_000
MOST_SAMPLES = 1_000_000
_LEAD_S = 0.05

Send = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class Calls:
    """What happened to each call, in the order of the intended times.

    Attributes:
        intended_s: ``[N]`` when it was meant to leave, in seconds from the start.
        lateness_s: ``[N]`` how much later it left.
        latency_s: ``[N]`` from the intended time to the answer or the failure.
        status: ``[N]`` gRPC status names.
    """

    intended_s: Array
    lateness_s: Array
    latency_s: Array
    status: list[str]

    def after(self, warm_up_s: float) -> Calls:
        """The calls meant to leave after the first ``warm_up_s`` seconds."""
        first = int(np.searchsorted(self.intended_s, warm_up_s))
        return Calls(
            self.intended_s[first:],
            self.lateness_s[first:],
            self.latency_s[first:],
            self.status[first:],
        )

    @property
    def answered(self) -> Array:
        """``[N]`` bool: which calls were answered."""
        return np.array([status == OK for status in self.status], dtype=bool)


def arrival_times_s(
    rate: float, duration_s: float, kind: Literal["poisson", "constant"], seed: int
) -> Array:
    """When to send, in seconds from the start, ascending, all below ``duration_s``.

    Args:
        rate: calls per second, on average.
        duration_s: length of the run in seconds.
        kind: ``poisson`` (independent users: exponential gaps) or ``constant`` (equal gaps).
        seed: of the gaps.
    """
    expected = rate * duration_s
    if kind == "constant":
        return np.arange(int(np.ceil(expected))) / rate
    # Ten standard deviations more than the mean number of arrivals are enough.
    count = int(expected + 10 * np.sqrt(expected) + 10)
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    return times[times < duration_s]


async def run_calls(send: Send, requests: Sequence[bytes], times_s: Array) -> Calls:
    """Send ``requests`` in turn at ``times_s`` and wait for every answer."""
    lateness_s = np.zeros(times_s.size)
    latency_s = np.zeros(times_s.size)
    status = [OK] * times_s.size
    start = time.perf_counter() + _LEAD_S

    async def call(index: int) -> None:
        due = start + times_s[index]
        lateness_s[index] = time.perf_counter() - due
        try:
            await send(requests[index % len(requests)])
        except PredictError as error:
            status[index] = error.code.name
        latency_s[index] = time.perf_counter() - due

    tasks = []
    for index, time_s in enumerate(times_s):
        wait_s = start + time_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        elif index % 64 == 0:
            await asyncio.sleep(0)  # behind schedule: still let answers come in
        tasks.append(asyncio.create_task(call(index)))
    await asyncio.gather(*tasks)
    return Calls(times_s, lateness_s, latency_s, status)


def summary(calls: Calls, rate: float) -> str:
    """A few lines for a person."""
    if not calls.status:
        return "no call was measured: the warm-up is as long as the run"
    answered = calls.answered
    codes = Counter(calls.status)
    failed = ", ".join(f"{n} {code}" for code, n in sorted(codes.items()) if code != OK)
    span_s = float(calls.intended_s[-1] - calls.intended_s[0]) or 1 / rate
    return "\n".join(
        [
            f"asked for {rate:g} calls/s, sent {(answered.size - 1) / span_s:.1f} calls/s",
            f"failed    {failed or 'none'}",
            f"latency   {LatencySummary.of_seconds(calls.latency_s[answered])}",
            f"lateness  {LatencySummary.of_seconds(calls.lateness_s)} (the generator's own)",
        ]
    )


def write_csv(calls: Calls, path: Path) -> None:
    """One line per call; times in seconds."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["intended_s", "lateness_s", "latency_s", "status"])
        rows = zip(calls.intended_s, calls.lateness_s, calls.latency_s, calls.status, strict=True)
        writer.writerows([f"{a:.6f}", f"{b:.6f}", f"{c:.6f}", status] for a, b, c, status in rows)


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are not rounded up to whole milliseconds, as epoll's are."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def plot(calls: Calls, path: Path, title: str) -> None:
    """Latency by percentile, and over time with failures marked."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to load, and only the plot needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    answered = calls.answered
    latency_ms = calls.latency_s * 1e3
    figure, (by_share, over_time) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    ordered = np.sort(latency_ms[answered])
    if ordered.size:
        slower = 1 - np.arange(ordered.size) / ordered.size
        by_share.plot(slower, ordered)
        by_share.set(xscale="log", yscale="log", xlim=(1, slower[-1] / 2))
    shares = [share for share in (0.5, 0.1, 0.01, 0.001, 1e-4) if share * ordered.size >= 1]
    by_share.set_xticks(shares, [f"p{100 * (1 - share):g}" for share in shares])
    by_share.minorticks_off()
    by_share.yaxis.set_major_formatter("{x:g}")
    by_share.set(xlabel="percentile", ylabel="latency from the intended time, ms")
    by_share.grid(visible=True, alpha=0.3)
    # Points as one picture: an SVG element for each would make the file as long as the run.
    over_time.scatter(
        calls.intended_s[answered], latency_ms[answered], s=3, label="answered", rasterized=True
    )
    if not answered.all():
        failed = ~answered
        over_time.scatter(
            calls.intended_s[failed],
            latency_ms[failed],
            s=8,
            c="tab:red",
            marker="x",
            label="failed",
            rasterized=True,
        )
        over_time.legend()
    over_time.set(xlabel="intended time of sending, s", ylabel="latency, ms", ylim=(0, None))
    over_time.grid(visible=True, alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_requests(args: argparse.Namespace) -> list[bytes]:
    """The pool of encoded requests, of fewer where they are large."""
    drawer = RequestDrawer(read_schema(args.model_file), Draw(ids=args.ids), seed=args.seed)
    draw = drawer.ranking if args.ranking else drawer.samples
    pool: list[bytes] = []
    while len(pool) < POOL_SIZE and sum(map(len, pool)) < POOL_BYTES:
        pool.append(encode_request(draw(args.samples), model=args.model))
    return pool


async def measure(args: argparse.Namespace, requests: Sequence[bytes], times_s: Array) -> Calls:
    """Connect, make one call per channel that does not count, and run."""
    clients = [
        AsyncPredictorClient(
            args.address,
            timeout_s=args.timeout_ms / 1e3,
            # Channels to one address share a connection unless told otherwise.
            options=[("grpc.use_local_subchannel_pool", 1)],
        )
        for _ in range(args.channels)
    ]
    turn = 0

    async def send(request: bytes) -> bytes:
        nonlocal turn
        turn = (turn + 1) % len(clients)
        return await clients[turn].send(request)

    try:
        await asyncio.gather(*(client.send(requests[0]) for client in clients))
        return await run_calls(send, requests, times_s)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parser of this program's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--address", required=True, metavar="HOST:PORT", help="the server's gRPC address")
    add(
        "--model-file", required=True, metavar="MODEL.pt", help="the served package, for its schema"
    )
    add("--model", default="", help="the model's name at the server (default: its first)")
    add("--rate", type=float, required=True, help="calls per second")
    add("--duration-s", type=float, default=10.0, help="length in seconds (default: %(default)s)")
    add(
        "--warm-up-s",
        type=float,
        default=1.0,
        help="leave out the calls of the first seconds (default: %(default)s)",
    )
    add(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="independent users or equal gaps (default: %(default)s)",
    )
    add("--samples", type=int, default=1, help="samples per call (default: %(default)s)")
    add(
        "--ranking",
        action="store_true",
        help="one user per call, sent once, with --samples candidates (default: off)",
    )
    add(
        "--ids",
        choices=("power_law", "uniform"),
        default="power_law",
        help="how ids are drawn (default: %(default)s)",
    )
    add("--timeout-ms", type=int, default=1000, help="of a call (default: %(default)s ms)")
    add("--channels", type=int, default=1, help="connections (default: %(default)s)")
    add("--seed", type=int, default=0, help="of gaps and requests (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("bench-out/open-loop"),
        help="folder for calls.csv and latency.svg (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    for flag in ("rate", "duration_s", "samples", "timeout_ms", "channels"):
        if not 0 < getattr(args, flag) < math.inf:
            parser.error(f"--{flag.replace('_', '-')} must be positive, not {getattr(args, flag)}")
    if args.rate * args.duration_s > MOST_CALLS:
        parser.error(
            f"--rate {args.rate:g} for --duration-s {args.duration_s:g} makes more than "
            f"{MOST_CALLS} calls; give less of one"
        )
    if args.samples > MOST_SAMPLES:
        parser.error(f"--samples must be at most {MOST_SAMPLES}, not {args.samples}")
    if not 0 <= args.warm_up_s < args.duration_s:
        parser.error(f"--warm-up-s {args.warm_up_s} is not between 0 and --duration-s")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report; returns the exit status."""
    args = parse(argv)
    times_s = arrival_times_s(args.rate, args.duration_s, args.arrivals, args.seed)
    try:
        requests = draw_requests(args)
        args.out.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(precise_loop()) as loop:
            calls = loop.run_until_complete(measure(args, requests, times_s))
        calls = calls.after(args.warm_up_s)
        write_csv(calls, args.out / "calls.csv")
        kind = "one user, " if args.ranking else ""
        title = f"{args.rate:g} calls/s, {args.arrivals}, {kind}{args.samples} samples a call"
        plot(calls, args.out / "latency.svg", title)
    except UserError as error:
        print(f"open_loop: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"open_loop: error: {error.filename or args.out}: {error.strerror}", file=sys.stderr)
        return 2
    except PredictError as error:
        print(f"open_loop: the first call failed: {error}", file=sys.stderr)
        return 2
    print(summary(calls, args.rate))
    print(f"plot      {args.out / 'latency.svg'}\ncalls     {args.out / 'calls.csv'}")
    return 0 if calls.answered.all() else 1


if __name__ == "__main__":
    sys.exit(main())
