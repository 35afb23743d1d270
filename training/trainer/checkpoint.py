"""Checkpoint files: written whole or not at all, loaded without running anything.

A checkpoint is one ``torch.save`` archive of tensors and plain containers, named
``step-0000001234.pt`` after the number of finished steps.  It holds the resolved config and
the feature names, so that the file alone can be packaged.

Writing: to a hidden temporary name in the same folder, ``fsync``, rename, ``fsync`` of the
folder.  Whatever moment the process dies at, every file that is named ``step-*.pt`` is whole,
and the newest of them is the latest checkpoint; there is no pointer to go stale.

Memory: the archive is streamed from the tensors' own storages.  The peak above the model is
one write buffer, not a second copy of the tables.  `load_checkpoint` maps the file, so that a
table is copied once, from the page cache into the model.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch

from tessera.errors import UserError

FORMAT = "tessera-checkpoint"
VERSION = 1
_NAME = re.compile(r"step-(\d{10})\.pt")
_TEMPORARY_SUFFIX = ".partial"


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or trusted."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        config: the resolved `ExperimentConfig` as plain containers.
        dense_names: names of the model's dense features, in column order.
        sparse_names: names of its sparse features, in key order.
        progress: position, best metric and counters; see `Progress`.
        model: every parameter and buffer by its unsharded name.
        fused_optimizer: state of the optimizer fused into the tables' backward.
        dense_optimizer: state of the dense part's optimizer.
        rng: state of torch's CPU generator, uint8.
    """

    config: dict[str, Any]
    dense_names: list[str]
    sparse_names: list[str]
    progress: dict[str, Any]
    model: dict[str, torch.Tensor]
    fused_optimizer: dict[str, Any]
    dense_optimizer: dict[str, Any]
    rng: torch.Tensor


def checkpoint_path(folder: Path, step: int) -> Path:
    """The name of the checkpoint of ``step`` finished steps in ``folder``."""
    return folder / f"step-{step:010d}.pt"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Every checkpoint of ``folder`` by its step, ascending; empty if there is no folder."""
    found = {}
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                found[int(match.group(1))] = path
    return dict(sorted(found.items()))


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step in ``folder``, or None."""
    return next(reversed(list_checkpoints(folder).values()), None)


def prune_checkpoints(folder: Path, keep: set[int]) -> None:
    """Delete what a killed writer left and every checkpoint whose step is not in ``keep``."""
    for leftover in folder.glob(f".*{_TEMPORARY_SUFFIX}"):
        leftover.unlink()
    for step, path in list_checkpoints(folder).items():
        if step not in keep:
            path.unlink()


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoint`` to ``path`` atomically; an older file of that name is replaced.

    Raises:
        CheckpointError: it cannot be written (disk full, no permission); nothing is left
            behind and every older checkpoint is as it was.
    """
    content = {"format": FORMAT, "version": VERSION, **vars(checkpoint)}
    try:
        write_atomically(path, lambda stream: _torch_save(content, stream))
    except OSError as error:
        older = latest_checkpoint(path.parent)
        kept = f"; the last whole checkpoint is {older}" if older else ""
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error.strerror or error}{kept}"
        ) from error


def _torch_save(content: dict[str, Any], stream: IO[bytes]) -> None:
    try:
        torch.save(content, stream)
    except RuntimeError as error:
        # After a failed write torch fails again while it closes the archive, and its second
        # error hides the first, which is the one that says "no space left on device".
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_atomically(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a new file that then takes the place of ``path``.

    The file is on the disk, and not only in the page cache, when this returns.

    Raises:
        OSError: the file cannot be written; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def load_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint; its tensors are mapped from the file, privately.

    Args:
        path: the file.
        verify: read the whole file once and compare its checksums first.  Without it only
            the few kilobytes that are not tensors are read.

    Raises:
        CheckpointError: the file is damaged, of another kind or version, or holds anything
            but tensors and plain containers.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise CheckpointError(f"{path} is not a Tessera checkpoint: it is compressed")
            damaged = archive.testzip() if verify else None
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: the checksum of {damaged} does not hold")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's own text advises to load without the safeguard; ours must not.
        raise CheckpointError(
            f"{path} is refused: it is damaged or holds objects other than tensors and plain "
            "containers, and loading those could run code; get the checkpoint from its source again"
        ) from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is not a whole Tessera checkpoint: {reason}") from error
    return _checked(path, content)


def _checked(path: Path, content: Any) -> Checkpoint:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a Tessera checkpoint; give a run folder's step-*.pt")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {content.get('version')!r}; this Tessera reads"
            f" version {VERSION}: use the Tessera that wrote it"
        )
    kinds = {
        "config": dict,
        "dense_names": list,
        "sparse_names": list,
        "progress": dict,
        "model": dict,
        "fused_optimizer": dict,
        "dense_optimizer": dict,
        "rng": torch.Tensor,
    }
    for item in fields(Checkpoint):
        if not isinstance(content.get(item.name), kinds[item.name]):
            raise CheckpointError(f"{path} is not a whole Tessera checkpoint: no {item.name}")
    return Checkpoint(**{item.name: content[item.name] for item in fields(Checkpoint)})
