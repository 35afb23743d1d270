"""tessera-server, the C++ server of Tessera's packages, and tessera-load as programs of a Python environment.

The programs are in bin/.  They find their own libraries in lib/, and tessera-server torch's in the folder of the torch
wheel beside this package, whatever PATH and LD_LIBRARY_PATH say.
"""

import importlib.util
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

PROGRAM = Path(__file__).resolve().parent / "bin" / "tessera-server"
LOAD = PROGRAM.parent / "tessera-load"
_EXIT_USER_ERROR = 2


def main() -> NoReturn:
    """Become tessera-server, with this process's arguments."""
    beside = PROGRAM.parents[2]
    if not (beside / "torch" / "lib" / "libtorch_cpu.so").is_file():
        spec = importlib.util.find_spec("torch")
        where = "is not installed" if spec is None else f"is elsewhere ({spec.origin})"
        print(
            f"tessera-server: error: torch is not in {beside}, but {where}; install torch and "
            "tessera-rec-server into one environment",
            file=sys.stderr,
        )
        sys.exit(_EXIT_USER_ERROR)
    built_with, found = _torch_of_wheel(), _torch_in(beside / "torch")
    if built_with and found and ".".join(found.split(".")[:2]) != built_with:
        print(
            f"tessera-server: error: this program was built with torch {built_with}, and in {beside} is torch "
            f"{found}; pip install 'torch=={built_with}.*', or take a wheel of tessera-rec-server that was made "
            "with that torch",
            file=sys.stderr,
        )
        sys.exit(_EXIT_USER_ERROR)
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])


def load() -> NoReturn:
    """Become tessera-load, the load generator, with this process's arguments."""
    os.execv(LOAD, [str(LOAD), *sys.argv[1:]])


def _torch_of_wheel() -> str:
    """``2.13``, the minor release of torch that the wheel asks for; empty where its metadata is not there."""
    try:
        needs = metadata.requires("tessera-rec-server") or []
    except metadata.PackageNotFoundError:
        return ""
    found = next(filter(None, (re.match(r"torch\b.*>=(\d+\.\d+)", line) for line in needs)), None)
    return found[1] if found else ""


def _torch_in(folder: Path) -> str:
    """The version of the torch whose package is ``folder``, read without importing it; empty where it does not say."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"""^__version__\s*=\s*['"](\d+\.\d+[^'"]*)['"]""", text, re.MULTILINE)
    return found[1] if found else ""
