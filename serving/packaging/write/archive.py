"""Write the package file: the scripted model, the golden answers and, last, the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.serving.package.layout import TOP_FOLDER, ArchiveWriter
from tessera.serving.package.manifest import GOLDEN_RECORD, MANIFEST_RECORD, Manifest
from tessera.serving.package.operators import refusal, refused_operator
from tessera.serving.package.replace import replacing
from tessera.serving.package.scripted_source import SourceError, check_source
from tessera.serving.package.signed_record import RecordInfo
from tessera.serving.packaging.write.stream import Draft

_EXTRA = "extra/"  # where torch.jit.save puts extra files, below the archive's top folder


def write_package(
    path: Path,
    module: torch.jit.ScriptModule,
    golden: bytes,
    manifest: Callable[[Mapping[str, RecordInfo]], Manifest],
    *,
    spilled: Sequence[Tensor] = (),
    allow_ops: Sequence[str] = (),
) -> Manifest:
    """Write the package to ``path``, whole or not at all.

    torch writes a draft; its records are copied, piece by piece, into the archive that `FORMAT.md`
    describes.  The file is written and synced in a folder of its own beside ``path`` and then
    renamed, so that a server never sees half of it and a failure leaves the old file as it was.

    ``golden`` is the content of ``golden.bin``; ``manifest`` makes the manifest once every other
    record's hash is known; ``spilled`` are buffers of ``module`` to copy from where they are (see
    `tessera.serving.packaging.write.stream`); ``allow_ops`` are operators that the graph may call
    beside those that every package may.

    Raises:
        UserError: the folder cannot be written to, the disk is full, or the model or the manifest
            holds what no reader takes.
    """
    name = refused_operator(module, allow_ops)
    if name is not None:
        raise UserError(f"the model {refusal(name)}")
    with replacing(path) as target:
        extra = {GOLDEN_RECORD.removeprefix(_EXTRA): golden}
        # torch writes the file's name into the archive: it must not depend on the user's.
        place = target.parent / f"{TOP_FOLDER}.draft"
        try:
            draft = Draft(place, module, spilled, extra)
        except RuntimeError as error:
            # torch's writer reports a full disk this way.
            raise UserError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
        with draft.open() as records, target.open("w+b") as stream:
            writer = ArchiveWriter(stream)
            infos = {}
            for name in sorted(records):
                size, content = records[name]
                if name.startswith("code/"):
                    source = b"".join(content)
                    _check_source(name, source, allow_ops)
                    content = iter([source])
                written = writer.add(name, content, size)
                infos[name] = RecordInfo(
                    sha256=written.sha256,
                    bytes=written.bytes,
                    crc32=written.crc32,
                    chunks=written.chunks,
                )
            made = manifest(infos)
            last = made.to_bytes()
            try:
                Manifest.from_bytes(last)
            except ValueError as error:
                raise UserError(f"{path} would not be read by any server: {error}") from error
            writer.add(MANIFEST_RECORD, [last], len(last))
            writer.finish()
    return made


def _check_source(name: str, content: bytes, allow_ops: Sequence[str]) -> None:
    try:
        check_source(content, allow_ops)
    except SourceError as error:
        raise UserError(
            f"the model's source {name}: {error}; no server would open it: leave that part out, or let "
            "torch.fx trace it"
        ) from error
