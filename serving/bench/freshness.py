"""How long a commit takes to every answer, what commits cost the calls beside them, and how fast they are taken back.

Per server, with client and server on the same CPUs, what ``--measure`` names of:

* *visible*: commits of ``--visible-rows`` rows come, one each ``--every-s`` seconds, while one call after the other is sent;
  the time from when a commit's file has its name to the first answer that names it is told as p50 and p99 (no later answer
  may name an earlier one);
* *latency*: an open loop at ``--share`` of what a closed one reaches (Poisson; latency counts from when a call was due), in
  phases: without commits, with commits of ``--rows`` rows, without, ...; told are the median p99 of the phases of
  either kind and their ratio; with ``--most-stolen 0.01`` phases in which the host of a virtual machine took more than a
  hundredth of the CPUs do not count for that (their answers do);
* *rollback*: over ``--back`` commits of ``--visible-rows`` rows, during such an open loop: the time from the call to the first answer
  of the state before.

Each answer of an open loop is held, bit by bit, against what the publisher's own copy of the package, with the commits up to the one
that the answer names, answers to that request. *MiB more* is how much larger the server is after the last commit, before it
is rolled back, than before the first one, and beside it is the ``--rollback-bytes`` that it was given: what ``--back`` of the largest commits take.

The package is made at once (`tessera.serving.bench.large_package`), and so are all commits before the first server starts; they
wait in ``--folder``. ``--json`` also keeps the time under the lock that a commit took on average
(``tessera_commit_apply_seconds``), each phase's p99 and what the host took, and how many calls were slower than the p99 without commits, by when they were due after
the last commit (``slow_after_ms``), which shows what of a commit they waited for.

With ``--gpu 0`` the package is one for GPUs, the servers have it on that one, and the right answers are computed there by torch's
own operators, one for each size of batch, as the sums of a GPU depend on that. Answers that have none of these bits and differ by no more
than ``TOLERANCE`` are counted as *near*: a recorded graph and a call may choose other kernels for the same product.

    python -m tessera.serving.bench.freshness --folder DIR [--gigabytes 0.1] [--rows 10000] [--phases 4] [--phase-s 10]

The sizes that are aimed at are ``--gigabytes 4 --visible-rows 588000 --rows 100000``, ``--visible-s 100`` for the first, ``--phases 20 --phase-s
60`` for the second and ``--back 20`` for the third; on a GPU ``--rows 1000000``.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import threading
import time
import urllib.request
from bisect import bisect_right
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.serving.bench.call_records import read_calls
from tessera.serving.bench.fresh_calls import Calls, median_p99_ms
from tessera.serving.bench.fresh_commits import (
    Answers,
    CommitFeed,
    CommitMaker,
    Judge,
    Verdict,
    Watcher,
)
from tessera.serving.bench.large_package import make_large
from tessera.serving.bench.processes import LOADER, METHOD
from tessera.serving.bench.reload_servers import MODEL, read_requests, write_requests
from tessera.serving.bench.reloads import load, memory_mib
from tessera.serving.bench.stolen import Stolen
from tessera.serving.client import RepositoryClient
from tessera.serving.commits.chain import LOG_FOLDER
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import arguments, machine, print_head, print_row

PROGRAMS = {
    "cpp": (str(LOADER.with_name("tessera-server")),),
    "python": (sys.executable, "-m", "tessera", "serve"),
}
CONNECTIONS = 4
IN_FLIGHT = 16
REQUESTS = 32
BIN_MS = 20
MEASURED = ("visible", "latency", "rollback")
ROLLBACK_PHASE_S = 10.0
_CALL_S = 120.0
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Visible:
    """How long commits took to the first answer, in seconds, and how many answers named an earlier commit than the one before."""

    commits: int
    p50_s: float
    p99_s: float
    most_s: float
    back: int


@dataclass(frozen=True, kw_only=True)
class Latency:
    """An open loop of ``rate`` calls a second: p99 by phase and their medians, in milliseconds; ``commits`` beside it.

    Attributes:
        without_stolen: what the host took of the CPUs in each phase without commits, 0 to 1.
        beside_stolen: in each phase with commits.
    """

    rate: float
    without_p99_ms: float
    beside_p99_ms: float
    ratio: float
    without_ms: list[float]
    beside_ms: list[float]
    without_stolen: list[float]
    beside_stolen: list[float]
    commits: int
    slow_after_ms: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A server's figures; see the module. What was not measured is None."""

    visible: Visible | None
    latency: Latency | None
    rollback_s: float | None
    apply_mean_ms: float
    answers: int
    near: int
    wrong: int
    failed: int
    grown_mib: float
    rollback_mib: float


