"""Runs TorchRec's own unit tests on Tessera, beside TorchRec itself, and counts those that pass.

    python training/bench/torchrec_tests.py --checkout ~/torchrec [--only metrics] [--record FILE]

The tests of a checkout of pytorch/torchrec and the tools for tests of the installed TorchRec (of
the checkout, where the installed one has none) are copied to a folder of their own, and nothing
else of TorchRec. In the copies for Tessera `torchrec` is replaced by `tessera.training` in the
imports, as in `torchrec_programs.py`; a name that is not here fails the tests that use it, and not
the whole file (`missing_names.py`). Each file is run by pytest in a process with a time limit,
without a GPU, first with TorchRec. What counts are the tests that pass with TorchRec; a test that
uses private names (`unit_test_names.py`) is counted apart. `--one-process` leaves out tests that
start processes, `--together` saves time, `--lenient` is what a program may say that builds tensors
whose parts do not fit (`tessera.training.strict`). `--record` keeps TorchRec's results,
so that a later run with the same file runs Tessera's side alone.

The last line says how many of the tests that pass with TorchRec pass here.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import tessera
from tessera.training.bench.missing_names import guarded
from tessera.training.bench.program_rewrite import HOME, LIBRARY, moved
from tessera.training.bench.unit_test_names import tests_of_private_names

COPIES = "library_checks"  # the package of the copied files: neither library's
_OF_TESTS = re.compile(rf"\b{LIBRARY}((?:\.\w+)*?\.(?:tests|test_utils))\b")
_PARAMETER = re.compile(r"\[.*|_\d+(_.*)?$")
_REPORTER = '''"""Appends the result of each test to the file that RESULTS names; a test that takes too long fails."""
import json
import multiprocessing
import os
import signal

import pytest


def too_long(*_):
    """Ends the processes that a test started, and the test."""
    for process in multiprocessing.active_children():
        process.kill()
    pytest.fail("the test did not end in time", pytrace=False)


def no_processes(*_, **__):
    """Fails a test that starts a process."""
    pytest.fail("the test starts processes", pytrace=False)


if os.environ["ONE_PROCESS"] == "1":
    from torch.distributed.launcher import api

    multiprocessing.process.BaseProcess.start = api.launch_agent = no_processes


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """Lets a test run for LIMIT_S seconds at most."""
    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, float(os.environ["LIMIT_S"]))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_runtest_logreport(report):
    """Writes one line when a test is over, or when its preparation did not pass."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        lines = str(report.longrepr or "").strip().splitlines()
        errors = [line[2:] for line in lines if line.startswith("E  ")]
        with open(os.environ["RESULTS"], "a", encoding="utf-8") as file:
            said = (errors or lines or [""])[0].strip()
            file.write(json.dumps([report.nodeid, report.outcome, said]) + "\\n")


def pytest_collectreport(report):
    """Writes one line for a file that could not be imported."""
    if report.failed:
        errors = [x[2:] for x in str(report.longrepr).splitlines() if x.startswith("E  ")]
        with open(os.environ["RESULTS"], "a", encoding="utf-8") as file:
            said = (errors or ["could not be imported"])[-1].strip()
            file.write(json.dumps(["", "failed", said]) + "\\n")
