"""MLPerf's LoadGen over the engine: how many queries are answered, and within which time.

LoadGen decides when queries come, measures and judges; this program is its system under test.  A
query is one sample of MLPerf's recommendation benchmark (dlrm-v2): 100 to 700 pairs of a user and an
item, 270 on average, all of which are scored.  In the scenario ``server`` queries come at random
times (a Poisson process of ``--target-qps``), and the p99 of their latency has to stay below
``--latency-ms``; in ``offline`` all are there at once.

    python load_tests/mlperf.py MODEL.pt --scenario server --target-qps 500 --duration-s 60

cpp_server/bench/mlperf_package.py makes MLPerf's model, and prints the ``--ids-per-bag`` that goes with
it.  The queries are drawn before, with their arrays in memory and int32 ids: uniform over the rows
of a table, or over 31 bits where ids are hashed.  What differs from a submission to MLPerf: the
weights and ids are random, the numbers of pairs follow a distribution of this program's own with
MLPerf's limits and mean, and a run takes ``--duration-s`` instead of ten minutes.

Writes LoadGen's logs into ``--out`` and prints a line of JSON: samples (queries) and pairs a second,
the p99 in milliseconds and LoadGen's verdict.  Exit status 1: a query was not answered.  Needs
`pip install 'tessera-rec[mlperf]'` and the C++ server's library (docs/engine.md).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import UserError
from tessera.serving.client import read_schema
from tessera.serving.client.arrays import Array, GroupArrays, RequestArrays
from tessera.serving.engine import EngineHandle, EngineOptions, PreparedRequest, RequestSet
from tessera.serving.package.schema import InputSchema

_LOT = 64  # queries that are given to the engine in one call
_WARM_UP_QUERIES = 512
_HASHED_IDS = 2**31
_FLOAT_BYTES = 4


@dataclass
class Issued:
    """Queries of one of LoadGen's calls; those before ``begin`` have been taken."""

    numbers: Sequence[int]
    indices: Sequence[int]
    begin: int = 0


@dataclass(frozen=True)
class Pairs:
    """How many pairs queries have: ``least`` to ``most``, ``mean`` on average."""

    least: int = 100
    most: int = 700
    mean: float = 270.0

    def draw(self, count: int, generator: np.random.Generator) -> Array:
        """``[count]`` integers: least + (most - least) times a Beta(1, b) number of the right mean."""
        if not 1 <= self.least <= self.mean <= self.most:
            raise UserError(
                f"pairs {self.least}, {self.mean:g}, {self.most}: give the least, the mean and the most, 1 or"
                " more, in this order"
            )
        share = (self.mean - self.least) / max(self.most - self.least, 1)
        if share in {0, 1}:
            return np.full(count, self.least if share == 0 else self.most)
        drawn = generator.beta(1, 1 / share - 1, count)
        return np.rint(self.least + (self.most - self.least) * drawn).astype(np.int64)


def draw_queries(
    schema: InputSchema, pairs: Array, ids_per_bag: Sequence[int], generator: np.random.Generator
) -> list[PreparedRequest]:
    """A request for each number of ``pairs``, with ``ids_per_bag[f]`` ids in each bag of feature ``f``."""
    features = schema.group("id_list")
    if schema.group("id_score_list"):
        raise UserError("the package has weighted features; LoadGen's queries have none")
    if len(ids_per_bag) == 1:
        ids_per_bag = list(ids_per_bag) * len(features)
    if len(ids_per_bag) != len(features) or min(ids_per_bag) < 0:
        raise UserError(
            f"--ids-per-bag has {len(ids_per_bag)} numbers; give one, or one for each of {len(features)}"
            " features, none below 0"
        )
    found = []
    for B in pairs.tolist():
        lengths = np.repeat(np.asarray(ids_per_bag, np.int32), B).reshape(len(features), B)
        most = [f.rows if f.hashing == "none" else _HASHED_IDS for f in features]
        ids = [
            generator.integers(0, min(rows, _HASHED_IDS), B * ids, dtype=np.int32)
            for rows, ids in zip(most, ids_per_bag, strict=True)
        ]
        arrays = RequestArrays(
            batch_size=B,
            dense=generator.standard_normal((B, len(schema.dense_features)), dtype=np.float32),
            id_list=GroupArrays(lengths, np.concatenate(ids)),
            id_score_list=None,
        )
        found.append(PreparedRequest(arrays))
    return found


