"""Damage packages at random and see that each is refused: by ``tessera verify`` and by both servers.

    python -m tests.attack.packages [--count 3000] [--seed 0]

Every package, signed and unsigned, has bytes flipped, parts cut out or parts swapped.  Refused means: a status that
is not 0, one line that is not empty, and peak memory within 64 MB above the file's size.  Exit status 1: one
was not.

Python's commands run in this process, where importing torch takes a second once, and the C++ server as it is.
"""

from __future__ import annotations

import argparse
import io
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.commands import verify as verify_command
from tessera.serving.package.signing import generate_keys, read_private_key, sign_package
from tessera.serving.server.config import ModelSource
from tessera.serving.server.model.loader import PackageLoader
from tests.conformance.conformance_harness import CPP_PROGRAM
from tests.package_factory import package_file

ALLOWED_BYTES = 64 << 20

MEASURED = """
import os, sys
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""
"""Runs a program and prints its exit status and its peak memory in KiB.

The peak of a process counts what the one had that it was forked from, which therefore must be small.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended: its exit status, what it printed, how much more memory it took at its peak."""

    status: int
    said: str
    peak_bytes: int


Program = Callable[[Path], Outcome]
"""Takes a package's path."""


def damaged(content: bytes, draw: random.Random) -> bytes:
    """``content`` with bytes flipped, a part cut out, or two parts swapped; never as it was."""
    while True:
        data = bytearray(content)
        kind = draw.choice(("flip", "cut", "end", "swap"))
        if kind == "flip":
            for _ in range(draw.randrange(1, 9)):
                data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        elif kind == "cut":
            begin = draw.randrange(len(data))
            del data[begin : begin + draw.randrange(1, 5000)]
        elif kind == "end":
            del data[draw.randrange(len(data)) :]
        else:
            size = draw.randrange(1, 2000)
            first, second = sorted(draw.sample(range(0, len(data) - size, 64), 2))
            one, two = data[first : first + size], data[second : second + size]
            data[first : first + size], data[second : second + size] = two, one
        if data != content:
            return bytes(data)


def in_this_process(run: Callable[[], int]) -> Outcome:
    """``run`` here; what it returns, or the status of its error, is the exit status."""
    said = io.StringIO()
    before = _reset_peak()
    with redirect_stderr(said), redirect_stdout(said):
        try:
            status = run()
        except UserError as error:
            print(error)
            status = 2
    return Outcome(status=status, said=said.getvalue(), peak_bytes=_memory("VmHWM") - before)


def _reset_peak() -> int:
    """Forget the peak of resident memory; returns what is resident now, bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


def verify(key: Path | None) -> Program:
    """Return a program that does what ``tessera verify`` does."""
    parser = argparse.ArgumentParser()
    verify_command.add_arguments(parser)
    flags = [] if key is None else ["--public-key", str(key)]
    return lambda path: in_this_process(
        lambda: verify_command.run(parser.parse_args([str(path), *flags]))
    )


def python_server(key: Path | None) -> Program:
    """Return a program that does what ``tessera serve`` does before it serves a package."""
    loader = PackageLoader(verify_golden=True, public_keys=() if key is None else (str(key),))

    def run(path: Path) -> int:
        source = ModelSource(path=str(path))
        loader.identify(source)
        loader.load(source)
        return 0

    return lambda path: in_this_process(lambda: run(path))


def cpp_server(key: Path | None) -> Program:
    """Return ``tessera-server`` as a program; what it takes to refuse an empty file does not count."""
    flags = ["--host", "127.0.0.1", "--port", "0", "--http-port", "0", "--log-level", "error"]
    if key is not None:
        flags += ["--require-signature", "--public-key", str(key)]

    def run(path: Path) -> Outcome:
        with tempfile.TemporaryFile("w+", errors="backslashreplace") as stderr:
            command = [sys.executable, "-I", "-S", "-c", MEASURED]
            command += [str(CPP_PROGRAM), "--model", str(path), *flags]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, check=True)
            status, peak = map(int, done.stdout.split())
            stderr.seek(0)
            return Outcome(status=status, said=stderr.read(), peak_bytes=peak * 1024)

    with tempfile.NamedTemporaryFile() as nothing:
        least = run(Path(nothing.name)).peak_bytes

    def above_least(path: Path) -> Outcome:
        found = run(path)
        return replace(found, peak_bytes=found.peak_bytes - least)

    return above_least


def programs(key: Path | None) -> dict[str, Program]:
    """Return the programs that are here, by name; with a ``key`` they ask for its signature."""
    found = {"verify": verify(key), "python": python_server(key)}
    return found | ({"cpp": cpp_server(key)} if CPP_PROGRAM.exists() else {})


@dataclass(frozen=True, kw_only=True)
class Package:
    """A good package and the programs that read it."""

    name: str
    content: bytes
    programs: dict[str, Program]


def good_packages(folder: Path) -> list[Package]:
    """One without a signature and one that is signed and has to be."""
    path = package_file(folder)
    private, public = folder / "key.pem", folder / "key.pub.pem"
    generate_keys(private, public)
    signed = folder / "signed.pt"
    sign_package(path, read_private_key(private), signed)
    return [
        Package(name="unsigned", content=path.read_bytes(), programs=programs(None)),
        Package(name="signed", content=signed.read_bytes(), programs=programs(public)),
    ]


def complaints(outcome: Outcome, *, size: int) -> list[str]:
    """What is wrong with the refusal of a file of ``size`` bytes."""
    found = []
    if outcome.status not in {1, 2}:
        found.append(f"status {outcome.status}")
    if len(outcome.said.splitlines()) != 1 or not outcome.said.strip():
        found.append(f"said {outcome.said!r}")
    over = outcome.peak_bytes - size
    if over > ALLOWED_BYTES:
        found.append(f"{over >> 20} MB above the file's size")
    return found


def attack(
    folder: Path, packages: Sequence[Package], count: int, draw: random.Random
) -> Iterator[str]:
    """Damage ``count`` packages; yields a line for each that was not refused as it must be."""
    for number in range(count):
        package = packages[number % len(packages)]
        content = damaged(package.content, draw)
        path = folder / "damaged.pt"
        path.write_bytes(content)
        for name, run in package.programs.items():
            for complaint in complaints(run(path), size=len(content)):
                yield f"{package.name} package {number}, {name}: {complaint}"


def main() -> int:
    """Run the long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000, metavar="N", help="default 3000")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = good_packages(folder)
        failures = 0
        for line in attack(folder, packages, args.count, random.Random(args.seed)):
            print(line, flush=True)
            failures += 1
    who = ", ".join(packages[0].programs)
    print(f"{args.count} damaged packages, each read by {who}: {failures} complaints")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
