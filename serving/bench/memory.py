"""Measure the memory of the server and of the trainer against the size of their tables.

The server: packages with random weights (13 dense features, 26 int8 tables of D=64), each served
by ``tessera serve`` in a process of its own, read after loading and while 32 requests with
uniform ids are in flight.  The trainer: ``tessera train`` on generated data with 26 float32
tables of D=64 and row-wise Adagrad, read every 50 ms until it ends, so that evaluation,
checkpoints and the report are within.

Everything is read from the process itself (/proc/PID/smaps_rollup and status; Linux only).  The
first line of each table has almost no rows: what Python, torch and fbgemm take by themselves.
``per table byte`` is what a line has more than the first one, divided by its table bytes.

    python -m tessera.serving.bench.memory [--server-mb 50 200 800] [--trainer-mb 200 800]
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.serving.bench.forward import TABLES, dlrm
from tessera.serving.client import AsyncPredictorClient, Draw, RequestDrawer, encode_request
from tessera.serving.package.records import Records
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import (
    arguments,
    in_own_process,
    machine,
    print_head,
    print_row,
)

DIM = 64
INT8_ROW_BYTES = DIM + 4
FLOAT_ROW_BYTES = DIM * 4
FEW_ROWS = 16
IN_FLIGHT = 32
TRAINING_ROWS = 20_000
POLL_S = 0.05


@dataclass(frozen=True)
class Memory:
    """A process's resident memory and its peak in bytes; for other fields see proc(5).

    In ``pss``, shared pages are divided among their users; ``anonymous`` is what no file backs.
    """

    rss: int
    pss: int
    anonymous: int
    peak_rss: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        """Read process ``pid``; a `ProcessLookupError` where it is not there any more."""
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            status = Path(f"/proc/{pid}/status").read_text()
            return cls(
                rss=_kilobytes(rollup, "Rss"),
                pss=_kilobytes(rollup, "Pss"),
                anonymous=_kilobytes(rollup, "Anonymous"),
                peak_rss=_kilobytes(status, "VmHWM"),
            )
        except (FileNotFoundError, LookupError) as error:
            raise ProcessLookupError(pid) from error


def _kilobytes(text: str, key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise LookupError(key)  # a process that has ended has no memory fields
    return int(match[1]) * 1024


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """One package's server: its tables, its file, and its memory idle and under load."""

    table_bytes: int
    file_bytes: int
    loaded: Memory
    busy: Memory


def measure_server(rows: int, folder: Path, seconds: float) -> ServerMemory:
    """Make a package with ``rows`` rows a table, serve it, load it for ``seconds``."""
    path = folder / "memory.pt"
    # The float32 tables must not stay in this process.
    in_own_process(_make_package, rows, path)
    manifest = Records(path).manifest()
    drawer = RequestDrawer(manifest.schema, Draw(ids="uniform", mean_bag=3))
    requests = [encode_request(drawer.samples(10)) for _ in range(500)]
    with ServerProcess(["--model", str(path)]) as server:
        loaded = Memory.of(server.process.pid)
        busy = asyncio.run(_load(server.address, requests, server.process.pid, seconds))
    size = path.stat().st_size
    path.unlink()
    tables = sum(table.bytes for table in manifest.tables)
    return ServerMemory(table_bytes=tables, file_bytes=size, loaded=loaded, busy=busy)


def _make_package(rows: int, path: Path) -> None:
    write_model(dlrm(rows, "murmur3"), path, PackageOptions(name="memory"))


async def _load(address: str, requests: Sequence[bytes], pid: int, seconds: float) -> Memory:
    """Keep `IN_FLIGHT` requests in flight; returns the reading with the largest ``rss``."""
    end = time.monotonic() + seconds
    largest = Memory.of(pid)

    async def caller(client: AsyncPredictorClient, first: int) -> None:
        turn = first
        while time.monotonic() < end:
            await client.send(requests[turn % len(requests)])
            turn += IN_FLIGHT

    async def watch() -> None:
        nonlocal largest
        while time.monotonic() < end:
            largest = max(largest, Memory.of(pid), key=lambda memory: memory.rss)
            await asyncio.sleep(POLL_S)

    async with AsyncPredictorClient(address, timeout_s=30) as client:
        await asyncio.gather(watch(), *(caller(client, i) for i in range(IN_FLIGHT)))
    return largest


