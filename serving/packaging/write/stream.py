"""Save a scripted module whose tables are larger than memory should have to hold.

torch's writer wants every tensor mapped and reads it twice.  Here it saves the module with small
stand-ins in the place of the spilled buffers (`tessera.serving.packaging.tables.spill`); the stand-ins' sizes
in the archive's ``data.pkl`` are then replaced by the real ones, and the real bytes go from
their file into the package piece by piece.  The records are, byte for byte, those that torch
would have written, but for some that would make a package depend on where it was made.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tessera.serving.package.layout import TOP_FOLDER
from tessera.serving.package.storages import DATA_RECORD, resized
from tessera.serving.package.torchscript import expected_deprecation, put_tensor
from tessera.serving.packaging.tables.spill import MappedPages

# No reader needs them.  The first is a hash of what the writer saw, the stand-ins; the others hold
# the paths of the sources on this machine.
_LEFT_OUT = ("/.data/serialization_id", ".debug_pkl")

_CHUNK_BYTES = 4 << 20
_RELEASE_BYTES = 64 << 20
# Odd, which no storage of numbers of two bytes or more can be; the next stand-in has two bytes more.
_STAND_IN_BYTES = 1_000_003


class Draft:
    """The records of a saved module, the spilled buffers' included.

    The draft archive is written at ``path``, whose stem is `TOP_FOLDER`, with ``extra`` files as for
    `torch.jit.save`.  ``module`` is unchanged afterwards; torch's writer does not touch its
    ``spilled`` buffers ``[bytes]`` uint8.
    """

    def __init__(
        self,
        path: Path,
        module: torch.jit.ScriptModule,
        spilled: Sequence[Tensor],
        extra: Mapping[str, bytes],
    ) -> None:
        self._path = path
        self._by_size = {
            _STAND_IN_BYTES + 2 * number: buffer for number, buffer in enumerate(spilled)
        }
        with expected_deprecation(), _stand_ins(module, self._by_size):
            torch.jit.save(module, str(path), _extra_files=dict(extra))

    @contextmanager
    def open(self) -> Iterator[dict[str, tuple[int, Iterator[bytes | memoryview]]]]:
        """Size and content of every record, by its name below the top folder."""
        with zipfile.ZipFile(self._path) as archive:
            yield {
                info.filename.partition("/")[2]: self._record(archive, info)
                for info in archive.infolist()
                if not info.filename.endswith(_LEFT_OUT)
            }

    def _record(
        self, archive: zipfile.ZipFile, info: zipfile.ZipInfo
    ) -> tuple[int, Iterator[bytes | memoryview]]:
        name = info.filename.partition("/")[2]
        if name == DATA_RECORD:
            content = resized(archive.read(info), self._sizes(archive))
            return len(content), iter([content])
        real = self._real(info)
        if real is not None:
            return len(real), _pieces_of(real)
        return info.file_size, _pieces(archive, info)

    def _sizes(self, archive: zipfile.ZipFile) -> dict[str, int]:
        """The real size of every storage that has a stand-in, by its number."""
        return {
            info.filename.rpartition("/")[2]: len(real)
            for info in archive.infolist()
            if (real := self._real(info)) is not None
        }

    def _real(self, info: zipfile.ZipInfo) -> Tensor | None:
        is_storage = info.filename.startswith(f"{TOP_FOLDER}/data/")
        return self._by_size.get(info.file_size) if is_storage else None


@contextmanager
def _stand_ins(module: torch.jit.ScriptModule, by_size: Mapping[int, Tensor]) -> Iterator[None]:
    """Put a tensor of the key's size in the place of every buffer."""
    names: dict[int, list[str]] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(buffer.data_ptr(), []).append(name)
    try:
        for size, buffer in by_size.items():
            stand_in = torch.zeros(size, dtype=torch.uint8)
            for name in names[buffer.data_ptr()]:
                put_tensor(module, name, stand_in)
        yield
    finally:
        for buffer in by_size.values():
            for name in names[buffer.data_ptr()]:
                put_tensor(module, name, buffer)


def _pieces(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(info) as content:
        while piece := content.read(_CHUNK_BYTES):
            yield piece


def _pieces_of(buffer: Tensor) -> Iterator[memoryview]:
    """The bytes of a buffer, of which little stays in memory."""
    pages = MappedPages(buffer)
    content = buffer.numpy().data
    for begin in range(0, len(buffer), _RELEASE_BYTES):
        end = min(begin + _RELEASE_BYTES, len(buffer))
        for first in range(begin, end, _CHUNK_BYTES):
            yield content[first : min(first + _CHUNK_BYTES, end)]
        pages.release(buffer[begin:end])
