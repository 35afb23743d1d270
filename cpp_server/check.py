"""What only Clang and CUDA's headers can check of the C++ server, without building anything.

    python cpp_server/check.py [--build build/cpp/release]

Every source of the server is compiled, as far as its syntax, by Clang with its thread safety
analysis (``src/common/mutex.h`` says what is guarded by what), and the GPU's sources against CUDA's
headers, whether or not this LibTorch has CUDA.  What is not installed is said and left out: no
Clang, no CUDA headers, no build folder.  Exit status 1: a compiler complained.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SERVER = Path(__file__).resolve().parent
REPOSITORY = SERVER.parent
GPU_SOURCES = ("gpu_resources.cc", "gpu_session.cc", "gpu_runner.cc")
CUDA_FOLDERS = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", "/usr")
# A LibTorch without CUDA lacks this header, whose content matters to builds of torch alone.
GENERATED_HEADER = Path("c10/cuda/impl/cuda_cmake_macros.h")


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
    """Run both checks; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--build",
        type=Path,
        default=REPOSITORY / "build/cpp/release",
        help="a folder that build.sh made (default: build/cpp/release)",
    )
    build = parser.parse_args().build
    database = build / "compile_commands.json"
    if not database.exists():
        print(f"cpp_server/check.py: no {database}; run make build first")
        return 0
    entries = json.loads(database.read_text())
    good = True
    clang = shutil.which("clang++")
    if clang:
        good = run(clang_commands(entries, clang), build)
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
