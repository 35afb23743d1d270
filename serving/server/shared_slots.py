"""Memory that a server's processes share: what each has counted, and the state of the whole.

It is made before the processes are, which inherit it.  Each slot belongs to one process that writes; all may
read at any time, also when the writer was killed while it wrote: a slot has two buffers, of which the one
that is whole is named by a counter.
"""

from __future__ import annotations

import mmap
import struct
import zlib

_HEADER_BYTES = 64
_STATE, _RESTARTS = 0, 1
"""The header's first number is the server's state, the next how many processes were replaced."""

_LENGTH_AND_CRC = struct.Struct("<II")


class SharedSlots:
    """Slots for the processes of one server.

    Args:
        count: slots.
        capacity: the most bytes that a slot's content may have.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self.count = count
        self._capacity = capacity
        self._buffer_bytes = (_LENGTH_AND_CRC.size + capacity + 7) // 8 * 8
        self._slot_bytes = 8 + 2 * self._buffer_bytes
        self._memory = mmap.mmap(-1, _HEADER_BYTES + count * self._slot_bytes)
        self._numbers = memoryview(self._memory).cast("Q")

    @property
    def state(self) -> int:
        """A number that the supervisor sets; 0 at first."""
        return self._numbers[_STATE]

    @state.setter
    def state(self, state: int) -> None:
        self._numbers[_STATE] = state

    @property
    def restarts(self) -> int:
        """How many processes the supervisor has replaced."""
        return self._numbers[_RESTARTS]

    @restarts.setter
    def restarts(self, count: int) -> None:
        self._numbers[_RESTARTS] = count

    def write(self, slot: int, content: bytes) -> None:
        """Replace the content of ``slot``; for the process that it belongs to.

        Raises:
            ValueError: it has more bytes than the slot's capacity.
        """
        if len(content) > self._capacity:
            raise ValueError(f"{len(content)} bytes do not fit a slot of {self._capacity}")
        begin = _HEADER_BYTES + slot * self._slot_bytes
        turn = self._numbers[begin // 8] + 1
        at = begin + 8 + turn % 2 * self._buffer_bytes
        header = _LENGTH_AND_CRC.pack(len(content), zlib.crc32(content))
        self._memory[at : at + len(header) + len(content)] = header + content
        self._numbers[begin // 8] = turn

    def read(self, slot: int) -> bytes:
        """The content of ``slot`` as it was written last; empty before the first time."""
        begin = _HEADER_BYTES + slot * self._slot_bytes
        while turn := self._numbers[begin // 8]:
            at = begin + 8 + turn % 2 * self._buffer_bytes
            length, crc = _LENGTH_AND_CRC.unpack_from(self._memory, at)
            at += _LENGTH_AND_CRC.size
            content = self._memory[at : at + min(length, self._capacity)]
            if zlib.crc32(content) == crc:
                return content
            # Written twice while it was read: the counter names the other buffer, or will soon.
        return b""
