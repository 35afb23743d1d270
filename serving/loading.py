"""From a package file to something that answers: check everything, then open, then warm up.

The order is the safety: the file is read as a plain zip, its manifest understood, every
record's hash compared, the operator libraries and the torch version checked, and only then
does torch open the archive.  A file that fails a check has run nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.serving.golden import GoldenMismatchError, replay_golden
from tessera.serving.manifest import GOLDEN_RECORD, Manifest
from tessera.serving.records import PackageError, Records, file_identity, file_sha256
from tessera.serving.runner import Runner, TorchScriptRunner, zero_batch
from tessera.serving.torchscript import expected_deprecation, optimize

__all__ = ["LoadedPackage", "PackageError", "load_package", "open_checked"]

_MAX_GOLDEN_BYTES = 256 << 20
# TorchScript's executor plans anew for the first calls it sees of a kind: it profiles one,
# optimizes at the second, and the third is the steady state.
_WARM_UP_CALLS = 3
_WARM_UP_BATCH_SIZES = (1, 2, 8, 64)


@dataclass(frozen=True, kw_only=True)
class LoadedPackage:
    """A package that has passed every check and is ready for its first request.

    Attributes:
        manifest: what the package says of itself.
        runner: scores batches; may be called from several threads at once.
        sha256: SHA-256 of the whole file, lower-case hex.
        load_seconds: time from opening the file to being ready.
        path: the file.
    """

    manifest: Manifest
    runner: Runner
    sha256: str
    load_seconds: float
    path: Path


def load_package(
    path: str | Path, *, device: str = "cpu", verify_golden: bool = True
) -> LoadedPackage:
    """Check, open and warm up the package at ``path``.

    Side effect: see `tessera.serving.torchscript.optimize`.

    Args:
        path: a MODEL.pt that ``package-model`` wrote.
        device: the kind of device to run on; it must be the one the package was made for.
        verify_golden: replay the golden answers and compare.

    Raises:
        PackageError: the file is missing, damaged or changed, was made for another device or
            torch, needs an operator library that cannot be loaded, or does not give its golden
            answers.
    """
    begin = time.perf_counter()
    path = Path(path)
    identity, records, manifest = open_checked(path)
    if manifest.device != device:
        raise PackageError(
            path, f"was packaged for device {manifest.device!r}, asked for is {device!r}"
        )
    check_torch(path, manifest)
    try:
        load_libraries(manifest.operator_libraries)
    except LibraryError as error:
        raise PackageError(path, str(error)) from error
    digest = file_sha256(path)
    runner = TorchScriptRunner(_open_module(path, device))
    if file_identity(path) != identity:
        raise PackageError(path, "was changed while it was being loaded; load it again")
    warm_up(runner, manifest)
    if verify_golden:
        golden = records.read(GOLDEN_RECORD, max_bytes=_MAX_GOLDEN_BYTES)
        try:
            replay_golden(runner, golden, manifest.golden)
        except GoldenMismatchError as error:
            raise PackageError(path, f"does not give its golden answers: {error}") from error
        except ValueError as error:
            raise PackageError(path, str(error)) from error
    return LoadedPackage(
        manifest=manifest,
        runner=runner,
        sha256=digest,
        load_seconds=time.perf_counter() - begin,
        path=path,
    )


def open_checked(path: Path) -> tuple[tuple[int, int, int, int], Records, Manifest]:
    """Read the file as an archive and compare every record with the manifest.

    Returns:
        The file's identity (to be compared once the file has been used), its records, and the
        manifest.

    Raises:
        PackageError: see `load_package`.
    """
    records = Records(path)
    identity = file_identity(path)
    manifest = records.manifest()
    records.check(manifest.records)
    return identity, records, manifest


def check_torch(path: Path, manifest: Manifest) -> None:
    """Refuse a package that this torch may not run.

    Raises:
        PackageError: the running torch is outside the manifest's range.
    """
    versions = manifest.versions
    running = _major_minor(torch.__version__)
    try:
        oldest, below = _major_minor(versions.torch_min), _major_minor(versions.torch_below)
    except ValueError as error:
        raise PackageError(path, f"the manifest's torch range cannot be read: {error}") from error
    if not oldest <= running < below:
        raise PackageError(
            path,
            f"needs torch >={versions.torch_min},<{versions.torch_below}, running is "
            f"{torch.__version__}; install a torch of that range or package the model again",
        )


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _open_module(path: Path, device: str) -> Any:
    try:
        with expected_deprecation():
            module = torch.jit.load(  # type: ignore[no-untyped-call] # torch's own has no types
                str(path), map_location=device
            )
        return optimize(module)
    except RuntimeError as error:
        raise PackageError(path, f"torch cannot open it: {error}") from error


def warm_up(runner: Runner, manifest: Manifest) -> None:
    """Call the model until its executor has settled, with ids of both widths."""
    for batch_size in _WARM_UP_BATCH_SIZES:
        for wide_ids in (False, True):
            batch = zero_batch(manifest.schema, batch_size, wide_ids=wide_ids)
            for _ in range(_WARM_UP_CALLS):
                runner.forward(batch)
