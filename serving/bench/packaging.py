"""Measure packaging and loading by table size: time, memory, file size, read speed.

Checkpoints with random float32 tables (26 of D=64, small dense layers) are made in a process of
their own.  Per size, in turn:

* ``package-model --no-evaluate`` on the checkpoint, and as its peer ``plain``: the whole
  checkpoint in memory, FBGEMM's int8 rows, ``torch.save``;
* ``load_package`` of the file (every byte hashed, golden answers replayed), and as its peers
  ``torch.jit.load`` of the same file, which checks nothing, reading the file from the page cache
  and, after its pages were dropped, from the disk into one reused buffer, and into memory that is new.

Each is a process of its own, several rounds, medians.  Peak memory: ``anonymous`` is what no file
backs, read every 5 ms; ``resident`` is the kernel's own maximum, mapped file pages included, which
can be dropped at any time.

    python -m tessera.serving.bench.packaging [--sizes-mb 100 1000] [--dtype int8] [--dir FOLDER]
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tessera.training.bench.harness import (
    arguments,
    in_own_process,
    in_turns,
    machine,
    medians,
    print_head,
    print_row,
)

DIM = 64
TABLES = 26
DENSE = 13
POLL_S = 0.005
FEWEST_ROWS = 64
_FILL_ROWS = 1 << 16

_CONFIG: dict[str, dict[str, object]] = {
    "data": {"format": "criteo", "path": "none.tsv"},
    "model": {"embedding_dim": DIM, "dense_layers": [512, 256], "over_layers": [512, 256]},
}

_PLAIN = """
import sys, torch
from tessera.kernels.libraries import load_libraries
load_libraries(["fbgemm_gpu_py"])
model = torch.load(sys.argv[1], weights_only=True)["model"]
quantize = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
torch.save({k: quantize(v, 8) if v.dim() == 2 and len(v) > 1024 else v for k, v in model.items()},
           sys.argv[2])
"""

_OPEN = "stream = open(sys.argv[1], 'rb', buffering=0); buffer = bytearray(1 << 20)"
_DROP_PAGES = """
with open(sys.argv[1], "rb") as file:
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
"""
_IMPORT = "from tessera.serving.package.loading import load_package"
_READ = "while stream.readinto(buffer): pass"
_LOADS = {
    "load_package": (_IMPORT, "load_package(sys.argv[1])"),
    "torch.jit.load": (
        """
import warnings
from tessera.kernels.libraries import load_libraries
from tessera.serving.package.records import Records
warnings.simplefilter("ignore")
load_libraries(Records(Path(sys.argv[1])).manifest().operator_libraries)
""",
        "torch.jit.load(sys.argv[1])",
    ),
    "page cache": (_OPEN, _READ),
    "copy": (
        f"{_OPEN}; size = Path(sys.argv[1]).stat().st_size",
        """
buffer = memoryview(torch.empty(size, dtype=torch.uint8).numpy())
done = 0
while done < size: done += stream.readinto(buffer[done:done + (4 << 20)])
""",
    ),
    "disk": (_OPEN + _DROP_PAGES, _READ),
    "load_package, cold": (_IMPORT + _DROP_PAGES, "load_package(sys.argv[1])"),
}
"""What is done before the clock starts, and what it measures."""


def _timed(before: str, work: str) -> str:
    """A program that prints the seconds that ``work`` takes."""
    return f"""
