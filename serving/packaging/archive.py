"""Write the package file: the scripted model, the golden answers and, last, the manifest."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tessera.errors import UserError
from tessera.serving.manifest import GOLDEN_RECORD, MANIFEST_RECORD, Manifest, RecordInfo
from tessera.serving.records import Records
from tessera.serving.torchscript import expected_deprecation

_EXTRA = "extra/"  # where torch.jit.save puts extra files, below the archive's top folder
_TOP_FOLDER = "model"  # torch names it like the file that it writes
_EPOCH_OF_ZIP = (1980, 1, 1, 0, 0, 0)  # torch's own records have no time either


def write_package(
    path: Path,
    module: torch.jit.ScriptModule,
    golden: bytes,
    manifest: Callable[[Mapping[str, RecordInfo]], Manifest],
) -> Manifest:
    """Write the package to ``path``, whole or not at all.

    The file is written and synced in a folder of its own beside ``path`` and then renamed, so
    that a server never sees half of it and a failure leaves the old file as it was.

    Args:
        path: the file to make or replace; its folder must exist.
        module: the scripted model.
        golden: the content of ``golden.bin``.
        manifest: makes the manifest once every other record's hash is known.

    Raises:
        UserError: the folder cannot be written to, or the disk is full.
    """
    try:
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        draft = folder / f"{_TOP_FOLDER}.pt"
        extra = {GOLDEN_RECORD.removeprefix(_EXTRA): golden}
        with expected_deprecation():
            torch.jit.save(module, str(draft), _extra_files=extra)
        made = manifest(Records(draft).hash_all())
        record = zipfile.ZipInfo(f"{_TOP_FOLDER}/{MANIFEST_RECORD}", date_time=_EPOCH_OF_ZIP)
        with zipfile.ZipFile(draft, "a") as archive:
            archive.writestr(record, made.to_bytes())
        _sync(draft)
        draft.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    except RuntimeError as error:
        # torch's writer reports a full disk this way.
        raise UserError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return made


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written: {error.strerror}; give another --out")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
