"""How long a commit takes to every answer, what commits cost the calls beside them, and how fast they are taken back.

Per server, with client and server on the same CPUs:

* *visible*: commits of ``--visible-rows`` rows come, one each ``--every-s`` seconds, while one call after the other is sent;
  the time from when a commit's file has its name to the first answer that names it is told as p50 and p99;
* *latency*: an open loop at ``--share`` of what a closed one reaches (Poisson; latency counts from when a call was due), in
  phases: without commits, with commits of ``--rows`` rows, without, ...; told are the median p99 of the phases of
  either kind and their ratio. The commits of a phase are made before it, and appear by themselves during it;
* *answers*: each is held, bit by bit, against what the publisher's own copy of the package, with the commits up to the one that
  the answer names, answers to that request;
* *rollback*: over ``--back`` commits, during the same open loop: the time from the call to the first answer of the state before;
* *memory*: how much larger the server is at the end than before the first commit, beside the bound of ``--rollback-bytes``.

The commits are those of `tessera.serving.bench.commits`. ``--json`` also keeps the time under the lock that a commit took on
average (``tessera_commit_apply_seconds``), and how many calls were slower than the p99 without commits, by when they were due after the
last commit (``slow_after_ms``), which shows what of a commit they waited for.

    python -m tessera.serving.bench.freshness --folder DIR [--gigabytes 0.1] [--rows 10000] [--phases 4] [--phase-s 10]

The sizes that are aimed at: ``--gigabytes 4 --visible-rows 588000 --rows 100000 --phases 4 --phase-s 300 --share 0.5``.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
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

from tessera.serving.bench.fresh_commits import CommitSource, Watcher, read_answer
from tessera.serving.bench.processes import LOADER, METHOD
from tessera.serving.bench.reload_servers import MODEL, make_versions, read_requests, write_requests
from tessera.serving.bench.reloads import load, memory_mib, read_calls
from tessera.serving.client import RepositoryClient
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
_CALL_S = 120.0


@dataclass
class Calls:
    """What the open loops' calls of one kind of phase came to.

    Attributes:
        p99_ms: of each phase.
        right: answers with the bits of the commit that they name.
        wrong: other answers.
        failed: calls without one.
        late: of each call in the order of the phases, milliseconds after the last commit and of its latency.
    """

    p99_ms: list[float]
    right: int = 0
    wrong: int = 0
    failed: int = 0
    late: list[tuple[float, float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A server's figures; see the module."""

    commits_seen: int
    visible_p50_s: float
    visible_p99_s: float
    rate: float
    without_p99_ms: float
    beside_p99_ms: float
    ratio: float
    commits: int
    apply_mean_ms: float
    answers: int
    wrong: int
    failed: int
    rollback_s: float
    grown_mib: float
    commit_mib: float
    slow_after_ms: dict[int, int]


class Measured:
    """One server, its log and its clients, for as long as it is entered.

    Args:
        kind: ``cpp`` or ``python``.
        package: what it serves.
        folder: where the repository is made, anew.
        options: of the command.
    """

    def __init__(self, kind: str, package: Path, folder: Path, options: Any) -> None:
        self._options = options
        self._record = folder / "calls"
        self._requests = write_requests(folder / "requests", package, REQUESTS)
        self.requests = read_requests(self._requests)
        self._stack = ExitStack()
        repository, ahead = folder / "repository", folder / "ahead"
        for root in (repository, ahead):
            shutil.rmtree(root, ignore_errors=True)
            (root / MODEL / "1").mkdir(parents=True)
            os.link(package, root / MODEL / "1" / "model.pt")
        self.source = CommitSource(repository / MODEL / "1", ahead / MODEL / "1", self.requests)
        self._stack.callback(self.source.close)
        flags = ["--model-repository", str(repository), "--model-control", "explicit", "--follow"]
        self.server = self._stack.enter_context(ServerProcess(flags, PROGRAMS[kind]))

    def __enter__(self) -> Measured:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def visible_s(self) -> list[float]:
        """How long each commit took from its name to the first answer; two may come at once."""
        source, options = self.source, self._options
        source.prepare(math.ceil(options.phase_s / options.every_s), options.visible_rows)
        with Watcher(self.server.address, self.requests[0]) as watcher:
            with source.putting_in(options.every_s):
                time.sleep(options.phase_s)
            watcher.wait_for(source.last)
        seen = [number for number in watcher.seen_ns if number]
        return [(watcher.seen_ns[one] - source.put_in_ns[one]) / 1e9 for one in seen]

    def capacity(self) -> float:
        """Answers per second of a closed loop."""
        flags = ("--in-flight", IN_FLIGHT, "--duration-s", min(10.0, self._options.phase_s))
        return load(self.server.address, METHOD, self._requests, None, *flags)

    def phase(self, rate: float, calls: Calls, seconds: float) -> None:
        """One open loop, whose calls are added to ``calls``."""
        flags = ("--rate", rate, "--duration-s", seconds, "--connections", CONNECTIONS)
        load(self.server.address, METHOD, self._requests, self._record, *flags, "--warm-up-s", 1)
        times, right = sorted(self.source.put_in_ns.values()), self.source.right
        latencies = []
        for call in read_calls(self._record):
            if call.code != 0:
                calls.failed += 1
                continue
            commit, scores = read_answer(call.answer)
            kept = commit in right and scores == right[commit][call.request]
            calls.right += kept
            calls.wrong += not kept
            latencies.append(call.took / 1e6)
            if calls.late is not None and (before := bisect_right(times, call.due)):
                calls.late.append(((call.due - times[before - 1]) / 1e6, latencies[-1]))
        self._record.unlink()
        calls.p99_ms.append(float(np.quantile(latencies, 0.99)))

    def rollback_s(self, rate: float, calls: Calls) -> float:
        """Go back over ``--back`` commits during an open loop; returns the seconds to the first answer of before."""
        to = self.source.last - self._options.back
        loop = threading.Thread(target=self.phase, args=(rate, calls, 10.0))
        with (
            Watcher(self.server.address, self.requests[0]) as watcher,
            RepositoryClient(self.server.address, timeout_s=_CALL_S) as repository,
        ):
            watcher.wait_for(self.source.last)
            loop.start()
            time.sleep(5.0)
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


