"""Runs TorchEasyRec's tests of models and modules on Tessera, beside TorchRec itself, and counts those that pass.

    python training/bench/torcheasyrec_tests.py --checkout ~/TorchEasyRec [--only 'models/dlrm']

The package `tzrec` of a checkout of alibaba/TorchEasyRec is copied to a folder of its own, and its
protobuf modules are generated there. In the copy for Tessera `torchrec` is replaced by
`tessera.training` in the imports of every file, as in `torchrec_programs.py`; what stands for a name
that is not here raises when it is used (`missing_names.py`), and the report lists such names. The
packages that no registry has (`CLOSED`) are stood for in the same way, for both libraries. Nothing
else is edited. One process of pytest runs the files, on the CPU; where TorchRec is installed, a
second one runs the same files with it.

What TorchEasyRec needs beside TorchRec (protobuf below 5, grpcio-tools below 1.63, torchmetrics 1.0.3,
parameterized, anytree, confluent-kafka, pyodps, alibabacloud-credentials ...) is for an environment of
its own, where Tessera need not be installed: its own folder is put on the path.

The exit status is 1 if a test that passes with TorchRec, or any test where that is not installed,
does not pass here.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

import tessera
from tessera.training.bench.missing_names import guarded
from tessera.training.bench.program_rewrite import HOME, LIBRARY, moved

PACKAGE = "tzrec"
MODELS = (
    "dlrm",
    "dcn",
    "dcn_v2",
    "deepfm",
    "multi_tower",
    "multi_tower_din",
    "mmoe",
    "dssm",
    "dssm_v2",
)
"""The models of which tests are run where `--only` is not given; of modules it is every file."""
CLOSED = ("pyfg", "graphlearn", "graphlearn.python.data.values", "common_io")
"""Modules of packages that are in no registry: feature generation, graph sampling, table storage."""
_STAND_IN = '''"""Stands for a package that is in no registry; what is taken of it raises when it is used."""
from missing_names import Missing


def __getattr__(name):
    """Returns what stands for a name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{__name__}.{name}")
