"""How long rows take from a file to the answers: `tessera train` reads a growing folder and publishes, a server follows.

A model whose int8 package has about ``--megabytes`` is trained on one small file and packaged. Then ``tessera train --continue
... --publish`` reads a folder in which a file of ``--rows`` rows of random ids arrives each ``--every-s`` seconds, and publishes after
each file; one server at a time follows its log, and one call after the other is sent to it. Told are, of all files after the first
``--warm-up`` ones, the seconds to the first answer that knows all of its rows: from when its commit has its time, and from when the
file has its name, which is the way through reading, training, publishing, following. Files that come faster than the
trainer can read them wait for it.

The model is a DLRM with 26 tables of D=64 and 13 dense features; ids are drawn uniformly, so a file touches about
26 times as many rows of tables as it has rows. Trainer, server and client share the same CPUs.

    python -m tessera.serving.bench.fresh_training --folder DIR [--megabytes 20] [--rows 1024] [--seconds 20]

The size that is aimed at is ``--megabytes 500 --rows 3072 --every-s 3 --seconds 150``: 1% of the rows change with each file.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tessera.serving.bench.forward import DENSE, TABLES
from tessera.serving.bench.fresh_commits import Watcher
from tessera.serving.bench.freshness import PROGRAMS
from tessera.serving.bench.large_package import DIM, ROW_BYTES
from tessera.serving.bench.reload_servers import MODEL, read_requests, write_requests
from tessera.serving.commits.chain import LOG_FOLDER, commit_name
from tessera.serving.commits.file import read_commit
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import arguments, machine, print_head, print_row
from tessera.training.trainer.checkpoint import read_plain
from tessera.training.trainer.files import latest_checkpoint

if TYPE_CHECKING:
    from typing_extensions import Self

_START_S = 300.0
_AWAY_S = 60.0


def _config(folder: Path, rows: int, batch: int) -> Path:
    columns = {f"int_{number}": {"kind": "dense"} for number in range(DENSE)}
    columns |= {f"cat_{number}": {"kind": "categorical"} for number in range(TABLES)}
    config = {
        "data": {
            "format": "table",
            "path": str(folder / "first.parquet"),
            "valid_path": str(folder / "valid.parquet"),
            "split": "files",
            "columns": columns | {"click": {"kind": "label"}},
        },
        "model": {
            "arch": "dlrm",
            "embedding_dim": DIM,
            "rows": rows,
            "dense_layers": [512, 256],
            "over_layers": [512, 256],
        },
        "train": {
            "batch_size": batch,
            "dense_optimizer": {"name": "adam", "learning_rate": 1e-3},
            "checkpoint_every_steps": 1_000_000,
            "threads": 1,
        },
        "run": {"tensorboard": False, "report": False},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return path


def _write_rows(path: Path, rows: int, seed: int) -> None:
    """A file of random rows, which has its name once it is whole."""
    chance = np.random.default_rng(seed)
    columns: dict[str, Any] = {
        f"int_{number}": chance.random(rows, np.float32) for number in range(DENSE)
    }
    columns |= {f"cat_{number}": chance.integers(1 << 40, size=rows) for number in range(TABLES)}
    columns["click"] = chance.integers(2, size=rows)
    draft = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns), draft)
    draft.rename(path)


def _tessera(*command: object) -> None:
    """Run one of our commands; exit where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tessera", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"tessera {command[0]} ended with exit status {done.returncode}:\n{done.stdout}")


class Training:
    """``tessera train`` on a growing folder, publishing after each file; a context.

    Args:
        folder: of everything; ``first`` is the run that it goes on from.
        name: of this training.
        model: the model's folder in the repository.
        steps: of a file.
    """

    def __init__(self, folder: Path, name: str, model: Path, steps: int) -> None:
        first = latest_checkpoint(folder / "first" / "checkpoints")
        assert first is not None
        self.begin = int(read_plain(first)["progress"]["step"])
        self.steps = steps
        self.arrivals = folder / f"arrivals-{name}"
        self.log = folder / f"train-{name}.log"
        out = folder / f"run-{name}"
        for left in (self.arrivals, out):
            shutil.rmtree(left, ignore_errors=True)
        self.arrivals.mkdir()
        self._command = [
            sys.executable,
            "-m",
            "tessera",
            "train",
            "--continue",
            str(folder / "first"),
        ]
        self._command += ["--out", str(out), "--quiet", f"data.path={self.arrivals}"]
        self._command += ["data.follow={settle_s: 0, poll_s: 0.02}"]
        self._command += ["--publish", str(model), "--publish-every", f"{steps}steps"]

    def __enter__(self) -> Self:
        with self.log.open("w") as stream:
            self._process = subprocess.Popen(self._command, stderr=stream, stdout=stream)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        """End the program where the trainer has ended."""
        if self._process.poll() is not None:
            sys.exit(f"the trainer has ended:\n{self.log.read_text()}")


class Progress:
    """Which commit of a log is the first with all rows of a file; asked in the order of files."""

    def __init__(self, log: Path, training: Training) -> None:
        self._log, self._training = log, training
        self._commit, self._step = 0, training.begin

    def commit_of(self, file: int) -> int | None:
        """The commit's number; None: it is not there yet."""
        wanted = self._training.begin + self._training.steps * (file + 1)
        while self._step < wanted:
            path = self._log / commit_name(self._commit + 1)
            if not path.exists():
                return None
            self._commit += 1
            step = read_commit(path).commit.step
            assert step is not None
            self._step = step
        return self._commit


