"""What changing a large model costs the calls that are answered meanwhile: both servers, and a peer beside them.

A package of a given size is made twice or more often (``--versions``), with other weights, once (``--folder`` keeps them). Per
server, client and server on the same two CPUs:

* its capacity: the requests per second that it takes in an open loop (`tessera.serving.bench.capacity`);
* an open loop at a share of that (Poisson; latency counts from when a call was due), in phases: without reloads, with
  reloads, without, with, ...  With reloads the versions come and go in turn, with ``--pause-s`` between: the next one
  is loaded, answers, and the one before is unloaded.

Of two versions each comes again while the server still keeps its tables (docs/repository.md), as where somebody goes back to the
version before; of three or more each is read anew.

All servers are there from the beginning to the end, and the phases go from one to the next, so that whatever else the
machine does falls on all of them.  A phase begins once every server does nothing (a file may still be hashed after its
version answers).

Each answer is compared, bit by bit, with those that the version that it names gave before.  Told are p50, p99 and p99.9 of
all phases of a kind together, their ratio, failed calls, wrong answers, the reloads, and the server's resident memory
before, after ten reloads, at the end and at most.  Each phase is told of on stderr as it ends.

On a virtual machine whose host is busy with others a phase tells of the host. With ``--most-stolen 0.01`` a phase in which the
host took more than a hundredth of the CPUs does not count and comes again, up to five times; its answers are checked
and its reloads counted all the same. *stolen* is what was taken in the phases that count.

A peer is described by a JSON file: ``name``, ``command`` (with {port} and {http_port}), ``environment``, ``method``,
``requests`` (messages, each after its size as 4 bytes, little-endian), ``model``, ``file`` (the model's file in the peer's
repository) and ``versions`` (files that take its place in turn, each followed by a RepositoryModelLoad).  Its
answers name no file, so one is right that equals what one of them gave, up to ``TOLERANCE``: what a peer
answers may depend on the other calls of a batch by a rounding.  So does what a GPU answers: with ``--gpus`` the packages are for
GPUs, ours have them on these ones, and a right answer is that of the version that it names up to ``TOLERANCE``. Of several GPUs
each has a copy, or with ``--shards`` a part of the tables.

    python -m tessera.serving.bench.reloads --folder DIR [--gigabytes 1] [--phases 6] [--phase-s 20] [--peer FILE.json]
    python -m tessera.serving.bench.reloads --folder DIR --reloads 1000      # phases until each server has had so many
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessera.serving.bench.call_records import read_runs
from tessera.serving.bench.capacity import open_capacity
from tessera.serving.bench.processes import LOADER, cpu_seconds
from tessera.serving.bench.reload_servers import (
    Answer,
    Reloading,
    ReloadingPeer,
    ReloadingServer,
    make_versions,
    write_requests,
)
from tessera.serving.bench.stolen import Stolen
from tessera.training.bench.harness import arguments, machine, print_head, print_row

IN_FLIGHT = 32
MOST_TRIES = 6
_MIB = 1 << 20
SETTLED_RELOADS = 10
SETTLE_LOOK_S = 0.5
SETTLE_MOST_S = 60.0
IDLE_SHARE = 0.05
"""A server that uses less of a CPU than this does nothing."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What the client saw in one phase: each call's latency in seconds (float32), failures and wrong answers.

    Attributes:
        stolen: what the host took of the CPUs, 0 to 1.
    """

    latencies_s: npt.NDArray[np.float32]
    failed: int
    wrong: int
    stolen: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A server's figures; memory in MiB, ``ratio`` that of the p99 with reloads to the one without.

    Attributes:
        stolen: the most that the host took of the CPUs in a phase that counts, 0 to 1.
        again: phases that did not count.
    """

    capacity: float
    rate: float
    calls: int
    failed: int
    wrong: int
    reloads: int
    reload_s: float
    still_ms: Sequence[float]
    reloading_ms: Sequence[float]
    ratio: float
    before_mib: float
    settled_mib: float
    end_mib: float
    most_mib: float
    stolen: float
    again: int


def load(address: str, method: str, requests: Path, record: Path | None, *flags: object) -> float:
    """One run of ``tessera-load``; the requests answered per second."""
    command = [LOADER, "--address", address, "--method", method, "--requests", requests, *flags]
    csv = requests.with_suffix(".csv")
    csv.unlink(missing_ok=True)
    command += ["--csv", csv] + (["--record", record] if record is not None else [])
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    if done.returncode not in {0, 1}:  # 1: some calls failed, which the record tells
        sys.exit(done.stderr.decode())
    head, row = csv.read_text(encoding="utf-8").splitlines()
    return float(dict(zip(head.split(","), row.split(","), strict=True))["requests_per_second"])