import os, sys, time, torch
from pathlib import Path
{before}
begin = time.perf_counter()
{work}
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process: what it printed, how long it took, and its largest memory in bytes."""

    printed: str
    seconds: float
    anonymous: int
    resident: int


def run(command: Sequence[str]) -> Run:
    """Run a command to its end and watch its memory; exit with its error output where it fails."""
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        anonymous = 0
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            anonymous = max(anonymous, _anonymous(process.pid))
            time.sleep(POLL_S)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.stdout is not None
        printed = process.stdout.read()
        process.stdout.close()
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{command[:4]} ended with {process.returncode}: {errors.read()}")
    resident = usage.ru_maxrss * 1024
    return Run(printed=printed, seconds=seconds, anonymous=anonymous, resident=resident)


def _anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def make_checkpoint(path: Path, rows: int) -> None:
    """Write a checkpoint with ``rows`` rows a table; its tables are mapped, not in memory."""
    import torch  # noqa: PLC0415 - not in the process that measures

    from tessera.training.config import ExperimentConfig  # noqa: PLC0415
    from tessera.training.data.columns import (  # noqa: PLC0415
        DenseColumn,
        FeatureColumns,
        LabelColumn,
        SparseColumn,
    )
    from tessera.training.models.ranking import build_ranking_model  # noqa: PLC0415
    from tessera.training.trainer.checkpoint_file import Checkpoint, write_file  # noqa: PLC0415
    from tessera.training.trainer.progress import Progress  # noqa: PLC0415

    torch.manual_seed(0)
    plain = {**_CONFIG, "model": {**_CONFIG["model"], "rows": rows}}
    config = ExperimentConfig.from_plain(plain, name="bench")
    dense = [f"int_{index}" for index in range(DENSE)]
    sparse = [f"cat_{index}" for index in range(TABLES)]
    columns = FeatureColumns(
        dense=tuple(DenseColumn(name=name) for name in dense),
        sparse=tuple(SparseColumn(name=name) for name in sparse),
        labels=(LabelColumn(name="label"),),
    )
    shapes = build_ranking_model(config.model, dense, sparse, device="meta").state_dict()
    pattern = torch.randn(_FILL_ROWS, DIM) * 0.05
    state: dict[str, torch.Tensor] = {}
    for name, value in shapes.items():
        if value.dim() == 2 and len(value) == rows:
            file = path.with_suffix(f".{len(state)}")
            size = value.numel()
            flat = torch.from_file(str(file), shared=True, size=size, dtype=torch.float32)
            state[name] = flat.view(value.shape)
            for begin in range(0, rows, _FILL_ROWS):
                part = state[name][begin : begin + _FILL_ROWS]
                part.copy_(pattern[: len(part)])
            file.unlink()
        else:
            state[name] = torch.randn(value.shape) * 0.05
    write_file(
        path,
        Checkpoint(
            config=config.to_plain(),
            columns=columns.to_json(),
            fitted={},
            ranges=[],
            dense_names=dense,
            sparse_names=sparse,
            split_rows=[1, 1, 1],
            progress=Progress().to_plain(),
            model=state,
            fused_optimizer={},
            dense_optimizer={},
            rng=torch.get_rng_state(),
        ),
    )


def measure(size_mb: int, dtype: str, folder: Path, rounds: int) -> dict[str, float | str]:
    rows = max(FEWEST_ROWS, size_mb * 1_000_000 // (TABLES * DIM * 4))
    checkpoint, package = folder / "step-0000000000.pt", folder / "model.pt"
    in_own_process(make_checkpoint, checkpoint, rows)
    copy, program = folder / "plain.pt", [sys.executable, "-m", "tessera", "package-model"]
    flags = ["--out", str(package), "--dtype", dtype, "--no-evaluate"]
    ways = {
        "package": [*program, str(checkpoint), *flags],
        "plain": [sys.executable, "-c", _PLAIN, str(checkpoint), str(copy)],
    }
    packaged, plain = in_turns({n: partial(run, way) for n, way in ways.items()}, rounds).values()
    checkpoint_bytes = checkpoint.stat().st_size
    for file in (checkpoint, copy):
        file.unlink()
    commands = {
        name: [sys.executable, "-c", _timed(*load), str(package)] for name, load in _LOADS.items()
    }
    loads = in_turns({name: partial(run, command) for name, command in commands.items()}, rounds)
    seconds = medians({n: [float(one.printed) for one in runs] for n, runs in loads.items()})
    file_bytes = package.stat().st_size
    package.unlink()
    loaded = loads["load_package"]
    return {
        "tables": f"{size_mb} MB",
        "largest": rows * DIM * 4 / 1e6,
        "s": statistics.median(run.seconds for run in packaged),
        "anonymous": max(run.anonymous for run in packaged) / 1e6,
        "resident": max(run.resident for run in packaged) / 1e6,
        "plain s": statistics.median(run.seconds for run in plain),
        "plain resident": max(run.resident for run in plain) / 1e6,
        "file": file_bytes / 1e6,
        "smaller": checkpoint_bytes / file_bytes,
        **{f"{name} s": value for name, value in seconds.items()},
        "of page cache": seconds["page cache"] / seconds["load_package"],
        "of copy": seconds["copy"] / seconds["load_package"],
        "of disk, cold": seconds["disk"] / seconds["load_package, cold"],
        "load resident": max(run.resident for run in loaded) / 1e6,
        "load resident / file": max(run.resident for run in loaded) / file_bytes,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        *("--sizes-mb", "--tables-mb"),
        nargs="+",
        type=int,
        default=[100, 1000],
        help="float32 bytes of all tables together, MB (default: 100 1000)",
    )
    parser.add_argument("--dtype", default="int8", help="of the stored tables (default: int8)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--dir", type=Path, help="where files are made (default: a new folder)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON too")
    args = parser.parse_args()
    print(f"{machine()}; MB and seconds")
    results = []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for size in args.sizes_mb:
            results.append(measure(size, args.dtype, Path(folder), args.rounds))
            print(f"{size} MB of tables are measured", file=sys.stderr)
    packaging = ["tables", "largest", "s", "anonymous", "resident", "plain s", "plain resident"]
    split = [[*packaging, "file", "smaller"]]
    split.append(["tables", *(key for key in results[0] if key not in split[0])])
    for keys in split:
        print()
        print_head(*keys)
        for result in results:
            print_row(*(_cell(result[key]) for key in keys))
    if args.json:
        print(json.dumps(results, indent=1))


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    main()