def measure_trainer(rows: int, data: Path, folder: Path) -> Memory:
    """Train one epoch with ``rows`` rows a table; returns the last reading before the end."""
    run_folder = folder / f"run-{rows}"
    command = [sys.executable, "-m", "tessera", "train", "--config", "demo", "--quiet"]
    command += [f"data.path={data}", f"model.rows={rows}", f"model.embedding_dim={DIM}"]
    command += ["model.dense_layers=[512, 256]", "model.over_layers=[512, 256]"]
    command += ["train.epochs=1", "--out", str(run_folder)]
    with (folder / "train.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        largest = Memory(0, 0, 0, 0)
        while process.poll() is None:
            try:
                largest = max(largest, Memory.of(process.pid), key=lambda memory: memory.peak_rss)
            except ProcessLookupError:
                break
            time.sleep(POLL_S)
        if process.wait():
            log.seek(0)
            sys.exit(f"memory: training failed:\n{log.read()}")
    shutil.rmtree(run_folder)
    return largest


def _rows(megabytes: float, row_bytes: int) -> int:
    return max(1, round(megabytes * 1e6 / (TABLES * row_bytes)))


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f}"


def report_server(megabytes: Sequence[float], folder: Path, seconds: float) -> None:
    print(f"\nServer, int8, MB; load: {IN_FLIGHT} requests of 10 samples in flight, {seconds:g} s")
    heads = ("tables", "file", "RSS loaded", "PSS loaded", "RSS under load", "peak RSS")
    print_head(*heads, "RSS under load per table byte", "peak per table byte")
    base: ServerMemory | None = None
    for rows in (FEW_ROWS, *(_rows(size, INT8_ROW_BYTES) for size in megabytes)):
        found = measure_server(rows, folder, seconds)
        base = base or found
        more = found.table_bytes - base.table_bytes
        grown = (found.busy.rss - base.busy.rss, found.busy.peak_rss - base.busy.peak_rss)
        ratios = [f"{size / more:.2f}" if more else "" for size in grown]
        sizes = (found.table_bytes, found.file_bytes, found.loaded.rss, found.loaded.pss)
        print_row(*map(_mb, (*sizes, found.busy.rss, found.busy.peak_rss)), *ratios)


def report_trainer(megabytes: Sequence[float], folder: Path) -> None:
    data = folder / "clicks.tsv"
    datagen = [sys.executable, "-m", "tessera", "datagen", "--rows", str(TRAINING_ROWS)]
    subprocess.run([*datagen, "--out", str(data)], check=True, stdout=subprocess.DEVNULL)
    print("\nTrainer, float32 and row-wise Adagrad, batches of 1024, MB")
    print_head("tables", "peak RSS", "peak per table byte")
    base: tuple[int, int] | None = None
    for rows in (FEW_ROWS, *(_rows(size, FLOAT_ROW_BYTES) for size in megabytes)):
        tables = TABLES * rows * FLOAT_ROW_BYTES
        peak = measure_trainer(rows, data, folder).peak_rss
        base = base or (tables, peak)
        more = tables - base[0]
        ratio = f"{(peak - base[1]) / more:.2f}" if more else ""
        print_row(_mb(tables), _mb(peak), ratio)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--server-mb",
        type=float,
        nargs="*",
        default=[50, 200, 800],
        help="int8 table sizes to serve, in MB (default: 50 200 800)",
    )
    parser.add_argument(
        "--trainer-mb",
        type=float,
        nargs="*",
        default=[200, 800],
        help="float32 table sizes to train, in MB (default: 200 800)",
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of load on each server (default: 5)"
    )
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        if args.server_mb:
            report_server(args.server_mb, Path(name), args.seconds)
        if args.trainer_mb:
            report_trainer(args.trainer_mb, Path(name))


if __name__ == "__main__":
    main()
