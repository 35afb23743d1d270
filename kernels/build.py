"""Builds ``kernels/lib/libtessera_ops.so`` against the torch of the running Python.

    python kernels/build.py [--jobs N] [--check-cuda [fast|optimized]] [--cuda-architectures 80;90;100]

A second run compiles only what changed; with ccache on the path, only what no checkout of this
user has compiled (`compiler_cache`).  Needs cmake and a C++20 compiler; the CUDA kernels are
built in where the installed torch is a CUDA build and nvcc is on the path.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
DEFAULT_BUILD = SOURCE.parent / "build" / "kernels"
LIBRARY = SOURCE / "lib" / "libtessera_ops.so"


def torch_root() -> Path:
    """The installed torch's folder, found without importing torch.

    Raises:
        SystemExit: torch is not installed in this Python.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("kernels/build.py: torch is not installed in this Python; install tessera first")
    return Path(spec.origin).parent


def find_cmake() -> str | None:
    """The cmake of this Python's environment, or else the one on the path."""
    beside = Path(sys.executable).with_name("cmake")
    return str(beside) if beside.is_file() else shutil.which("cmake")


def compiler_cache(checkout: Path) -> tuple[list[str], dict[str, str]]:
    """CMake's flags for ccache, where it is on the path, and the environment that it runs in.

    Paths in ``checkout`` are relative for ccache, so that what one checkout has compiled is there
    for another; its CCACHE_BASEDIR says which paths, unless the user has set it.
    """
    if shutil.which("ccache") is None:
        return [], dict(os.environ)
    return (
        ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"],
        {"CCACHE_BASEDIR": str(checkout), **os.environ},
    )


def build(
    *,
    build_folder: Path = DEFAULT_BUILD,
    jobs: int | None = None,
    check_cuda: str | None = None,
    cuda_architectures: str = "",
) -> None:
    """Configure and compile.

    Args:
        build_folder: where object files go.
        jobs: compilers at a time; one per core when None.
        check_cuda: also compile the CUDA sources for every supported GPU (needs nvcc only):
            "fast", or "optimized" as in a build for GPUs, which takes seven times as long; None: no.
        cuda_architectures: GPU generations as compute capability x 10, separated by semicolons;
            empty: all supported ones.

    Raises:
        SystemExit: cmake is missing.
        subprocess.CalledProcessError: a step failed; its output is on the terminal.
    """
    cmake = find_cmake()
    if cmake is None:
        sys.exit("kernels/build.py: cmake was not found; install it with: pip install cmake")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configured = (build_folder / "CMakeCache.txt").exists()
    launcher, environment = compiler_cache(SOURCE.parent)
    optimized = "ON" if check_cuda == "optimized" else "OFF"
    subprocess.run(
        [
            cmake,
            *("-S", str(SOURCE), "-B", str(build_folder), f"-DTORCH_ROOT={torch_root()}"),
            *([] if configured else generator),
            f"-DTESSERA_CHECK_OPTIMIZED={optimized}",
            *launcher,
            *([f"-DTESSERA_CUDA_ARCHITECTURES={cuda_architectures}"] if cuda_architectures else []),
        ],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,  # its errors go to stderr
    )
    targets = ["tessera_ops", *(["check_cuda"] if check_cuda else [])]
    parallel = str(jobs or os.cpu_count() or 1)
    subprocess.run(
        [cmake, "--build", str(build_folder), "--parallel", parallel, "--target", *targets],
        check=True,
        env=environment,
    )


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: one per core)")
    parser.add_argument(
        "--check-cuda",
        nargs="?",
        const="fast",
        choices=["fast", "optimized"],
        help="also compile the CUDA sources for all supported GPUs; needs nvcc, no GPU",
    )
    parser.add_argument(
        "--cuda-architectures",
        default="",
        metavar="LIST",
        help="GPU generations, such as '80;90' (default: all supported)",
    )
    args = parser.parse_args()
    build(
        jobs=args.jobs,
        check_cuda=args.check_cuda,
        cuda_architectures=args.cuda_architectures,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