class SystemUnderTest:
    """Gives LoadGen's queries to an engine and its answers to LoadGen, many in each call.

    `issue` notes what LoadGen asks for.  ``submitters`` threads give it to the engine in lots, and one
    thread takes completions.  A query's tag is its slot, one of ``inside``: the row that its scores
    lie in.  A query for which there is none waits.
    """

    def __init__(
        self,
        loadgen: Any,
        handle: EngineHandle,
        queries: Sequence[PreparedRequest],
        *,
        inside: int,
        submitters: int,
    ) -> None:
        self._loadgen = loadgen
        self._handle = handle
        self._queries = RequestSet(queries)
        most = int(self._queries.batch_sizes.max()) * handle.scores_per_sample
        self._scores = np.zeros((inside, most), np.float32)
        # Of each slot: LoadGen's number and which query it is.
        self._numbers, self._indices = np.zeros(inside, np.uint64), np.zeros(inside, np.int64)
        self._changed = threading.Condition()  # guards what follows
        self._issued: deque[Issued] = deque()
        self._free, self._free_count = np.arange(inside), inside  # slots, a stack
        self._ended = False
        self._heard = True  # LoadGen hears of answers
        self.pairs = self.answered = self.failed = 0
        self.last_s = 0.0
        self.failure = ""
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (*[self._submit] * submitters, self._collect)
        ]
        for thread in self._threads:
            thread.start()

    def issue(self, numbers: Sequence[int], indices: Sequence[int]) -> None:
        """LoadGen's call: the queries ``indices``, which it knows by ``numbers``."""
        with self._changed:
            self._issued.append(Issued(numbers, indices))
            self._changed.notify_all()

    def warm_up(self, seconds: float) -> None:
        """Compute queries for so long, of which LoadGen does not hear.

        Workers' memory has its size afterwards, and what is compiled or chosen at the first calls is.
        """
        count = min(len(self._queries.requests), _WARM_UP_QUERIES)
        until = time.monotonic() + seconds
        self._heard = False
        while time.monotonic() < until:
            self.issue([0] * count, list(range(count)))
            with self._changed:
                while self._issued or self._free_count < len(self._free):
                    self._changed.wait()
        self._heard = True
        self.pairs = self.answered = 0

    def _take(self) -> tuple[Array, Array] | None:
        """Slots of the next queries and which queries they are; None: none will come."""
        with self._changed:
            while not self._issued or self._free_count == 0:
                if self._ended and not self._issued:
                    return None
                self._changed.wait()
            count = min(_LOT, self._free_count)
            numbers: list[int] = []
            indices: list[int] = []
            while self._issued and len(numbers) < count:
                first = self._issued[0]
                end = first.begin + count - len(numbers)
                numbers += first.numbers[first.begin : end]
                indices += first.indices[first.begin : end]
                first.begin = end
                if end >= len(first.numbers):
                    self._issued.popleft()
            self._free_count -= len(numbers)
            slots = self._free[self._free_count : self._free_count + len(numbers)].copy()
        self._numbers[slots], self._indices[slots] = numbers, indices
        return slots, self._indices[slots]

    def _submit(self) -> None:
        while (lot := self._take()) is not None:
            slots, indices = lot
            while len(slots) > 0:
                taken, refusal = self._handle.submit_many(
                    self._queries, indices, self._scores, slots, slots
                )
                if refusal is not None:
                    self._end(slots[taken : taken + 1], np.ones(1, bool), refusal.message)
                    taken += 1
                slots, indices = slots[taken:], indices[taken:]

    def _collect(self) -> None:
        while (ended := self._handle.wait()) is not None:
            failed = ended.codes != 0
            message = ended.messages[failed][0].decode(errors="replace") if failed.any() else ""
            self._end(ended.tags.astype(np.int64), failed, message)

    def _end(self, slots: Array, failed: Array, message: str) -> None:
        """Queries have ended: LoadGen hears of them, and their slots are free."""
        sizes = self._queries.batch_sizes[self._indices[slots]] * ~failed
        if self._heard:
            scores = self._scores.ctypes.data + slots * self._scores.strides[0]
            size_bytes = sizes * (self._handle.scores_per_sample * _FLOAT_BYTES)
            columns = (self._numbers[slots], scores, size_bytes)
            responses = map(self._loadgen.QuerySampleResponse, *(c.tolist() for c in columns))
            self._loadgen.QuerySamplesComplete(list(responses))
        with self._changed:
            self._free[self._free_count : self._free_count + len(slots)] = slots
            self._free_count += len(slots)
            refused = int(failed.sum())
            self.failed += refused
            self.failure = message or self.failure
            self.answered += len(slots) - refused
            self.pairs += int(sizes.sum())
            self.last_s = time.perf_counter()
            self._changed.notify_all()

    def end(self) -> None:
        """Wait for what was issued, and close the engine."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        *submitters, collector = self._threads
        for thread in submitters:
            thread.join()
        self._handle.close()
        collector.join()


def settings_of(loadgen: Any, args: argparse.Namespace) -> Any:
    """LoadGen's settings for the scenario."""
    settings = loadgen.TestSettings()
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = round(args.duration_s * 1_000)
    settings.min_query_count = 1
    if args.scenario == "server":
        settings.scenario = loadgen.TestScenario.Server
        settings.server_target_qps = args.target_qps
        settings.server_target_latency_ns = round(args.latency_ms * 1e6)
        settings.server_target_latency_percentile = 0.99
        # Queries that are due at once come in one call.
        settings.server_coalesce_queries = True
    else:
        settings.scenario = loadgen.TestScenario.Offline
        settings.offline_expected_qps = args.target_qps
    return settings


