"""What only Clang's tools and CUDA's headers can check of the C++ server, without building anything.

    python cpp_server/check.py [--build build/cpp/release]

* clang-format: every source is as .clang-format wants it.
* clang-tidy with the checks of .clang-tidy, for the sources that do not include torch, whose
  headers take half a minute for each file.  A source in which nothing was found is looked at again
  only when it, a header of ours that it includes, the protocol's files, its command, the checks or
  clang-tidy have changed; a folder of the user's remembers that, for all checkouts.
* Clang's thread safety analysis of every source (``src/common/mutex.h`` says what is guarded by
  what).
* The GPU's sources are compiled, as far as their syntax, against CUDA's headers, whether or not
  this LibTorch has CUDA.

clang-format and clang-tidy are Debian 12's, release 14: other releases format differently and find
other things.  Where they are missing they are installed when this runs as root with apt-get.  What
is not there in the end is said and left out.  Exit status 1: a tool complained.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SERVER = Path(__file__).resolve().parent
REPOSITORY = SERVER.parent
GPU_SOURCES = ("gpu_resources.cc", "gpu_session.cc", "gpu_runner.cc")
CUDA_FOLDERS = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", "/usr")
# A LibTorch without CUDA lacks this header, whose content matters to builds of torch alone.
GENERATED_HEADER = Path("c10/cuda/impl/cuda_cmake_macros.h")
LLVM = "14"
FORMATTED = ("cpp_server", "kernels/csrc")
SUFFIXES = (".h", ".cc", ".cpp", ".cuh", ".cu")
TIDY_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera-clang-tidy"
TIDY_CACHE_DAYS = 30


def llvm_tool(name: str) -> str | None:
    """The path of ``name``, release `LLVM`; None, after a line that says so, where it is not."""

    def find() -> str | None:
        for path in filter(None, (shutil.which(f"{name}-{LLVM}"), shutil.which(name))):
            told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if re.search(rf"version {LLVM}\.", told.stdout):
                return path
        return None

    package = f"{name}-{LLVM}"
    if find() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"cpp_server/check.py: installing {package}")
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
        for command in (["apt-get", "update", "-q"], install):
            subprocess.run(command, capture_output=True, check=False)
    path = find()
    if path is None:
        print(f"cpp_server/check.py: no {name} {LLVM} here, left out; apt-get install {package}")
    return path


def formatted(clang_format: str, *, rewrite: bool) -> bool:
    """Whether every C++ file is as .clang-format wants it; ``rewrite``: it is now."""
    paths = sorted(
        str(path)
        for folder in FORMATTED
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in SUFFIXES
    )
    command = [clang_format, *(["-i"] if rewrite else ["--dry-run", "-Werror"]), *paths]
    return subprocess.run(command, check=False, cwd=REPOSITORY).returncode == 0


def own_includes(source: Path, found: dict[Path, bytes]) -> None:
    """Add ``source`` and the headers of ours that it includes, directly or not, to ``found``."""
    if source in found or not source.exists():
        return
    found[source] = source.read_bytes()
    for name in re.findall(rb'^#include "(.+)"', found[source], re.MULTILINE):
        for folder in (source.parent, SERVER / "src", REPOSITORY / "kernels"):
            own_includes(folder / name.decode(), found)


def tidy_commands(entries: list[dict[str, str]], clang_tidy: str) -> dict[str, list[str]]:
    """By the name of its mark in `TIDY_CACHE`: the command for each source without torch.

    A name is a digest of all that the outcome depends on, apart from the system's headers.
    """
    version = subprocess.run([clang_tidy, "--version"], capture_output=True, check=True).stdout
    rules = [REPOSITORY / ".clang-tidy", *sorted((REPOSITORY / "protos").rglob("*.proto"))]
    checks = [version, *(path.read_bytes() for path in rules)]
    commands = {}
    for source, (_, *words) in clang_commands(entries, "clang++").items():
        if any(word.endswith("torch/include") for word in words):
            continue
        read: dict[Path, bytes] = {}
        own_includes(Path(source), read)
        files = sorted((str(path.relative_to(REPOSITORY)), text) for path, text in read.items())
        anywhere = [word.replace(str(REPOSITORY), ".") for word in words]
        key = hashlib.sha256(repr((checks, anywhere, files)).encode()).hexdigest()
        commands[key] = [clang_tidy, "--quiet", source, "--", *words]
    return commands


def tidied(entries: list[dict[str, str]], clang_tidy: str, directory: Path) -> bool:
    """Whether clang-tidy finds nothing; prints what it finds."""
    TIDY_CACHE.mkdir(parents=True, exist_ok=True)
    commands = tidy_commands(entries, clang_tidy)
    old = time.time() - TIDY_CACHE_DAYS * 24 * 3600
    for mark in TIDY_CACHE.iterdir():
        if mark.stat().st_mtime < old:
            mark.unlink(missing_ok=True)

    def one(item: tuple[str, list[str]]) -> bool:
        key, command = item
        mark = TIDY_CACHE / key
        if mark.exists():
            mark.touch()
            return True
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
        if done.returncode:
            print(done.stdout)
            return False
        mark.touch()
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return all(list(pool.map(one, commands.items())))


def clang_commands(entries: list[dict[str, str]], clang: str) -> dict[str, list[str]]:
    """By source: its own command with Clang in the compiler's place."""
    commands = {}
    for entry in entries:
        source = Path(entry["file"])
        if SERVER / "src" not in source.parents:
            continue
        words = shlex.split(entry["command"])
        if Path(words[0]).name == "ccache":
            del words[0]
        output = words.index("-o")
        del words[output : output + 2]
        # gcc's own warnings are held by the build itself.
        words = [word for word in words[1:] if not word.startswith("-W") and word != "-c"]
        commands[str(source)] = [
            *(clang, "-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety"),
            *words,
        ]
    return commands


