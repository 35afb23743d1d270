"""Tables that go from a file to devices in one reading, compared with their hashes on the way.

The parts of tables that have hashes of their own (`Archive.parts`) are shared out among threads.  A thread reads a
piece into one of two staging buffers, hashes it there, starts its copy to the device and fills the other buffer while
the copy runs; before a buffer is filled again, its copy is waited for.  The buffers of GPUs are pinned, since only from
such memory a copy goes on beside the thread that started it.  Copies run on a stream of their thread's own, so that
they and the kernels of models that are answering do not wait for each other.

So the host holds two pieces for each thread, whatever the tables have.  What lies on a device before its part was
compared is bytes that nobody reads: tables are given out once all of them were compared and their copies have ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tessera.serving.package.archive import PIECE_BYTES, Archive
from tessera.serving.package.archive_parts import Part

STAGED_BYTES = 1 << 20
"""A staging buffer; a copy of so many bytes takes a GPU longer than starting it takes the host."""

_HASHED_BYTES = 256 << 10
"""What is read and hashed at once where nobody is served meanwhile.  It stays in a core's cache, and eight threads seldom
wait for the interpreter's lock, which each holds for some microseconds between two of these."""


class DeviceTables:
    """Reads tables of an archive to their devices.

    Args:
        archive: whose `check_headers` has passed.
        devices: by the name of the record of each table, where it goes, such as ``cuda:0``.
        staged_bytes: of a staging buffer, at most.
    """

    def __init__(
        self, archive: Archive, devices: Mapping[str, str], *, staged_bytes: int = STAGED_BYTES
    ) -> None:
        self._archive = archive
        self._sizes = {
            entry.name: entry.bytes for entry in archive.entries if entry.name in devices
        }
        self._devices = {name: torch.device(device) for name, device in devices.items()}
        self._pinned = any(device.type == "cuda" for device in self._devices.values())
        self._staged_bytes = staged_bytes
        self._tables: dict[str, Tensor] = {}
        self._allocated: dict[torch.device, torch.cuda.Event] = {}
        # Each thread takes one while it reads a part, and makes one where none is left.
        self._unused: list[_Staging] = []

    def read(self, progress: Callable[[int], None] = lambda _: None) -> dict[str, Tensor]:
        """Read and compare every table once; nothing is kept for another call.

        Args:
            progress: called with the bytes of each part that has been compared, from several threads.

        Returns:
            By record, ``[bytes]`` uint8 on its device, for use on any stream.

        Raises:
            ArchiveError: the file cannot be read, became shorter, or has other bytes than those listed; the memory
                of all tables has been freed.
            RuntimeError: a device has too little memory, likewise.
        """
        try:
            self._allocate()
            self._archive.each_part(
                [part for name in self._sizes for part in self._archive.parts(name)],
                lambda file, part: self._read_part(file, part, progress),
            )
            self._wait()
        except Exception:
            self._wait()  # A copy that still runs writes to that memory.
            for table in self._tables.values():
                # Frames of the error's traceback may refer to the tables for as long as somebody holds it.
                table.untyped_storage().resize_(0)
            raise
        else:
            return dict(self._tables)
        finally:
            self._tables.clear()
            self._allocated.clear()
            self._unused.clear()

    def _allocate(self) -> None:
        for name, size in self._sizes.items():
            device = self._devices[name]
            self._tables[name] = torch.empty(size, dtype=torch.uint8, device=device)
        for device in {table.device for table in self._tables.values() if table.is_cuda}:
            # The memory may be what kernels of this stream, which have not ended, use until then.
            self._allocated[device] = torch.cuda.current_stream(device).record_event()

    def _read_part(self, file: int, part: Part, progress: Callable[[int], None]) -> None:
        target = self._tables[part.name][part.begin : part.begin + part.bytes]
        step = PIECE_BYTES if self._archive.pace is not None else _HASHED_BYTES
        digest = hashlib.sha256()
        staging = self._take_staging()
        try:
            for begin in range(0, part.bytes, self._staged_bytes):
                piece = target[begin : begin + self._staged_bytes]
                place = staging.empty_buffer(len(piece))
                for read in self._archive.fill(file, part.offset + begin, place, step_bytes=step):
                    digest.update(read)
                staging.copy_to(piece)
        finally:
            self._unused.append(staging)
        self._archive.compare(part, digest.hexdigest())
        progress(part.bytes)

    def _take_staging(self) -> _Staging:
        try:
            return self._unused.pop()
        except IndexError:
            size = min(self._staged_bytes, max(self._sizes.values()))
            return _Staging(size, pinned=self._pinned, allocated=self._allocated)

    def _wait(self) -> None:
        """Wait for the copies of all threads, which have ended."""
        for staging in self._unused:
            staging.wait()


class _Staging:
    """The two staging buffers of one thread, filled in turns, and its streams.

    Args:
        size: bytes of a buffer.
        pinned: whether copies go to GPUs.
        allocated: by GPU, what copies to it wait for.
    """

    def __init__(
        self, size: int, *, pinned: bool, allocated: Mapping[torch.device, torch.cuda.Event]
    ) -> None:
        self._buffers = [_Buffer(size, pinned=pinned) for _ in range(2)]
        self._allocated = allocated
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def empty_buffer(self, size: int) -> memoryview:
        """Memory of ``size`` bytes to be filled, which `copy_to` copies next."""
        self._buffers.reverse()
        self._buffers[0].wait()
        return self._buffers[0].view[:size]

    def copy_to(self, target: Tensor) -> None:
        """Start the copy of the buffer that was filled last to ``target`` ``[bytes]`` uint8, on its device."""
        device = target.device
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own has no types
            self._streams[device].wait_event(self._allocated[device])
        self._buffers[0].copy_to(target, self._streams.get(device))

    def wait(self) -> None:
        """Wait until all copies have ended."""
        for buffer in self._buffers:
            buffer.wait()


class _Buffer:
    """Memory of the host from which one copy may be under way.

    Args:
        size: bytes of it.
        pinned: whether it is pinned; torch keeps pinned memory that is let go of for the next one who asks for some.

    Attributes:
        view: the memory.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.view: memoryview = self._memory.numpy().data
        self._copied: torch.cuda.Event | None = None

    def copy_to(self, target: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy the first bytes to ``target``, on ``stream`` where that is a GPU's."""
        with torch.cuda.stream(stream):
            target.copy_(self._memory[: len(target)], non_blocking=True)
        if stream is not None:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's own has no types
            self._copied.record(stream)

    def wait(self) -> None:
        """Wait until the copy has ended."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