'''
Results = dict[str, tuple[str, str]]  # test -> passed, failed or skipped, and the first line said


def test_files(checkout: Path, only: str) -> list[str]:
    """Returns the files of tests to run, relative to the checkout."""
    root = checkout / PACKAGE
    found = [file.relative_to(root).as_posix() for file in sorted(root.rglob("*_test.py"))]
    wanted = only or rf"models/({'|'.join(MODELS)})_test\.py|modules/[^/]*"
    return [f"{PACKAGE}/{file}" for file in found if re.match(wanted, file)]


def copy_package(checkout: Path, scratch: Path, library: str) -> None:
    """Copies `tzrec` into `scratch` for one of the libraries, with stand-ins and generated protobuf modules.

    Raises:
        subprocess.CalledProcessError: The protobuf modules could not be generated.
    """
    shutil.copytree(checkout / PACKAGE, scratch / PACKAGE)
    shutil.copy(Path(__file__).with_name("missing_names.py"), scratch)
    for module in CLOSED:
        if find_spec(module.partition(".")[0]) is not None:
            continue  # installed after all
        folder = scratch
        for part in module.split("."):
            folder = folder / part
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").write_text(_STAND_IN, encoding="utf-8")
    protos = [path.relative_to(scratch).as_posix() for path in scratch.rglob("*.proto")]
    if protos:
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", "--python_out=.", *protos]
        subprocess.run(command, cwd=scratch, check=True)
    if library == HOME:
        for file in (scratch / PACKAGE).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if LIBRARY in text:
                file.write_text(guarded(moved(text), "missing_names"), encoding="utf-8")


def names_not_here(package: Path) -> list[str]:
    """Returns the names that the files of a package import from TorchRec and that Tessera has not."""
    missing = set()
    for file in package.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == LIBRARY:
                module = HOME + (node.module or "").removeprefix(LIBRARY)
                missing |= {
                    f"{node.module}.{a.name}" for a in node.names if not _is_here(module, a.name)
                }
    return sorted(missing)


def _is_here(module: str, name: str) -> bool:
    """Says whether a module has a name, or a module of that name below it."""
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def run(files: Iterable[str], scratch: Path, limit_s: float) -> Results:
    """Runs files of tests in one process of pytest and returns what became of each test.

    Raises:
        TimeoutError: They did not end within `limit_s` seconds.
    """
    report = scratch / "report.xml"
    paths = [str(scratch), str(Path(tessera.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with (scratch / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull,
             "--rootdir", str(scratch), "--confcutdir", str(scratch), "--junitxml", str(report),
             "--continue-on-collection-errors", *files],
            cwd=scratch,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "PYTHONWARNINGS": "ignore",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the tests did not end within {limit_s:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not report.exists():
        raise RuntimeError((scratch / "output.txt").read_text(errors="replace")[-2000:])
    return results_of(report.read_text(encoding="utf-8"))


def results_of(report: str) -> Results:
    """Reads pytest's report (JUnit XML); a file that could not be imported is one failed test of its name."""
    results: Results = {}
    for case in ET.fromstring(report).iter("testcase"):  # noqa: S314 - pytest's own
        test = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        outcome, said = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                said = next(iter(_error_lines(child)), "")
        results[test] = (outcome, said)
    return results


def _error_lines(element: ET.Element) -> list[str]:
    """Returns what a failed test said, the error itself first."""
    lines = (element.text or "").splitlines()
    errors = [line[2:].strip() for line in lines if line.startswith("E  ")]
    message = (element.get("message") or "").strip().splitlines()
    return [*errors[-1:], *message] if element.tag == "error" else [*message, *errors]


def of_file(test: str) -> str:
    """Returns the file of a test as its dotted path below the package."""
    parts = test.split(".")
    ends = next((i for i, part in enumerate(parts) if part.endswith("_test")), len(parts) - 1)
    return "/".join(parts[1 : ends + 1]) if parts[0] == PACKAGE else test


def report(ours: Results, theirs: Results | None) -> bool:
    """Prints one row for each file, then what does not pass; returns whether all passes that has to.

    What has to pass is what passes with TorchRec, and without TorchRec's results every test that is not skipped.
    """
    rows: dict[str, Counter[str]] = {}
    must = []
    for test in sorted({*ours, *(theirs or {})}):
        outcome, _ = ours.get(test, ("did not run", ""))
        peer, peer_said = (theirs or {}).get(test, ("did not run", ""))
        rows.setdefault(of_file(test), Counter()).update([f"ours {outcome}", f"theirs {peer}"])
        if peer == "failed":
            print(f"with TorchRec {test} fails: {peer_said[:200]}", flush=True)
        has_to = outcome != "skipped" if theirs is None else peer == "passed"
        if has_to and outcome != "passed":
            must.append(test)
    rows["together"] = sum(rows.values(), Counter[str]())
    print("| tests | pass with TorchRec | pass here | skipped here |\n| --- | --- | --- | --- |")
    for file, counts in rows.items():
        passed = "" if theirs is None else counts["theirs passed"]
        print(f"| `{file}` | {passed} | {counts['ours passed']} | {counts['ours skipped']} |")
    for test, (outcome, said) in sorted(ours.items()):
        if outcome == "failed":
            print(f"with Tessera {test} fails: {said[:300]}")
    return not must and rows["together"]["ours passed"] > 0


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Runs TorchEasyRec's tests on Tessera.")
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of TorchEasyRec")
    parser.add_argument(
        "--only", default="", help="run files whose paths below tzrec begin as this expression says"
    )
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds for a library (3600)")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the copies and their output")
    arguments = parser.parse_args()
    files = test_files(arguments.checkout, arguments.only)
    if not files:
        parser.error(f"--checkout: no file of tests fits --only {arguments.only}")
    missing = names_not_here(arguments.checkout / PACKAGE)
    print(
        f"{len(missing)} names that {PACKAGE} imports are not here: {', '.join(missing)}",
        flush=True,
    )
    results: dict[str, Results] = {}
    begun = time.monotonic()
    for library in [HOME, *([LIBRARY] if find_spec(LIBRARY) else [])]:
        with tempfile.TemporaryDirectory(prefix="torcheasyrec-tests-") as temporary:
            scratch = Path(temporary)
            copy_package(arguments.checkout, scratch, library)
            try:
                results[library] = run(files, scratch, arguments.limit_s)
            finally:
                if arguments.keep is not None:
                    shutil.copytree(scratch, arguments.keep / library, dirs_exist_ok=True)
    good = report(results[HOME], results.get(LIBRARY))
    print(f"{time.monotonic() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
