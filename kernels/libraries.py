"""Operator libraries: from the names in a package's manifest to loaded shared objects.

A package names the libraries whose operators its graph calls.  Only names of `LIBRARIES` are
ever loaded, so a package cannot make a server load a file of its choice.  Loading does not
import the Python package that ships the library: a server needs the operators alone, and
importing ``fbgemm_gpu`` costs seconds and registers far more than it needs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from tessera.errors import UserError
from tessera.releases import fbgemm_remedy, minor_of


class LibraryError(UserError):
    """An operator library is unknown, not installed, or cannot be loaded."""


@dataclass(frozen=True, kw_only=True)
class OperatorLibrary:
    """Where a library comes from.

    Attributes:
        package: the installed import package whose folder holds the file.
        operators: qualified names (``namespace::name``) that loading it must register.
        remedy: what to install where it is missing.
        file: the file inside the package's folder; ``<name>.so`` when empty.
    """

    package: str
    operators: tuple[str, ...]
    remedy: str
    file: str = ""


# What csrc/built_with.cpp leaves in the library, which is read before the library is loaded.
_BUILT_WITH = re.compile(rb"tessera operators for torch (\d+\.\d+)")
_INSTALL_FBGEMM = (
    "install it with: pip install 'tessera-rec[cpu]' (or 'tessera-rec[cuda]' for a GPU)"
)

LIBRARIES: dict[str, OperatorLibrary] = {
    "fbgemm_gpu_tbe_inference": OperatorLibrary(
        package="fbgemm_gpu",
        operators=("fbgemm::int_nbit_split_embedding_codegen_lookup_function",),
        remedy=_INSTALL_FBGEMM,
    ),
    "fbgemm_gpu_sparse_async_cumsum": OperatorLibrary(
        package="fbgemm_gpu",
        operators=("fbgemm::asynchronous_complete_cumsum",),
        remedy=_INSTALL_FBGEMM,
    ),
    "tessera_ops": OperatorLibrary(
        package="tessera",
        file="kernels/lib/libtessera_ops.so",
        operators=(
            "tessera::lookup",
            "tessera::dot_interaction",
            "tessera::linear",
            "tessera::linear_bf16",
            "tessera::dense_steps",
            "tessera::xxh64",
            "tessera::table_batch",
        ),
        remedy="build it with: make build (or python kernels/build.py)",
    ),
    # For the packager: the operators that quantize.  No package's graph calls them.
    "fbgemm_gpu_py": OperatorLibrary(
        package="fbgemm_gpu",
        operators=("fbgemm::FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf",),
        remedy=_INSTALL_FBGEMM,
    ),
}
"""Every library that a package may name."""


def library_path(name: str) -> Path:
    """The shared object of library ``name`` on this machine.

    Raises:
        LibraryError: the name is not in `LIBRARIES`, or its package is not installed.
    """
    library = LIBRARIES.get(name)
    if library is None:
        known = ", ".join(sorted(LIBRARIES))
        raise LibraryError(f"operator library {name!r} is unknown; known are: {known}")
    # Finding a top-level package's specification runs none of its code.
    spec = importlib.util.find_spec(library.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / (library.file or f"{name}.so")
        if path.is_file():
            return path
    raise LibraryError(
        f"operator library {name!r} was not found ({library.package} is not installed or has no "
        f"such file); {library.remedy}"
    )


@functools.cache
def torch_of(path: Path) -> str:
    """The minor release of torch, such as ``2.13``, that our operators in ``path`` were compiled with.

    Empty where the file does not say: it is another project's, or older than the mark.
    """
    found = _BUILT_WITH.search(path.read_bytes())
    return "" if found is None else found[1].decode()


def load_libraries(names: Iterable[str]) -> None:
    """Load each library once; one that is loaded already costs nothing.

    Raises:
        LibraryError: a name is unknown, its file is missing, it is Tessera's and built for another
            minor release of torch, the loader refuses it, or it does not register the operators
            that it is known for.
    """
    for name in names:
        path = library_path(name)
        library = LIBRARIES[name]
        built_with, running = (
            torch_of(path) if library.package == "tessera" else "",
            minor_of(torch.__version__),
        )
        if built_with and built_with != running:
            raise LibraryError(
                f"operator library {name!r} ({path}) was built with torch {built_with}, and running is torch "
                f"{torch.__version__}; pip install 'torch=={built_with}.*', or take a wheel of tessera-rec that was "
                f"made with torch {running} (in a checkout: python kernels/build.py)"
            )
        try:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call] # torch's own
        except OSError as error:
            raise LibraryError(
                f"operator library {name!r} ({path}) does not load with torch "
                f"{torch.__version__}: {error}; {_remedy(library)}"
            ) from error
        for operator in library.operators:
            namespace, _, short = operator.partition("::")
            if not hasattr(getattr(torch.ops, namespace), short):
                raise LibraryError(
                    f"operator library {name!r} ({path}) does not register {operator}; "
                    f"{library.remedy}"
                )


def _remedy(library: OperatorLibrary) -> str:
    """What to do about a library that is there and does not load: it is of another torch."""
    return fbgemm_remedy(torch.__version__) if library.package == "fbgemm_gpu" else library.remedy


def cpu_kernels() -> str:
    """The instruction set whose kernels the operators use here: scalar, avx2, avx512 or amx.

    Raises:
        LibraryError: the operators are not there, do not load, or are of an older tessera.
    """
    load_libraries(["tessera_ops"])
    library = ctypes.CDLL(str(library_path("tessera_ops")))
    try:
        name = library.tessera_cpu_kernels
    except AttributeError:
        remedy = LIBRARIES["tessera_ops"].remedy
        raise LibraryError(
            f"operator library 'tessera_ops' is older than this tessera; {remedy}"
        ) from None
    name.restype = ctypes.c_char_p
    found: bytes = name()
    return found.decode()


@functools.cache
def fbgemm_version() -> str:
    """The installed fbgemm-gpu's version, of whichever wheel; empty where there is none.

    A wheel of another make, which does not say what it installs, is found by a look at every file of every wheel.
    """
    for wheel in metadata.distributions():
        if "fbgemm_gpu" in (wheel.read_text("top_level.txt") or "").split():
            return wheel.version
    installed = metadata.packages_distributions().get("fbgemm_gpu", [])
    return metadata.version(installed[0]) if installed else ""