def measure(kind: str, package: Path, folder: Path, options: Any) -> Figures:
    """One server's figures."""
    kinds = {False: Calls(p99_ms=[]), True: Calls(p99_ms=[], late=[])}
    with Measured(kind, package, folder, options) as measured:
        source = measured.source
        before = memory_mib(measured.server.process.pid)
        visible = measured.visible_s()
        rate = options.share * measured.capacity()
        begin, size = source.last, 0
        for number in range(options.phases):
            beside = number % 2 == 1
            if not beside:  # both phases of a pair come after making what the second one needs
                size = source.prepare(math.ceil(options.phase_s / options.every_s), options.rows)
            with ExitStack() as phase:
                if beside:
                    phase.enter_context(source.putting_in(options.every_s))
                measured.phase(rate, kinds[beside], options.phase_s)
        taken = source.last - begin
        if source.last < options.back:
            source.prepare(options.back - source.last, options.rows)
            while source.last < options.back:
                source.put_in()
        grown = memory_mib(measured.server.process.pid) - before
        apply_ms = measured.apply_ms()
        back = Calls(p99_ms=[])
        rollback_s = measured.rollback_s(rate, back)
    without, beside_ms = (statistics.median(kinds[one].p99_ms) for one in (False, True))
    slow = Counter(
        int(after // BIN_MS) * BIN_MS for after, took in kinds[True].late or () if took > without
    )
    everything = [*kinds.values(), back]
    return Figures(
        commits_seen=len(visible),
        visible_p50_s=float(np.quantile(visible, 0.5)),
        visible_p99_s=float(np.quantile(visible, 0.99)),
        rate=rate,
        without_p99_ms=without,
        beside_p99_ms=beside_ms,
        ratio=beside_ms / without,
        commits=taken,
        apply_mean_ms=apply_ms,
        answers=sum(calls.right + calls.wrong for calls in everything),
        wrong=sum(calls.wrong for calls in everything),
        failed=sum(calls.failed for calls in everything),
        rollback_s=rollback_s,
        grown_mib=grown,
        commit_mib=size / (1 << 20),
        slow_after_ms=dict(sorted(slow.items())),
    )


def parse() -> Any:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the package is kept")
    parser.add_argument("--gigabytes", type=float, default=0.1, help="of it (default 0.1)")
    parser.add_argument("--rows", type=int, default=10_000, help="of a commit (default 10000)")
    parser.add_argument(
        "--visible-rows",
        type=int,
        help="of a commit whose way to answers is timed (default: --rows)",
    )
    parser.add_argument("--every-s", type=float, default=1.0, help="between commits (default 1)")
    parser.add_argument("--servers", default="cpp,python", help="by commas (default cpp,python)")
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity (default 0.5)")
    parser.add_argument("--phases", type=int, default=4, help="of both kinds (default 4)")
    parser.add_argument("--phase-s", type=float, default=10.0, help="seconds each (default 10)")
    parser.add_argument("--back", type=int, default=20, help="commits to take back (default 20)")
    parser.add_argument("--cpus", default="0,1", help="of all together (default 0,1)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.phases < 2:
        parser.error(f"--phases {args.phases}: give at least 2, one of each kind")
    if args.visible_rows is None:
        args.visible_rows = args.rows
    return args


def main() -> None:
    """Make the package, measure, print."""
    args = parse()
    os.sched_setaffinity(0, {int(cpu) for cpu in args.cpus.split(",")})
    args.folder.mkdir(parents=True, exist_ok=True)
    package, _ = make_versions(args.folder, args.gigabytes)
    print(f"{machine()} at the start; a package of {package.stat().st_size >> 20} MiB")
    print_head(
        *("server", "visible p50 / p99 s", "calls/s", "p99 ms without", "with commits", "ratio"),
        *("ms alone", "rollback s", "answers", "wrong", "failed", "MiB more"),
    )
    results = {}
    for name in args.servers.split(","):
        found = measure(name, package, args.folder, args)
        results[name] = asdict(found)
        print_row(
            *(name, f"{found.visible_p50_s:.3f} / {found.visible_p99_s:.3f}", f"{found.rate:.0f}"),
            *(f"{found.without_p99_ms:.2f}", f"{found.beside_p99_ms:.2f}", f"{found.ratio:.2f}"),
            *(f"{found.apply_mean_ms:.2f}", f"{found.rollback_s:.3f}", found.answers, found.wrong),
            *(found.failed, f"{found.grown_mib:.0f}"),
        )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
