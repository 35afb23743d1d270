"""The checkpoint of one process: a file, written whole or not at all, read without running anything.

It is one ``torch.save`` archive of tensors and plain containers, named ``step-0000001234.pt`` after
the number of finished steps.  It holds the resolved config and the feature names, so that the
file alone can be packaged.

Whatever moment the process dies at, every file that is named ``step-*.pt`` is whole, and the newest
of them is the latest checkpoint; there is no pointer to go stale.

Memory: the archive is streamed from the tensors' own storages.  The peak above the model is
one write buffer, not a second copy of the tables.  `read_file` maps the file, so that a
table is copied once, from the page cache into the model.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, get_origin, get_type_hints

import torch

from tessera.durable import replacing
from tessera.training.distributed.checkpoint.basics import CheckpointError
from tessera.training.trainer.checkpoint_versions import VERSION, upgraded
from tessera.training.trainer.files import latest_checkpoint

FORMAT = "tessera-checkpoint"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        config: the resolved `ExperimentConfig` as plain containers.
        columns: what the data's batches held; see `FeatureColumns.to_json`.
        fitted: sizes of what was fitted for their transforms; see `FittedSizes.to_json`.
        ranges: what the training rows hold of each dense column, see `ColumnRange.to_json`; empty
            where that is not known, as of checkpoints before version 3.
        dense_names: names of the model's dense features, in column order.
        sparse_names: names of its sparse features, in key order.
        split_rows: rows of the train, validation and test splits.
        progress: position, best metric and counters; see `Progress`.
        model: every parameter and buffer by its unsharded name, as training goes on from them.
        average: averages that stand in for some of them in evaluations and packages; often none.
        fused_optimizer: state of the optimizer fused into the tables' backward.
        dense_optimizer: state of the dense part's optimizer.
        rng: state of torch's CPU generator, uint8.
    """

    config: dict[str, Any]
    columns: dict[str, Any]
    fitted: dict[str, Any]
    ranges: list[Any]
    dense_names: list[str]
    sparse_names: list[str]
    split_rows: list[int]
    progress: dict[str, Any]
    model: dict[str, torch.Tensor]
    fused_optimizer: dict[str, Any]
    dense_optimizer: dict[str, Any]
    rng: torch.Tensor
    average: dict[str, torch.Tensor] = field(default_factory=dict)


_KINDS = {name: get_origin(hint) or hint for name, hint in get_type_hints(Checkpoint).items()}
_TENSORS = ("model", "average", "fused_optimizer", "dense_optimizer", "rng")
PLAIN_KINDS = {name: kind for name, kind in _KINDS.items() if name not in _TENSORS}
"""The types of the fields of a `Checkpoint` that are not tensors."""


def write_file(path: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoint`` to ``path`` atomically; an older file of that name is replaced.

    Raises:
        CheckpointError: it cannot be written (disk full, no permission); nothing is left
            behind and every older checkpoint is as it was.
    """
    content = {"format": FORMAT, "version": VERSION, **vars(checkpoint)}
    try:
        with replacing(path) as stream:
            _torch_save(content, stream)
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


def read_file(path: Path, *, verify: bool = True) -> Checkpoint:
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
    with path.open("rb"):
        pass  # from here on an OSError means that the archive leads to a place that is not there
    try:
        _check_archive(path, contents=verify)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        # torch's own text advises to load without the safeguard; ours must not.
        raise CheckpointError(
            f"{path} is refused: it is damaged or holds objects other than tensors and plain "
            "containers, and loading those could run code; get the checkpoint from its source again"
        ) from error
    except Exception as error:  # whatever zipfile, torch and their parsers make of damaged bytes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is not a whole Tessera checkpoint: {reason}") from error
    return _checked(path, content)


def _check_archive(path: Path, *, contents: bool) -> None:
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise CheckpointError(
                f"{path} is a TorchScript archive, as packages are; give a run or its checkpoint"
            )
        if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
            raise CheckpointError(f"{path} is not a Tessera checkpoint: it is compressed")
        damaged = archive.testzip() if contents else None
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged!r} does not hold")


def _checked(path: Path, content: Any) -> Checkpoint:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a Tessera checkpoint; give a run folder's step-*.pt")
    if content.get("version") not in range(1, VERSION + 1):
        raise CheckpointError(
            f"{path} has checkpoint version {content.get('version')!r}; this Tessera reads"
            f" versions 1 to {VERSION}: use the Tessera that wrote it"
        )
    try:
        content = upgraded(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a whole Tessera checkpoint: {error}") from error
    for name, kind in _KINDS.items():
        if not isinstance(content.get(name), kind):
            raise CheckpointError(f"{path} is not a whole Tessera checkpoint: no {name}")
    return Checkpoint(**{name: content[name] for name in _KINDS})
