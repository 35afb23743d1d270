"""Large buffers in a file instead of memory: packaging then needs no room for its result.

The quantized tables are written once, read when the model is evaluated and saved, and gone.  Kept in
a mapped file, their pages belong to the page cache: the kernel writes them out and takes them back
when memory is short, and a process may stay far below the size of what it packages.
"""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tessera.errors import UserError

SPILLED_FROM_BYTES = 64 << 20
"""Smaller buffers stay in memory."""

RELEASED_FROM_BYTES = 1 << 20
"""The pages of smaller tensors are kept: to ask whose they are, the kernel looks at every page of the process."""

# <asm-generic/mman-common.h>; the second loses what was written to a private mapping.
_MADV_RANDOM = 1
_MADV_DONTNEED = 4
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Spill:
    """Makes buffers whose memory is a file that nobody else sees.

    They lie in ``folder``, on a disk with room for the quantized tables; ``buffers`` are those made so
    far.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.buffers: list[Tensor] = []

    def zeros(self, size: int) -> Tensor:
        """``[size]`` uint8, all zero; a `UserError` where the disk has no room for it.

        The file has no name any more when this returns; its space is freed with the tensor.
        """
        if size < SPILLED_FROM_BYTES:
            return torch.zeros(size, dtype=torch.uint8)
        try:
            descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".tables.")
            try:
                # Room that is promised now cannot be missing later, when writing to the
                # mapping would end the process.
                os.posix_fallocate(descriptor, 0, size)
                buffer = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
            finally:
                os.close(descriptor)
                Path(name).unlink()
        except OSError as error:
            raise UserError(
                f"{self._folder} has no room for {size} bytes of tables "
                f"({error.strerror}); give an --out on a larger disk"
            ) from error
        # Page by page: a look at one row must not map megabytes around it.
        _advise(buffer, _MADV_RANDOM)
        self.buffers.append(buffer)
        return buffer


class SpilledRoom:
    """Keeps the tensors of a checkpoint of several ranks in files, as `Spill` does buffers."""

    def __init__(self, folder: Path) -> None:
        self._spill = Spill(folder)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to be filled; small ones are in memory."""
        size = math.prod(shape) * dtype.itemsize
        return self._spill.zeros(size).view(dtype).view(tuple(shape))

    def settle(self, tensor: Tensor) -> None:
        """Let go of the tensor's pages; their content is in its file."""
        if tensor.nbytes >= SPILLED_FROM_BYTES:
            MappedPages(tensor).release(tensor)


class MappedPages:
    """Lets the pages of a mapped tensor on the CPU go once they have been used.

    Values stay as they are, and the pages stay in the page cache; they are just no longer this
    process's.  For a small tensor, one in ordinary memory, or a private mapping (of a checkpoint) that
    somebody has written to, nothing happens.  From now on nobody writes to a tensor whose mapping is private.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._of_file = (
            tensor.device.type == "cpu"
            and tensor.nbytes >= RELEASED_FROM_BYTES
            and _lies_in_its_file(tensor.data_ptr())
        )

    def release(self, part: Tensor) -> None:
        """Let go of the pages that only ``part``, a contiguous piece of the tensor, lies in."""
        if self._of_file:
            _advise(part, _MADV_DONTNEED)


def _advise(part: Tensor, advice: int) -> None:
    """Tell the kernel something about the pages that only ``part`` lies in."""
    begin = -(-part.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    end = (part.data_ptr() + part.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    if end > begin:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _lies_in_its_file(address: int) -> bool:
    """Whether all of the mapping at ``address`` is a file's content, by proc(5)'s maps and smaps."""
    try:
        with Path("/proc/self/maps").open() as lines:
            rest = next((line.split() for line in lines if _holds(line, address)), None)
        if rest is None or rest[4] == "0":  # no file's
            return False
        return rest[1].endswith("s") or _has_no_page_of_its_own(address)
    except OSError:
        return False


def _holds(line: str, address: int) -> bool:
    """Whether the mapping that a line of proc(5)'s maps describes holds ``address``."""
    begin, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
    return begin <= address < end


def _has_no_page_of_its_own(address: int) -> bool:
    """Whether nobody has written to the private mapping at ``address``.

    Asked last: the kernel looks at every page of the process for smaps.
    """
    found = False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            if not line.split(" ", 1)[0].endswith(":"):  # a mapping's first line
                found = _holds(line, address)
            elif found and line.startswith("Anonymous:"):
                return line.split()[1] == "0"
    return False
