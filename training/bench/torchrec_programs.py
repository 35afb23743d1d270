"""Runs programs written for TorchRec on Tessera, beside TorchRec itself where it is installed.

Each program of the given checkouts is copied, `torchrec` is replaced by `tessera.training` in its
imports, sizes and devices are edited as `program_list.py` says, and it runs with a time limit on
CPUs and gloo. With TorchRec importable the same copy runs with the imports it had, from the same
weights and seeds, and the losses of all its steps are compared.

    python training/bench/torchrec_programs.py --checkout ~/torchrec --checkout ~/dlrm

The exit status is 1 if a program did not run or trained otherwise than with TorchRec.
"""

import argparse
import importlib.util
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tessera
from tessera.training.bench.program_list import PROGRAMS, Program
from tessera.training.bench.program_rewrite import HOME, LIBRARY, cells_as_source, moved

RTOL = 1e-4  # of losses after some twenty steps: sums in another order of float32


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of one program with one library.

    Fields:
        status: `runs`, `fails`, `too slow`.
        seconds: How long it took.
        losses: What `backward` was called on in each process, by rank and time.
        last_line: The last line of the output of a run that failed.
    """

    status: str
    seconds: float
    losses: list[list[float]]
    last_line: str


def prepare(program: Program, checkout: Path, scratch: Path, library: str) -> None:
    """Copies the program into the folder `scratch`, edited, with `library` in its imports.

    Raises:
        ValueError: An edit matches nothing, so that the checkout is of another state than known.
    """
    source, copy = checkout / program.folder, scratch / program.folder
    copy.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, copy, dirs_exist_ok=True)
    else:
        shutil.copy(source, copy)
    for file, pattern, replacement in program.edits:
        path = copy / file if file else copy
        text, count = re.subn(pattern, replacement, path.read_text())
        if not count:
            raise ValueError(f"{program.name}: nothing in {file or program.folder} is {pattern}")
        path.write_text(text)
    for notebook in list(scratch.rglob("*.ipynb")):
        notebook.with_suffix(".py").write_text(cells_as_source(notebook.read_text()))
    if program.driver:
        (scratch / program.root / f"{program.module}.py").write_text(program.driver)
    if library == HOME:
        for path in scratch.rglob("*.py"):
            path.write_text(moved(path.read_text()))


def run(program: Program, scratch: Path, library: str, ranks: int, limit_s: float) -> Outcome:
    """Runs the prepared program in `ranks` processes, for `limit_s` seconds at most."""
    record, observer = scratch / "record", scratch / "observer"
    record.mkdir()
    observer.mkdir()
    shutil.copy(Path(__file__).with_name("program_observer.py"), observer / "sitecustomize.py")
    target = program.module
    if target.endswith(".ipynb"):
        command = [sys.executable, str(scratch / target.replace(".ipynb", ".py"))]
    elif program.tests:
        command = [sys.executable, "-m", "unittest", target]
    else:
        command = [sys.executable, "-m", target, *program.arguments]
    paths = [str(observer), str(Path(tessera.__file__).parents[1])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PROGRAM_RECORD": str(record),
        "PROGRAM_LIBRARY": library,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    begun = time.monotonic()
    outputs = [scratch / f"output-{rank}.txt" for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("wb") as file:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=scratch / program.root,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    status = _wait(processes, begun + limit_s)
    lines = [output.read_text(errors="replace").strip().splitlines() for output in outputs]
    losses = [
        [float(line) for line in file.read_text().split()] for file in sorted(record.iterdir())
    ]
    worst = next((i for i, process in enumerate(processes) if process.returncode), 0)
    return Outcome(
        status=status,
        seconds=time.monotonic() - begun,
        losses=losses,
        last_line=lines[worst][-1] if status != "runs" and lines[worst] else "",
    )


def _wait(processes: list[subprocess.Popen[bytes]], until: float) -> str:
    """Waits for all processes, or ends those that are left when one failed or time is over."""
    status = "runs"
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            status = "fails"
            break
        if time.monotonic() > until:
            status = "too slow"
            break
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "fails" if status == "runs" and any(p.returncode for p in processes) else status


def _free_port() -> int:
    """Returns a port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Returns the largest difference of two losses of a process, as a part of its largest finite loss.

    Infinite where the number of processes or of their losses differs, and where one of two losses
    alone is NaN or infinite. NaN at the same step of both counts as equal (`steps_of_nan`).
    """
    if [len(one) for one in ours] != [len(one) for one in theirs]:
        return math.inf
    worst = 0.0
    for own, other in zip(ours, theirs, strict=True):
        largest = max((abs(loss) for loss in other if math.isfinite(loss)), default=0.0) or 1.0
        for a, b in zip(own, other, strict=True):
            if a == b or (math.isnan(a) and math.isnan(b)):
                continue
            apart = abs(a - b) / largest
            worst = max(worst, apart if math.isfinite(apart) else math.inf)
    return worst


def steps_of_nan(ours: list[list[float]], theirs: list[list[float]]) -> int:
    """Returns how many losses of all processes are NaN at the same step of both runs."""
    return sum(
        math.isnan(a) and math.isnan(b)
        for own, other in zip(ours, theirs, strict=False)
        for a, b in zip(own, other, strict=False)
    )


def compare(
    program: Program, checkout: Path, ranks: int, limit_s: float, keep: Path | None
) -> bool:
    """Runs one program on `ranks` processes with each library, and prints one row of the report."""
    missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
    title = f"| {program.name} | {ranks} |"
    if missing:
        print(f"{title} needs {', '.join(missing)}, which is not installed | | | | |", flush=True)
        return True
    outcomes = {}
    for library in [HOME, *([LIBRARY] if importlib.util.find_spec(LIBRARY) else [])]:
        with tempfile.TemporaryDirectory(prefix="torchrec-program-") as temporary:
            scratch = Path(temporary)
            prepare(program, checkout, scratch, library)
            outcomes[library] = run(program, scratch, library, ranks, limit_s)
            if keep is not None:
                name = re.sub(r"\W+", "-", f"{program.name}-{ranks}-{library}")
                shutil.copytree(scratch, keep / name, dirs_exist_ok=True)
    ours, theirs = outcomes[HOME], outcomes.get(LIBRARY)
    steps = len(ours.losses[0]) if ours.losses else 0
    cells = [ours.status, f"{ours.seconds:.0f} s", str(steps), _last(ours)]
    good = ours.status == "runs"
    if theirs is not None and theirs.status == "runs":
        apart = difference(ours.losses, theirs.losses) if ours.losses or theirs.losses else 0.0
        nan = steps_of_nan(ours.losses, theirs.losses)
        said = f"{apart:.0e} apart" + (f", {nan} losses are NaN in both" if nan else "")
        cells.append(f"{_last(theirs)} ({said})" if theirs.losses else "runs")
        good = good and apart <= RTOL
    else:
        cells.append(f"{theirs.status}: {theirs.last_line[:100]}" if theirs else "")
    print(f"{title} {' | '.join(cells)} |", flush=True)
    if ours.status != "runs":
        print(f"    {ours.last_line[:300]}", flush=True)
    return good


def _last(outcome: Outcome) -> str:
    """Returns the last loss of the first process as text."""
    return f"{outcome.losses[0][-1]:.7f}" if outcome.losses and outcome.losses[0] else ""


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Runs TorchRec programs on Tessera.")
    parser.add_argument(
        "--checkout",
        action="append",
        type=Path,
        required=True,
        help="a checkout of pytorch/torchrec, facebookresearch/dlrm or mlcommons/inference; may be repeated",
    )
    parser.add_argument("--only", default="", help="run programs whose names contain this text")
    parser.add_argument("--small", action="store_true", help="run those that are small alone")
    parser.add_argument("--ranks", type=int, help="run with this many processes alone")
    parser.add_argument("--limit-s", type=float, default=300, help="seconds for one run (300)")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the copies and their output")
    arguments = parser.parse_args()
    found = [
        (program, checkout)
        for program in PROGRAMS
        for checkout in arguments.checkout
        if (checkout / program.folder).exists()
        and arguments.only in program.name
        and (program.small or not arguments.small)
    ]
    if not found:
        parser.error("--checkout: no program of the list is in the given folders")
    print("| program | ranks | outcome | time | steps | last loss | TorchRec's |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    good = [
        compare(program, checkout, ranks, arguments.limit_s, arguments.keep)
        for program, checkout in found
        for ranks in program.ranks
        if arguments.ranks in (None, ranks)
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
