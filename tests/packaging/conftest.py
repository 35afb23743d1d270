"""What the packager's tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tessera.kernels.libraries import LIBRARIES, LibraryError, load_libraries
from tests.package_factory import package_file
from tests.packaging.backends import EACH_BACKEND


@pytest.fixture(scope="session", autouse=True)
def _operators() -> Iterator[None]:
    # Without FBGEMM, as on a GPU host, its tests skip themselves.
    with contextlib.suppress(LibraryError):
        load_libraries(name for name in LIBRARIES if name.startswith("fbgemm"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small package that no test may write to."""
    return package_file(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session", params=EACH_BACKEND)
def each_package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package like `package`, for each backend."""
    return package_file(tmp_path_factory.mktemp("package"), backend=request.param)