@dataclass(frozen=True, kw_only=True)
class Log:
    """What all servers follow, made before the first one starts.

    Attributes:
        package: the package.
        made: the folder in which the commits wait.
        requests: of one sample each; ``request_file`` has them as ``tessera-load`` reads them.
        right: the right answers.
        visible, latency, rollback: the number of the last commit of each measurement.
        largest_bytes: of a commit's file.
    """

    package: Path
    made: Path
    request_file: Path
    requests: list[bytes]
    right: Answers
    visible: int
    latency: int
    rollback: int
    largest_bytes: int


def make_log(options: Any) -> Log:
    """The package and the commits."""
    folder: Path = options.folder
    device = "cpu" if options.gpu is None else "cuda"
    package = make_large(folder, options.gigabytes, name=MODEL, device=device)
    request_file = write_requests(folder / "requests", package, REQUESTS)
    requests = read_requests(request_file)
    version = folder / "made" / MODEL / "1"
    shutil.rmtree(folder / "made", ignore_errors=True)
    version.mkdir(parents=True)
    os.link(package, version / "model.pt")
    gpu = None if options.gpu is None else f"cuda:{options.gpu}"
    with CommitMaker(version, requests, gpu=gpu, largest_batch=options.largest_batch) as maker:
        last = {}
        end = 0
        wanted = {
            "visible": (math.ceil(options.visible_s / options.every_s), options.visible_rows),
            "latency": (
                options.phases // 2 * math.ceil(options.phase_s / options.every_s),
                options.rows,
            ),
            "rollback": (options.back, options.visible_rows),
        }
        for name, (count, rows) in wanted.items():
            if name in options.measure:
                end = max(end, *maker.make(count, rows))
            last[name] = end
        return Log(
            package=package,
            made=version / LOG_FOLDER,
            request_file=request_file,
            requests=requests,
            right=maker.right,
            largest_bytes=max(maker.bytes.values()),
            **last,
        )


def tell_phase(number: int, of: int, calls: Calls, *, beside: bool) -> None:
    """Say on stderr what a phase came to, since all of them take many minutes."""
    print(
        f"phase {number} of {of}, {'with' if beside else 'without'} commits: p99 {calls.p99_ms[-1]:.2f} ms;"
        f" such phases so far: {calls.right + calls.near} answers right, {calls.wrong} wrong, {calls.failed} failed",
        file=sys.stderr,
        flush=True,
    )


