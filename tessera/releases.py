"""Which releases of Python, torch and fbgemm-gpu go together: the one table of them.

torch's C++ interface differs between its minor releases, so everything with machine code is made for one of
them: fbgemm-gpu's wheels (whose own table this repeats), and Tessera's operators and C++ server.
docs/install.md says what was run on which pair.  The Makefile, pyproject.toml and the wheels are checked against
this table by tests/test_releases.py.
"""

from __future__ import annotations

import re

FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
"""The supported minor releases of torch, oldest first, and the fbgemm-gpu that was made for each."""

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""The supported releases of Python, oldest first."""

TORCH_MIN = next(iter(FBGEMM_OF_TORCH))
"""The oldest torch that may load a package that is written now."""


def minor_of(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


def after(release: str) -> str:
    """The next minor release: ``2.14`` of ``2.13``."""
    major, minor = release.split(".")
    return f"{major}.{int(minor) + 1}"


TORCH_BELOW = after(list(FBGEMM_OF_TORCH)[-1])
"""The first torch that may not."""


def with_torch(version: str, release: str) -> str:
    """``0.1.0+torch2.13``: the version of what was compiled with torch ``release``, as a local version of PEP 440.

    So the wheels of one version for several releases of torch have names and versions of their own, and pip takes the one
    that goes with the torch that it installs.  ``0.1.0`` in a requirement means each of them.
    """
    return f"{version}{'.' if '+' in version else '+'}torch{release}"


def without_torch(version: str) -> str:
    """``0.1.0`` of ``0.1.0+torch2.13``."""
    return re.sub(r"[+.]torch\d+\.\d+$", "", version)


def pair_is_known(torch_version: str, fbgemm_version: str) -> bool:
    """Whether the releases (``2.13.0+cpu``, ``1.8.0``) were made for each other."""
    return FBGEMM_OF_TORCH.get(minor_of(torch_version)) == minor_of(fbgemm_version)


def fbgemm_remedy(torch_version: str) -> str:
    """What to install so that FBGEMM goes with the torch of ``torch_version``."""
    release = minor_of(torch_version)
    fbgemm = FBGEMM_OF_TORCH.get(release)
    if fbgemm is not None:
        return (
            f"fbgemm-gpu {fbgemm} goes with torch {release}: pip install 'fbgemm-gpu-cpu=={fbgemm}.*' "
            "(or fbgemm-gpu for a GPU)"
        )
    newest, its_fbgemm = list(FBGEMM_OF_TORCH.items())[-1]
    return (
        f"Tessera takes torch {TORCH_MIN} to {newest}, as no fbgemm-gpu was made for torch {release}: "
        f"pip install 'torch=={newest}.*' 'fbgemm-gpu-cpu=={its_fbgemm}.*' (or fbgemm-gpu for a GPU)"
    )