def read_summary(path: Path) -> dict[str, str]:
    """The lines ``name: value`` of LoadGen's summary."""
    lines = [line.partition(":") for line in path.read_text().splitlines() if ":" in line]
    return {name.strip(): value.strip() for name, _, value in lines}


def run(args: argparse.Namespace) -> int:
    """One measurement; returns the exit status."""
    try:
        import mlperf_loadgen as loadgen  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise UserError(
            "LoadGen is not installed; pip install 'tessera-rec[mlperf]' brings it"
        ) from error
    generator = np.random.default_rng(args.seed)
    sizes = Pairs(args.least_pairs, args.most_pairs, args.mean_pairs).draw(args.queries, generator)
    queries = draw_queries(read_schema(args.package), sizes, args.ids_per_bag, generator)
    ids = args.batch_pairs * max(sum(args.ids_per_bag), 1) * 2
    options = EngineOptions(
        workers=args.workers,
        max_batch_samples=args.batch_pairs,
        max_batch_ids=max(ids, 1 << 18),
        max_queue_requests=args.inside,
        max_queue_samples=max(args.inside * args.most_pairs, 65_536),
        max_inflight_bytes=1 << 40,
        worker_niceness=0,
        log_level="warning",
    )
    handle = EngineHandle(args.package, options)
    # A thread that has the interpreter's lock gives it up soon: LoadGen's own thread waits for it.
    sys.setswitchinterval(1e-4)
    system = SystemUnderTest(
        loadgen,
        handle,
        queries,
        inside=args.inside,
        submitters=args.submitters,
    )
    system.warm_up(args.warm_up_s)
    # What lives now lives until the end: a collection in the test would look at all of it, holding
    # the interpreter's lock.
    gc.collect()
    gc.freeze()
    args.out.mkdir(parents=True, exist_ok=True)
    log = loadgen.LogSettings()
    log.log_output.outdir = str(args.out)
    log.log_output.copy_summary_to_stdout = False
    log.enable_trace = False
    sut = loadgen.ConstructFastSUT(system.issue, lambda: None)
    library = loadgen.ConstructQSL(len(queries), len(queries), lambda _: None, lambda _: None)
    began = time.perf_counter()
    loadgen.StartTestWithLogSettings(sut, library, settings_of(loadgen, args), log, "")
    loadgen.DestroyQSL(library)
    loadgen.DestroyFastSUT(sut)
    system.end()
    gc.unfreeze()
    summary = read_summary(args.out / "mlperf_log_summary.txt")
    rate = "Completed samples per second" if args.scenario == "server" else "Samples per second"
    samples_per_s = float(summary[rate])
    mean = system.pairs / max(system.answered, 1)
    figures = {
        "scenario": args.scenario,
        "verdict": summary["Result is"],
        "queries": system.answered,
        "failed": system.failed,
        "samples_per_s": round(samples_per_s, 1),
        "pairs_per_s": round(samples_per_s * mean),
        "mean_pairs": round(mean, 1),
        "p99_ms": round(float(summary["99.00 percentile latency (ns)"]) / 1e6, 3),
        "seconds": round(system.last_s - began, 1),
    }
    print(json.dumps(figures))
    if system.failed:
        print(f"{system.failed} queries were not answered: {system.failure}", file=sys.stderr)
    return 1 if system.failed or not system.answered else 0


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pairs = Pairs()
    add = parser.add_argument
    add("package", type=Path, metavar="MODEL.pt", help="the package to measure")
    add("--scenario", choices=["server", "offline"], required=True, help="LoadGen's scenario")
    add(
        "--target-qps",
        type=float,
        required=True,
        help="server: queries that come in a second; offline: those that are expected to be answered in one,"
        " from which LoadGen finds how many there are",
    )
    add("--duration-s", type=float, default=60.0, help="least duration, seconds (default 60)")
    add("--latency-ms", type=float, default=60.0, help="bound of the p99 in server (default 60)")
    add("--queries", type=int, default=1_024, help="distinct queries (default 1024)")
    add("--least-pairs", type=int, default=pairs.least, help="of a query (default 100)")
    add("--most-pairs", type=int, default=pairs.most, help="of a query (default 700)")
    add("--mean-pairs", type=float, default=pairs.mean, help="of all queries (default 270)")
    add(
        "--ids-per-bag",
        type=numbers,
        default=[1],
        metavar="N[,N...]",
        help="ids of every bag, or of each feature's (default 1)",
    )
    add("--batch-pairs", type=int, default=32_768, help="most pairs of a batch (default 32768)")
    add("--workers", type=int, help="threads that compute batches (default: as tessera-server)")
    add("--submitters", type=int, default=4, help="threads that submit queries (default 4)")
    add(
        "--warm-up-s",
        type=float,
        default=2.0,
        help="time for queries before the test, which count for nothing, seconds (default 2)",
    )
    add("--inside", type=int, default=8_192, help="queries in the engine at most (default 8192)")
    add("--seed", type=int, default=0, help="of the queries (default 0)")
    add("--out", type=Path, default=Path("mlperf-out"), help="folder for LoadGen's logs")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except UserError as error:
        print(f"mlperf.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
