"""Reading what ``torch.distributed.checkpoint`` wrote, without running anything.

Its index, ``.metadata``, is a pickle, which torch reads with ``pickle.load``: a file from
elsewhere could run code.  Here only the classes that an index consists of are let through.
Tensors are read with torch's ``weights_only``; other objects are not read at all.
"""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tessera.training.distributed.checkpoint.basics import CheckpointError, Room
from tessera.training.distributed.checkpoint.digests import (
    INDEX,
    Records,
    digest,
    record_key,
    require_equal,
)

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}

# What reading a damaged pickle raises.
_DAMAGES = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError),
    *(LookupError, TypeError, ValueError),
)


def _enum_member(kind: object, name: str) -> Enum:
    """The member of an enumeration, which Python 3.11.0 to 3.11.3 write as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"{name!r} of {kind!r} is not a part of a checkpoint's index")
    return kind.__members__[name]


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index and nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the class if an index may contain it."""
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not a part of a checkpoint's index")


def _require_whole(index: Metadata) -> None:
    """Refuse an index whose parts lack what they say of tensors and records: pickle fills in what it is told to.

    Raises:
        UnpicklingError: a part is of another type.
        AttributeError: one is missing.
    """
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        sizes = [
            entry.size,
            *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes)),
        ]
        if not isinstance(entry.properties.dtype, torch.dtype) or not all(
            isinstance(size, torch.Size) for size in sizes
        ):
            raise pickle.UnpicklingError(f"what it says of {name!r} is not what a tensor has")
    for info in (index.storage_data or {}).values():
        is_named = isinstance(info.relative_path, str | os.PathLike)
        if not is_named or not isinstance(info.offset, int) or not isinstance(info.length, int):
            raise pickle.UnpicklingError(f"{info.relative_path!r} has a record without a place")


@dataclass(frozen=True)
class Piece:
    """Describes a part of a saved tensor and where it goes.

    Attributes:
        name: the saved tensor.
        offsets: where the part begins in it.
        target: filled in place; its shape is the part's.
    """

    name: str
    offsets: tuple[int, ...]
    target: Tensor


class SavedTensors:
    """The tensors in a folder that ``torch.distributed.checkpoint`` wrote.

    Args:
        folder: holds ``.metadata`` and the data files.
        room: where whole tensors are put; None: in memory.

    Raises:
        CheckpointError: the index is damaged or holds what no index does.
        OSError: it cannot be read.
    """

    def __init__(
        self, folder: Path, room: Room | None = None, *, records: Records | None = None
    ) -> None:
        self._folder = folder
        self._room = room
        self._records = records
        index = folder / INDEX
        try:
            with index.open("rb") as stream:
                metadata = _IndexUnpickler(stream).load()
            if isinstance(metadata, Metadata):
                _require_whole(metadata)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} is not a whole checkpoint: it has no .metadata"
            ) from error
        except OSError:
            raise
        except Exception as error:  # whatever pickle makes of damaged bytes
            raise CheckpointError(
                f"{index} is refused: it is damaged or no index ({error!r})"
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{index} is refused: it holds no index")
        for info in (metadata.storage_data or {}).values():
            path = str(info.relative_path)
            if path != os.path.basename(path) or path.startswith(".."):  # noqa: PTH119 - of a string from a file
                raise CheckpointError(
                    f"{folder} is refused: its index names the file {path!r} outside of it"
                )
        self._metadata = metadata

    def places(self) -> list[tuple[str, int, int]]:
        """File, offset and length of every record, in bytes."""
        infos = (self._metadata.storage_data or {}).values()
        return [(str(info.relative_path), info.offset, info.length) for info in infos]

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(
            name
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None: there is no such tensor."""
        entry = self._metadata.state_dict_metadata.get(name)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    @property
    def names_of_objects(self) -> list[str]:
        """Return the names of what is not a tensor, sorted; none of it is read."""
        return sorted(set(self._metadata.state_dict_metadata) - set(self.names))

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype."""
        return self._entry(name).properties.dtype

    def path(self, name: str) -> tuple[str | int, ...]:
        """The keys that lead to a tensor in the nested dictionary that was saved; its name where none was."""
        paths = self._metadata.planner_data
        found = paths.get(name) if isinstance(paths, dict) else None
        return tuple(found) if isinstance(found, tuple) and found else (name,)

    def cuts(self, name: str) -> tuple[int, list[int]]:
        """How many blocks of rows a saved matrix has, and where its blocks of columns begin."""
        places = [chunk.offsets for chunk in self._entry(name).chunks if len(chunk.offsets) == 2]
        rows, columns = {place[0] for place in places}, {place[1] for place in places}
        return max(len(rows), 1), sorted(columns) or [0]

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder} has no tensor {name!r}")
        return entry

    def empty(self, name: str) -> Tensor:
        """Return an empty tensor into which the whole of ``name`` fits."""
        entry = self._entry(name)
        empty = torch.empty if self._room is None else self._room.empty
        return empty(entry.size, dtype=entry.properties.dtype)

    def read(self, pieces: Iterable[Piece]) -> None:
        """Fill the target of every piece with what was saved.

        Raises:
            CheckpointError: a tensor is missing, too small, not wholly there or damaged.
            OSError: a file cannot be read.
        """
        by_chunk: dict[MetadataIndex, list[tuple[ReadItem, Tensor]]] = {}
        for piece in pieces:
            chunk = ChunkStorageMetadata(
                offsets=torch.Size(piece.offsets), sizes=piece.target.shape
            )
            found = create_read_items_for_chunk_list(piece.name, self._entry(piece.name), [chunk])
            covered = sum(item.lengths.numel() for item in found)
            if piece.target.dim() and covered != piece.target.numel():
                raise CheckpointError(
                    f"{self._folder} holds {covered} of {piece.target.numel()} numbers of "
                    f"{piece.name!r} at {list(piece.offsets)}"
                )
            for item in found:
                by_chunk.setdefault(item.storage_index, []).append((item, piece.target.detach()))
        try:
            self._read_chunks(by_chunk)
        except Exception as error:  # whatever zipfile and torch make of damaged bytes
            # EINVAL: a damaged index has led to a place before the file's first byte.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{self._folder} is damaged: {reason}") from error

    def _read_chunks(self, by_chunk: dict[MetadataIndex, list[tuple[ReadItem, Tensor]]]) -> None:
        """Read each saved chunk once, file by file, and copy its parts to where they go."""
        reader = FileSystemReader(self._folder)
        places = self._metadata.storage_data
        in_order = sorted(by_chunk, key=lambda i: (places[i].relative_path, places[i].offset))
        for path, chunks in groupby(in_order, key=lambda index: places[index].relative_path):
            with (self._folder / path).open("rb") as stream:
                for index in chunks:
                    part = reader._slice_file(stream, places[index])  # noqa: SLF001 - torch's view of a part of a file
                    self._verify(part, path, places[index])
                    saved = torch.load(part, map_location="cpu", weights_only=True)
                    for item, target in by_chunk[index]:
                        narrowed(target, item.dest_offsets, item.lengths).copy_(
                            narrowed(saved, item.storage_offsets, item.lengths)
                        )
                        if self._room is not None:
                            self._room.settle(target)

    def _verify(self, part: IO[bytes], path: str, place: Any) -> None:
        if self._records is None:
            return
        key = record_key(place.offset, place.length)
        expected = self._records.get(str(path), {}).get(key)
        require_equal(f"{self._folder / path}, bytes {key},", digest(part), expected)
        part.seek(0)


def narrowed(tensor: Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> Tensor:
    """The part of a tensor that begins at ``offsets``, a view."""
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
