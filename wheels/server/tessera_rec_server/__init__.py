"""tessera-server, the C++ server of Tessera's packages, as the program of a Python environment.

The program is bin/tessera-server.  It finds its own libraries in lib/ and torch's in the folder of the torch
wheel beside this package, whatever PATH and LD_LIBRARY_PATH say.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

PROGRAM = Path(__file__).resolve().parent / "bin" / "tessera-server"
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
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