def gpu_commands(entries: list[dict[str, str]], cuda: Path, folder: Path) -> dict[str, list[str]]:
    """By source: the command of another source that uses torch, for the GPU's."""
    header = folder / GENERATED_HEADER
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n")
    words = next(
        shlex.split(entry["command"])
        for entry in entries
        if entry["file"].endswith("src/model/cpu_runner.cc")
    )
    if Path(words[0]).name == "ccache":
        del words[0]
    output = words.index("-o")
    del words[output : output + 2]
    words = [word for word in words if word != "-c" and not word.endswith("cpu_runner.cc")]
    words += ["-fsyntax-only", "-isystem", str(folder), "-isystem", str(cuda)]
    return {
        name: [*words, str(SERVER / "src/model" / name)]
        for name in GPU_SOURCES
        if not any(entry["file"].endswith(name) for entry in entries)
    }


def run(commands: dict[str, list[str]], directory: Path) -> bool:
    """Whether every command ends well; prints what those that do not say."""

    def one(item: tuple[str, list[str]]) -> bool:
        name, command = item
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
        if done.returncode:
            print(f"{name}:\n{done.stderr}")
        return done.returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return all(list(pool.map(one, commands.items())))


def main() -> int:
    """Run every check; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--build",
        type=Path,
        default=REPOSITORY / "build/cpp/release",
        help="a folder that build.sh made (default: build/cpp/release)",
    )
    parser.add_argument(
        "--format", action="store_true", help="rewrite the sources with clang-format, check nothing"
    )
    arguments = parser.parse_args()
    clang_format = llvm_tool("clang-format")
    if arguments.format:
        return 0 if clang_format is None or formatted(clang_format, rewrite=True) else 1
    good = clang_format is None or formatted(clang_format, rewrite=False)
    build = arguments.build
    database = build / "compile_commands.json"
    if not database.exists():
        print(f"cpp_server/check.py: no {database}; run make build first")
        return 0 if good else 1
    entries = json.loads(database.read_text())
    clang_tidy = llvm_tool("clang-tidy")
    if clang_tidy:
        good = tidied(entries, clang_tidy, build) and good
    clang = shutil.which("clang++")
    if clang:
        good = run(clang_commands(entries, clang), build) and good
    else:
        print("cpp_server/check.py: no clang++ here; thread safety was not checked")
    headers = (Path(folder) / "include" for folder in CUDA_FOLDERS if folder)
    cuda = next((path for path in headers if (path / "cuda_runtime_api.h").exists()), None)
    if cuda:
        with tempfile.TemporaryDirectory() as folder:
            good = run(gpu_commands(entries, cuda, Path(folder)), build) and good
    else:
        print("cpp_server/check.py: no CUDA headers here; the GPU's sources were not compiled")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