@dataclass
class Found:
    """What one server's run came to.

    Attributes:
        from_file_s: of each file after the warm-up, from its name to the first answer that knows its rows.
        from_commit_s: the same from the time that its commit has (``created_s``: the rows are collected, the file is not
            written yet).
        commit_mib: of the last commit.
    """

    from_file_s: list[float]
    from_commit_s: list[float]
    commit_mib: float


def measure(kind: str, folder: Path, package: Path, options: Any) -> Found:
    """One server's run."""
    repository = folder / f"models-{kind}"
    shutil.rmtree(repository, ignore_errors=True)
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    os.link(package, version / "model.pt")
    request = read_requests(write_requests(folder / "requests", package, 1))[0]
    flags = ["--model-repository", str(repository), "--follow", "--follow-poll-ms"]
    flags += [str(options.poll_ms)]
    steps = math.ceil(options.rows / options.batch)
    count = options.warm_up + math.ceil(options.seconds / options.every_s)
    put_in: list[int] = []
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(flags, PROGRAMS[kind]))
        training = stack.enter_context(Training(folder, kind, version.parent, steps))
        watcher = stack.enter_context(Watcher(server.address, request))
        progress = Progress(version / LOG_FOLDER, training)

        def give() -> None:
            number = len(put_in)
            _write_rows(training.arrivals / f"{number:06d}.parquet", options.rows, 2 + number)
            put_in.append(time.monotonic_ns())

        def wait_for(file: int, limit_s: float) -> int:
            until = time.monotonic() + limit_s
            while (commit := progress.commit_of(file)) is None or watcher.now < commit:
                training.check()
                if time.monotonic() > until:
                    sys.exit(f"file {file} was not answered with in {limit_s:.0f} s")
                time.sleep(0.002)
            return commit

        for number in range(options.warm_up):
            give()
            wait_for(number, _START_S)
        due = time.monotonic()
        for _ in range(options.warm_up, count):
            time.sleep(max(0.0, due - time.monotonic()))
            give()
            due += options.every_s
        last = wait_for(count - 1, _AWAY_S)
        size = (version / LOG_FOLDER / commit_name(last)).stat().st_size
        again = Progress(version / LOG_FOLDER, training)
        found = Found(from_file_s=[], from_commit_s=[], commit_mib=size / (1 << 20))
        epoch_ns = time.time_ns() - time.monotonic_ns()
        for file in range(options.warm_up, count):
            commit = again.commit_of(file)
            assert commit is not None
            # Where two commits were taken between two calls, the later one was seen alone.
            seen = min(at for one, at in watcher.seen_ns.items() if one >= commit)
            created_s = read_commit(version / LOG_FOLDER / commit_name(commit)).commit.created_s
            found.from_file_s.append((seen - put_in[file]) / 1e9)
            found.from_commit_s.append((seen + epoch_ns) / 1e9 - created_s)
    return found


def parse() -> Any:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for everything, made anew")
    parser.add_argument("--megabytes", type=float, default=20.0, help="of it (default 20)")
    parser.add_argument("--rows", type=int, default=1024, help="of a file (default 1024)")
    parser.add_argument("--batch", type=int, default=1024, help="samples of a step (default 1024)")
    parser.add_argument("--every-s", type=float, default=1.0, help="between files (default 1)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of files (default 20)")
    parser.add_argument("--warm-up", type=int, default=3, help="files before (default 3)")
    parser.add_argument("--poll-ms", type=int, default=200, help="of the server (default 200)")
    parser.add_argument("--servers", default="cpp,python", help="by commas (default cpp,python)")
    parser.add_argument("--cpus", default="0,1", help="of all together (default 0,1)")
    parser.add_argument("--json", type=Path, help="also write the seconds of each file")
    args = parser.parse_args()
    if args.rows % args.batch:
        parser.error(f"--rows {args.rows}: give a multiple of --batch {args.batch}")
    if args.warm_up < 1:
        parser.error(f"--warm-up {args.warm_up}: give at least 1")
    return args


def main() -> None:
    """Make the model, measure, print."""
    args = parse()
    os.sched_setaffinity(0, {int(cpu) for cpu in args.cpus.split(",")})
    folder: Path = args.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = int(args.megabytes * 1e6 / TABLES / ROW_BYTES)
    # As many steps as a file has: commits come at multiples of these.
    _write_rows(folder / "first.parquet", args.rows, 0)
    _write_rows(folder / "valid.parquet", args.batch, 1)
    begin = time.monotonic()
    config = _config(folder, rows, args.batch)
    _tessera("train", "--config", config, "--out", folder / "first", "--quiet", "train.epochs=1")
    package = folder / "model.pt"
    _tessera("package-model", folder / "first", "--out", package, "--name", MODEL, "--no-evaluate")
    print(
        f"{machine()} at the start; a package of {package.stat().st_size >> 20} MiB, trained and"
        f" packaged in {time.monotonic() - begin:.0f} s"
    )
    print_head(
        *("server", "files", "from its commit p50 / p99 s", "from the file p50 / p99 s"),
        "MiB of a commit",
    )
    results = {}
    for name in args.servers.split(","):
        found = measure(name, folder, package, args)
        results[name] = asdict(found)
        commit, file = (
            " / ".join(f"{value:.3f}" for value in np.quantile(took, (0.5, 0.99)))
            for took in (found.from_commit_s, found.from_file_s)
        )
        print_row(name, len(found.from_file_s), commit, file, f"{found.commit_mib:.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