def read_phase(
    record: Path, right: Mapping[int, Sequence[Answer]], server: Reloading, stolen: float
) -> Phase:
    """What a record of ``tessera-load`` says; ``right`` are the right answers by request."""
    latencies, failed, wrong = [np.empty(0, np.float32)], 0, 0
    known: dict[tuple[int, bytes], bool] = {}  # a request has few answers, and there are millions
    for run in read_runs(record):
        answered = run.code == 0
        failed += int(np.count_nonzero(~answered))
        latencies.append((run.took[answered] / 1e9).astype(np.float32))
        for request, answer, count in (
            each for part in server.told(run) for each in part.distinct()
        ):
            key = (request, answer)
            if key not in known:
                known[key] = server.is_right(server.read(answer), right[request])
            wrong += 0 if known[key] else count
    return Phase(latencies_s=np.concatenate(latencies), failed=failed, wrong=wrong, stolen=stolen)


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    """A process's resident memory, or with ``VmHWM`` the most that it ever had."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) / 1024


class Reloader:
    """Reloads a server's model again and again in a thread while it is entered."""

    def __init__(self, server: Reloading, pause_s: float) -> None:
        self.count = 0
        self.seconds = 0.0
        self.settled_mib = 0.0
        self._server, self._pause_s = server, pause_s
        self._failure: BaseException | None = None
        self._end = threading.Event()

    def __enter__(self) -> Reloader:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        self._end.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                begin = time.perf_counter()
                self._server.reload()
                self.seconds += time.perf_counter() - begin
                self.count += 1
                if self.count == SETTLED_RELOADS:
                    self.settled_mib = memory_mib(self._server.pid)
                self._end.wait(self._pause_s)
        except BaseException as error:  # noqa: BLE001 - raised again by __exit__
            self._failure = error