'''


@dataclass(frozen=True)
class Limits:
    """How long tests may run, in seconds, and what they may do.

    Attributes:
        file_s: for a file, or for all of them where they run together.
        test_s: for a test.
        one_process: a test that starts a process fails, and does not count.
        lenient: Tessera checks sparse tensors where they are used (``TESSERA_STRICT=0``).
    """

    file_s: float
    test_s: float
    one_process: bool = False
    lenient: bool = False


Results = dict[str, tuple[str, str]]  # test -> what became of it, and the first line of its error


def test_files(checkout: Path, only: str) -> list[Path]:
    """Returns the files of unit tests below `checkout/torchrec`, relative to it."""
    root = checkout / LIBRARY
    found = (file.relative_to(root) for file in root.glob("**/tests/test_*.py"))
    return sorted(file for file in found if re.search(only, file.as_posix()))


def copy_tests(checkout: Path, scratch: Path, library: str) -> None:
    """Copies tests and their tools into `scratch/library_checks`, for one of the libraries."""
    spec = find_spec(LIBRARY)
    homes = [checkout / LIBRARY]
    if spec is not None and spec.origin is not None:
        homes.append(Path(spec.origin).parent)
    for home in homes:  # the installed tools last: they are of the release that is compared
        for folder in [*home.glob("**/tests"), *home.glob("**/test_utils")]:
            shutil.copytree(folder, scratch / COPIES / folder.relative_to(home), dirs_exist_ok=True)
    for folder in {each for path in scratch.rglob("*.py") for each in path.parents}:
        if folder.is_relative_to(scratch / COPIES):
            (folder / "__init__.py").touch()
    for file in (scratch / COPIES).rglob("*.py"):
        text = _OF_TESTS.sub(rf"{COPIES}\1", file.read_text(encoding="utf-8"))
        try:
            if library == HOME:
                text = guarded(moved(text), f"{COPIES}.missing_names")
            file.write_text(text, encoding="utf-8")
        except SyntaxError:
            file.unlink()
    shutil.copy(Path(__file__).with_name("missing_names.py"), scratch / COPIES)
    (scratch / "conftest.py").write_text(_REPORTER, encoding="utf-8")


def run(file: Path, scratch: Path, limits: Limits) -> Results:
    """Runs one file of tests and returns the results that there are when its time is over."""
    return run_together([file], scratch, limits)[file]


def run_together(files: Sequence[Path], scratch: Path, limits: Limits) -> dict[Path, Results]:
    """Runs files of tests in one process and returns the results that there are when its time is over."""
    output = scratch / "results.jsonl"
    output.unlink(missing_ok=True)
    paths = [str(scratch), str(Path(tessera.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(scratch),
         "-c", os.devnull, "--confcutdir", str(scratch), "--continue-on-collection-errors",
         *(str(scratch / COPIES / file) for file in files)],
        cwd=scratch,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONWARNINGS": "ignore",
            "RESULTS": str(output),
            "LIMIT_S": str(limits.test_s),
            "ONE_PROCESS": str(int(limits.one_process)),
            "TESSERA_STRICT": str(int(not limits.lenient)),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(limits.file_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results: dict[Path, Results] = {file: {} for file in files}
    if output.exists():
        for line in output.read_text(encoding="utf-8").splitlines():
            node, outcome, said = json.loads(line)
            path, _, test = node.partition("::")
            for file in files if not path else [Path(path).relative_to(COPIES)]:
                results[file][test.replace("::", ".")] = (outcome, said)
    return results


def passed(results: Results) -> set[str]:
    """Returns the tests that passed."""
    return {test for test, (outcome, _) in results.items() if outcome == "passed"}


def of_private_names(tests: Iterable[str], private: set[str]) -> set[str]:
    """Returns the tests that use private names.

    A parameter is part of no name, be it in brackets or, as `parameterized` has it, a number at the end.
    """
    return {test for test in tests if _PARAMETER.sub("", test) in private or test in private}


def _results(
    files: Sequence[Path], scratch: Path, limits: Limits, *, together: bool
) -> Iterator[tuple[Path, Results]]:
    """Runs files one after the other, or all in one process."""
    if together and files:
        yield from run_together(files, scratch, limits).items()
    elif files:
        yield from ((file, run(file, scratch, limits)) for file in files)


def rows(
    files: Sequence[Path],
    checkout: Path,
    limits: Limits,
    kept: dict[str, list[str]],
    *,
    together: bool = False,
) -> Iterator[tuple[str, int, int, int, int, Counter[str]]]:
    """Runs the files and yields for each: its name, tests, those that pass here, the same for private names.

    The last item counts why tests fail here. `kept` has the tests that pass with TorchRec by file,
    and is filled for the files that it does not have. ``together`` runs all files of a library in
    one process, which saves the time that each takes to import the library.
    """
    with tempfile.TemporaryDirectory(prefix="torchrec-tests-") as temporary:
        folders = {library: Path(temporary) / library for library in (HOME, LIBRARY)}
        for library, folder in folders.items():
            folder.mkdir()
            copy_tests(checkout, folder, library)
        unknown = [file for file in files if file.as_posix() not in kept]
        for file, results in _results(unknown, folders[LIBRARY], limits, together=together):
            kept[file.as_posix()] = sorted(passed(results))
        counting = [file for file in files if kept[file.as_posix()]]
        for file, results in _results(counting, folders[HOME], limits, together=together):
            name = file.as_posix()
            theirs = set(kept[name])
            source = (checkout / LIBRARY / file).read_text(encoding="utf-8")
            private = of_private_names(theirs, tests_of_private_names(source))
            ours = passed(results) & theirs
            whole = results.get("", ("", "did not end in time"))[1]
            why = Counter(results.get(test, ("", whole))[1] for test in theirs - ours - private)
            yield (
                name,
                len(theirs - private),
                len(ours - private),
                len(private),
                len(ours & private),
                why,
            )


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Runs TorchRec's unit tests on Tessera.")
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of TorchRec")
    parser.add_argument(
        "--only", default="", help="run files in whose paths this regular expression is found"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=300,
        help="seconds for one file, with --together for all of them (300)",
    )
    parser.add_argument("--test-limit-s", type=float, default=60, help="seconds for one test (60)")
    parser.add_argument(
        "--one-process", action="store_true", help="leave out tests that start processes"
    )
    parser.add_argument(
        "--together", action="store_true", help="run all files of a library in one process"
    )
    parser.add_argument("--lenient", action="store_true", help="run Tessera with TESSERA_STRICT=0")
    parser.add_argument("--record", type=Path, help="a JSON file that keeps TorchRec's results")
    parser.add_argument("--why", action="store_true", help="say why tests fail here, below a row")
    arguments = parser.parse_args()
    files = test_files(arguments.checkout, arguments.only)
    if not files:
        parser.error(f"--checkout: no file of tests fits --only {arguments.only}")
    record = arguments.record
    kept = json.loads(record.read_text()) if record is not None and record.exists() else {}
    if find_spec(LIBRARY) is None and not kept:
        parser.error("TorchRec is not installed here, and --record has no results of it")
    limits = Limits(
        arguments.limit_s, arguments.test_limit_s, arguments.one_process, arguments.lenient
    )
    begun, sums, causes = time.monotonic(), [0, 0, 0, 0], Counter[str]()
    print("| tests | public | pass here | private names | pass here |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name, *counts, why in rows(
        files, arguments.checkout, limits, kept, together=arguments.together
    ):
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
        causes += why
        print(f"| {name} | {' | '.join(map(str, counts))} |", flush=True)
        if record is not None:
            record.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        if arguments.why:
            for said, count in why.most_common():
                print(f"    {count}: {said[:200]}", flush=True)
    public, ours, private, ours_private = sums
    print(f"| together | {public} | {ours} | {private} | {ours_private} |")
    for said, count in causes.most_common(20):
        print(f"{count} fail: {said[:160]}")
    share = ours / public if public else 0.0
    print(f"{ours} of {public} tests of public names pass here ({share:.0%}); ", end="")
    print(f"of private names {ours_private} of {private}; {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