class Measured:
    """One server, its log and its clients, for as long as it is entered.

    Args:
        kind: ``cpp`` or ``python``.
        log: what it follows.
        options: of the command.
    """

    def __init__(self, kind: str, log: Log, options: Any) -> None:
        self._options, self._log = options, log
        self._record = options.folder / "calls"
        self._stack = ExitStack()
        repository = options.folder / "repository"
        shutil.rmtree(repository, ignore_errors=True)
        version = repository / MODEL / "1"
        version.mkdir(parents=True)
        os.link(log.package, version / "model.pt")
        self.feed = CommitFeed(log.made, version / LOG_FOLDER)
        self.rollback_bytes = options.back * log.largest_bytes
        flags = ["--model-repository", str(repository), "--model-control", "explicit", "--follow"]
        flags += ["--rollback-bytes", str(self.rollback_bytes)]
        if options.gpu is not None:
            flags += ["--gpus", str(options.gpu)]
            flags += ["--max-batch-samples", str(options.largest_batch)]
        self.server = self._stack.enter_context(ServerProcess(flags, PROGRAMS[kind]))

    def __enter__(self) -> Measured:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def visible(self) -> Visible:
        """How long each commit took from its name to the first answer; two may come at once."""
        feed, until = self.feed, self._log.visible
        with (
            Watcher(self.server.address, self._log.requests[0]) as watcher,
            feed.putting_in(self._options.every_s, until),
        ):
            watcher.wait_for(until, self._options.visible_s + _CALL_S)
        seen = [number for number in watcher.seen_ns if number]
        took = [(watcher.seen_ns[one] - feed.put_in_ns[one]) / 1e9 for one in seen]
        return Visible(
            commits=len(took),
            p50_s=float(np.quantile(took, 0.5)),
            p99_s=float(np.quantile(took, 0.99)),
            most_s=max(took),
            back=watcher.back,
        )

    def capacity(self) -> float:
        """Answers per second of a closed loop."""
        flags = ("--in-flight", IN_FLIGHT, "--duration-s", min(10.0, self._options.phase_s))
        return load(self.server.address, METHOD, self._log.request_file, None, *flags)

    def phase(self, rate: float, calls: Calls, seconds: float) -> None:
        """One open loop, whose calls are added to ``calls``."""
        flags = ("--rate", rate, "--duration-s", seconds, "--connections", CONNECTIONS)
        file = self._log.request_file
        stolen = Stolen()
        load(self.server.address, METHOD, file, self._record, *flags, "--warm-up-s", 1)
        calls.stolen.append(stolen.share())
        times = sorted(self.feed.put_in_ns.values())
        judge = Judge(self._log.right, bits=self._options.gpu is None)
        found: Counter[Verdict] = Counter()
        latencies = []
        for call in read_calls(self._record):
            if call.code != 0:
                calls.failed += 1
                continue
            found[judge.verdict(call.request, call.answer)] += 1
            latencies.append(call.took / 1e6)
            if calls.late is not None and (before := bisect_right(times, call.due)):
                calls.late.append(((call.due - times[before - 1]) / 1e6, latencies[-1]))
        self._record.unlink()
        calls.right += found[Verdict.RIGHT]
        calls.near += found[Verdict.NEAR]
        calls.wrong += found[Verdict.WRONG]
        calls.p99_ms.append(float(np.quantile(latencies, 0.99)))

    def latency(self, rate: float, kinds: dict[bool, Calls]) -> Latency:
        """The phases, whose calls are added to ``kinds``: False without commits, True with them."""
        options, begin = self._options, self.feed.last
        each = (self._log.latency - self._log.visible) // (options.phases // 2)
        for number in range(options.phases):
            beside = number % 2 == 1
            with ExitStack() as phase:
                if beside:
                    until = self.feed.last + each
                    phase.enter_context(self.feed.putting_in(options.every_s, until))
                self.phase(rate, kinds[beside], options.phase_s if beside else options.still_s)
            tell_phase(number + 1, options.phases, kinds[beside], beside=beside)
        most = options.most_stolen
        without, beside_ms = (median_p99_ms(kinds[one], most) for one in (False, True))
        slow = Counter(
            int(after // BIN_MS) * BIN_MS
            for after, took in kinds[True].late or ()
            if took > without
        )
        return Latency(
            rate=rate,
            without_p99_ms=without,
            beside_p99_ms=beside_ms,
            ratio=beside_ms / without,
            without_ms=kinds[False].p99_ms,
            beside_ms=kinds[True].p99_ms,
            without_stolen=kinds[False].stolen,
            beside_stolen=kinds[True].stolen,
            commits=self.feed.last - begin,
            slow_after_ms=dict(sorted(slow.items())),
        )

    def take_all(self) -> None:
        """Let the commits that are to be taken back appear, and wait for an answer of the last one."""
        while self.feed.last < self._log.rollback:
            self.feed.put_in()
        with Watcher(self.server.address, self._log.requests[0]) as watcher:
            watcher.wait_for(self.feed.last)

    def rollback_s(self, rate: float, calls: Calls) -> float:
        """Go back over ``--back`` commits during an open loop; returns the seconds to the first answer of before."""
        to = self.feed.last - self._options.back
        loop = threading.Thread(target=self.phase, args=(rate, calls, ROLLBACK_PHASE_S))
        with (
            Watcher(self.server.address, self._log.requests[0]) as watcher,
            RepositoryClient(self.server.address, timeout_s=_CALL_S) as repository,
        ):
            loop.start()
            time.sleep(ROLLBACK_PHASE_S / 2)
            begin = time.monotonic_ns()
            watcher.seen_ns.pop(to, None)
            repository.rollback(MODEL, to=f"1.{to}")
            watcher.wait_for(to)
            took = watcher.seen_ns[to] - begin
        loop.join()
        return took / 1e9

    def apply_ms(self) -> float:
        """How long a commit kept batches waiting, on average."""
        url = f"http://127.0.0.1:{self.server.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=_CALL_S) as response:
            text = response.read().decode()
        total, count = (
            sum(
                map(
                    float,
                    re.findall(
                        rf"^tessera_commit_apply_seconds_{what}\S* (\S+)", text, re.MULTILINE
                    ),
                )
            )
            for what in ("sum", "count")
        )
        return 1e3 * total / count


def measure(kind: str, log: Log, options: Any) -> Figures:
    """One server's figures."""
    kinds = {False: Calls(), True: Calls(late=[])}
    back = Calls()
    visible, latency, rollback_s = None, None, None
    with Measured(kind, log, options) as measured:
        rate = options.share * measured.capacity()
        before = memory_mib(measured.server.process.pid)
        if "visible" in options.measure:
            visible = measured.visible()
        if "latency" in options.measure:
            latency = measured.latency(rate, kinds)
        if "rollback" in options.measure:
            measured.take_all()
        grown = memory_mib(measured.server.process.pid) - before
        if "rollback" in options.measure:
            rollback_s = measured.rollback_s(rate, back)
        apply_ms = measured.apply_ms()
    everything = [*kinds.values(), back]
    return Figures(
        visible=visible,
        latency=latency,
        rollback_s=rollback_s,
        apply_mean_ms=apply_ms,
        answers=sum(calls.right + calls.near + calls.wrong for calls in everything),
        near=sum(calls.near for calls in everything),
        wrong=sum(calls.wrong for calls in everything),
        failed=sum(calls.failed for calls in everything),
        grown_mib=grown,
        rollback_mib=measured.rollback_bytes / _MIB,
    )


def parse() -> Any:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the package is kept")
    parser.add_argument("--gigabytes", type=float, default=0.1, help="of it (default 0.1)")
    parser.add_argument(
        "--measure", default=",".join(MEASURED), help=f"by commas (default {','.join(MEASURED)})"
    )
    parser.add_argument("--rows", type=int, default=10_000, help="of a commit (default 10000)")
    parser.add_argument(
        "--visible-rows",
        type=int,
        help="of a commit whose way to answers or back is timed (default: --rows)",
    )
    parser.add_argument("--every-s", type=float, default=1.0, help="between commits (default 1)")
    parser.add_argument("--servers", default="cpp,python", help="by commas (default cpp,python)")
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity (default 0.5)")
    parser.add_argument(
        "--visible-s", type=float, default=10.0, help="seconds of commits that are timed"
    )
    parser.add_argument("--phases", type=int, default=4, help="of both kinds (default 4)")
    parser.add_argument("--phase-s", type=float, default=10.0, help="seconds each (default 10)")
    parser.add_argument(
        "--still-s", type=float, help="seconds of each phase without commits (default: --phase-s)"
    )
    parser.add_argument(
        "--most-stolen",
        type=float,
        default=1.0,
        help="of the CPUs, what the host may take in a phase that counts (default 1: all count)",
    )
    parser.add_argument("--back", type=int, default=20, help="commits to take back (default 20)")
    parser.add_argument(
        "--largest-batch", type=int, default=64, help="with --gpu, samples of one (default 64)"
    )
    parser.add_argument("--cpus", default="0,1", help="of all together (default 0,1)")
    parser.add_argument("--gpu", type=int, help="number of the GPU (default: none is used)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    args.measure = set(args.measure.split(","))
    if not args.measure or args.measure - set(MEASURED):
        parser.error(f"--measure: give some of {', '.join(MEASURED)}, by commas")
    if args.phases < 2:
        parser.error(f"--phases {args.phases}: give at least 2, one of each kind")
    if args.back < 1:
        parser.error(f"--back {args.back}: give at least 1")
    if args.visible_rows is None:
        args.visible_rows = args.rows
    if args.still_s is None:
        args.still_s = args.phase_s
    return args


def show(name: str, found: Figures) -> None:
    """One row of the table."""
    visible, latency = found.visible, found.latency
    print_row(
        name,
        "-" if visible is None else f"{visible.p50_s:.3f} / {visible.p99_s:.3f}",
        "-" if visible is None else f"{visible.commits}, {visible.back}",
        "-" if latency is None else f"{latency.rate:.0f}",
        "-" if latency is None else f"{latency.without_p99_ms:.2f}",
        "-" if latency is None else f"{latency.beside_p99_ms:.2f}",
        "-" if latency is None else f"{latency.ratio:.2f}",
        f"{found.apply_mean_ms:.2f}",
        "-" if found.rollback_s is None else f"{found.rollback_s:.3f}",
        *(found.answers, found.near, found.wrong, found.failed),
        f"{found.grown_mib:.0f} of {found.rollback_mib:.0f}",
    )


def main() -> None:
    """Make the package and the commits, measure, print."""
    args = parse()
    os.sched_setaffinity(0, {int(cpu) for cpu in args.cpus.split(",")})
    args.folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    log = make_log(args)
    print(
        f"{machine()} at the start; a package of {log.package.stat().st_size // _MIB} MiB,"
        f" commits of at most {log.largest_bytes / _MIB:.1f} MiB, made in {time.monotonic() - begin:.0f} s"
    )
    print_head(
        *("server", "visible p50 / p99 s", "commits, back", "calls/s", "p99 ms without"),
        *("with commits", "ratio", "ms alone", "rollback s", "answers", "near", "wrong"),
        *("failed", "MiB more"),
    )
    results = {}
    for name in args.servers.split(","):
        found = measure(name, log, args)
        results[name] = asdict(found)
        show(name, found)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