def right_answers(server: Reloading, requests: Sequence[bytes]) -> dict[int, list[Answer]]:
    """What each version answers to each request while nothing else happens, by the request's number."""
    right: dict[int, list[Answer]] = {number: [] for number in range(len(requests))}
    for _ in range(server.versions):
        for number, request in enumerate(requests):
            right[number].append(server.read(server.ask(request)))
        server.reload()
    return right


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a server is measured; times in seconds, ``share`` of the capacity; ``reloads`` 0: ``phases`` phases.

    Attributes:
        phase_s: of a phase with reloads.
        still_s: of one without.
        capacity_s: of each run that looks for the capacity.
        most_stolen: of the CPUs, what the host may take in a phase that counts.
    """

    share: float
    phases: int
    reloads: int
    phase_s: float
    still_s: float
    capacity_s: float
    warm_up_s: float
    pause_s: float
    most_stolen: float


def settle(servers: Sequence[Reloading]) -> None:
    """Wait until no server does anything that no call asks for."""
    end = time.perf_counter() + SETTLE_MOST_S
    while time.perf_counter() < end:
        before = [cpu_seconds(server.pid) for server in servers]
        time.sleep(SETTLE_LOOK_S)
        after = [cpu_seconds(server.pid) for server in servers]
        if all(b - a < IDLE_SHARE * SETTLE_LOOK_S for a, b in zip(before, after, strict=True)):
            return


def _percentiles_ms(phases: Sequence[Phase]) -> list[float]:
    """p50, p99 and p99.9 of all calls of some phases."""
    latencies = np.concatenate([phase.latencies_s for phase in phases])
    return [float(value) * 1e3 for value in np.quantile(latencies, (0.5, 0.99, 0.999))]


class Contender:
    """One server's measurement: its capacity at once, then `phase` after `phase`.

    Args:
        server: runs, and nothing else calls it.
        folder: for the client's records.
        options: see `Options`.
    """

    def __init__(self, server: Reloading, folder: Path, options: Options) -> None:
        self.server = server
        self._record, self._options = folder / "calls", options
        self._right = right_answers(server, server.requests)
        settle([server])
        closed = ("--in-flight", IN_FLIGHT, "--duration-s", options.capacity_s)
        self.capacity = open_capacity(self._p99_s, self._load(None, *closed))
        print(
            f"{server.name}, capacity: {self.capacity:.0f} calls/s, of which {self.rate:.0f} are sent",
            file=sys.stderr,
        )
        self.reloader = Reloader(server, options.pause_s)
        self._before_mib = memory_mib(server.pid)
        self._phases: dict[bool, list[Phase]] = {False: [], True: []}
        self._uncounted: list[Phase] = []

    def _load(self, record: Path | None, *flags: object) -> float:
        server, warm = self.server, ("--warm-up-s", self._options.warm_up_s)
        return load(server.address, server.method, server.request_file, record, *flags, *warm)

    def _p99_s(self, rate: float) -> float:
        self._load(self._record, "--rate", rate, "--duration-s", self._options.capacity_s)
        # A call that is refused at once has not been taken.
        latencies = np.concatenate(
            [np.where(run.code == 0, run.took / 1e9, np.inf) for run in read_runs(self._record)]
        )
        self._record.unlink()
        settle([self.server])
        return float(np.quantile(latencies, 0.99, method="higher"))

    @property
    def rate(self) -> float:
        """Calls a second of the open loop."""
        return self.capacity * self._options.share

    def phase(self, *, reloads: bool, last_try: bool = True) -> bool:
        """Send the open loop for one phase, and keep what the client saw; returns whether the phase counts.

        Args:
            reloads: whether the server reloads meanwhile.
            last_try: whether it counts in any case.
        """
        with ExitStack() as stack:
            if reloads:
                stack.enter_context(self.reloader)
            stolen = Stolen()
            length_s = self._options.phase_s if reloads else self._options.still_s
            self._load(self._record, "--rate", self.rate, "--duration-s", length_s)
            share = stolen.share()
        phase = read_phase(self._record, self._right, self.server, share)
        self._record.unlink()
        counts = last_try or share <= self._options.most_stolen
        (self._phases[reloads] if counts else self._uncounted).append(phase)
        self._tell(phase, reloads=reloads, counts=counts)
        return counts

    def _tell(self, phase: Phase, *, reloads: bool, counts: bool) -> None:
        """One line on stderr: a run may take hours."""
        kind = f"{self.reloader.count} reloads so far" if reloads else "no reloads"
        percentiles = " / ".join(f"{value:.2f}" for value in _percentiles_ms([phase]))
        print(
            f"{self.server.name}, {kind}: p50 / p99 / p99.9 {percentiles} ms, {phase.failed} failed, "
            f"{phase.wrong} wrong, {memory_mib(self.server.pid):.0f} MiB, stolen {phase.stolen:.1%}"
            + ("" if counts else "; does not count"),
            file=sys.stderr,
        )

    def figures(self) -> Figures:
        """What has been measured so far, of both kinds of phases."""
        still, reloading = (_percentiles_ms(self._phases[kind]) for kind in (False, True))
        counted = [*self._phases[False], *self._phases[True]]
        everything = [*counted, *self._uncounted]
        reloader, pid = self.reloader, self.server.pid
        return Figures(
            capacity=self.capacity,
            rate=self.rate,
            calls=sum(len(phase.latencies_s) + phase.failed for phase in everything),
            failed=sum(phase.failed for phase in everything),
            wrong=sum(phase.wrong for phase in everything),
            reloads=reloader.count,
            reload_s=reloader.seconds / max(1, reloader.count),
            still_ms=still,
            reloading_ms=reloading,
            ratio=reloading[1] / still[1],
            before_mib=self._before_mib,
            settled_mib=reloader.settled_mib,
            end_mib=memory_mib(pid),
            most_mib=memory_mib(pid, "VmHWM"),
            stolen=max(phase.stolen for phase in counted),
            again=len(self._uncounted),
        )


def measure(
    contenders: Sequence[Contender], options: Options, after_round: Callable[[], None]
) -> None:
    """All phases, round after round: each server without reloads, then each with."""
    servers = [contender.server for contender in contenders]

    def enough(rounds: int) -> bool:
        if options.reloads:
            return all(each.reloader.count >= options.reloads for each in contenders)
        return 2 * rounds >= options.phases

    rounds = 0
    while not enough(rounds):
        for reloads in (False, True):
            for contender in contenders:
                for number in range(1, MOST_TRIES + 1):
                    settle(servers)
                    if contender.phase(reloads=reloads, last_try=number == MOST_TRIES):
                        break
        rounds += 1
        after_round()


def show(name: str, found: Figures) -> None:
    """One row of the table."""
    print_row(
        *(name, f"{found.rate:.0f}", found.reloads, f"{found.reload_s:.2f}"),
        " / ".join(f"{value:.2f}" for value in found.still_ms),
        " / ".join(f"{value:.2f}" for value in found.reloading_ms),
        *(f"{found.ratio:.2f}", f"{found.failed} of {found.calls}", found.wrong),
        " / ".join(
            f"{value:.0f}" if value else "-"  # fewer than ten reloads
            for value in (found.before_mib, found.settled_mib, found.end_mib, found.most_mib)
        ),
        f"{found.stolen:.1%}" + (f", {found.again} phases again" if found.again else ""),
    )


def main() -> None:
    """Make the packages, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the packages are kept")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of a package (default 1)")
    parser.add_argument(
        "--versions", type=int, default=2, help="that come and go in turn (default 2)"
    )
    parser.add_argument(
        "--servers", default="cpp,python", help="which of ours, by commas (default cpp,python)"
    )
    parser.add_argument("--peer", type=Path, help="the description of a peer (default: none)")
    parser.add_argument(
        "--control",
        choices=["explicit", "poll"],
        default="explicit",
        help="how ours are told to reload: by calls, or by serving.yaml (default explicit)",
    )
    parser.add_argument("--share", type=float, default=0.6, help="of the capacity (default 0.6)")
    parser.add_argument(
        "--capacity-s",
        type=float,
        default=10.0,
        help="seconds of each run that looks for the capacity (default 10)",
    )
    parser.add_argument("--phases", type=int, default=6, help="of both kinds (default 6)")
    parser.add_argument(
        "--reloads",
        type=int,
        default=0,
        help="phases until each server has had so many reloads (default 0: --phases tells)",
    )
    parser.add_argument("--phase-s", type=float, default=20.0, help="seconds each (default 20)")
    parser.add_argument(
        "--still-s", type=float, help="of phases without reloads (default: that of the others)"
    )
    parser.add_argument(
        "--pause-s", type=float, default=0.2, help="seconds between two reloads (default 0.2)"
    )
    parser.add_argument(
        "--most-stolen",
        type=float,
        default=1.0,
        help="of the CPUs, what the host may take in a phase that counts (default 1: all count)",
    )
    parser.add_argument(
        "--gpus", help="CUDA's numbers of the GPUs that ours serve on, by commas (default: the CPU)"
    )
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        help="of a package: with as many GPUs one model is on all of them (default 1: copies)",
    )
    parser.add_argument("--cpus", default="0,1", help="of client and server together (default 0,1)")
    parser.add_argument(
        "--json", type=Path, help="also write the figures to this file, after each round"
    )
    args = parser.parse_args()
    os.sched_setaffinity(0, {int(cpu) for cpu in args.cpus.split(",")})
    options = Options(
        share=args.share,
        phases=args.phases,
        reloads=args.reloads,
        phase_s=args.phase_s,
        still_s=args.still_s or args.phase_s,
        capacity_s=args.capacity_s,
        warm_up_s=1.0,
        pause_s=args.pause_s,
        most_stolen=args.most_stolen,
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    device = "cpu" if args.gpus is None else "cuda"
    versions = make_versions(args.folder, args.gigabytes, device, args.shards, args.versions)
    flags = [] if args.gpus is None else ["--gpus", args.gpus]
    requests = write_requests(args.folder / "requests", versions[0])
    sizes = " and ".join(f"{path.stat().st_size / _MIB:.0f} MiB" for path in versions)
    print(f"{machine()} at the start; packages of {sizes}")
    print_head(
        *("server", "calls/s", "reloads", "s each", "p50 / p99 / p99.9 ms", "with reloads"),
        *("p99 ratio", "failed", "wrong", "MiB before / after 10 / at the end / at most", "stolen"),
    )
    names = args.servers.split(",") if args.servers else []
    starts: list[Reloading] = [
        ReloadingServer(
            *(name, args.folder, versions, requests, args.control),
            flags=flags,
            bits=args.gpus is None,
        )
        for name in names
    ]
    if args.peer is not None:
        starts.append(ReloadingPeer(json.loads(args.peer.read_text(encoding="utf-8"))))
    with ExitStack() as stack:
        servers = [stack.enter_context(server) for server in starts]
        contenders = [Contender(server, args.folder, options) for server in servers]

        def write() -> None:
            """Keep what there is: a thousand reloads take hours."""
            if args.json is not None:
                found = {each.server.name: asdict(each.figures()) for each in contenders}
                args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")

        measure(contenders, options, write)
        for contender in contenders:
            show(contender.server.name, contender.figures())


if __name__ == "__main__":
    main()
