"""Memory of tables that nobody uses any more, kept for a while for the tables of the next version.

Versions that follow each other have tables of the same sizes.  Pages that are new to a process are cleared by the kernel, and a
virtual machine's host may have to find them first: where the guest gives free memory back to its host, the first write to
a huge page was measured to take 4.5 ms, in one piece in the kernel.  Calls that are answered beside a load wait for
that.  Memory that was not given back has its pages.

A version that comes again within that time, as where somebody goes back to the one before, has its tables there as they were:
they are found by their content and are not read again.

What is kept is the system's all the same: its pages are marked with MADV_FREE, so the kernel counts them as available and takes
them as soon as anybody needs memory.  Until then they count as resident.  What is kept never adds to what is in use: memory that is
not taken from here is made only once as much of what is kept, or all of it, has gone back.
``cpp_server/src/package/spare_memory.h`` is the same for ``tessera-server``.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from tessera.serving.package.archive import FileIdentity
from tessera.serving.package.pace import stand_aside
from tessera.serving.package.table_memory import KeptContent, give_back_mapping, leave_to_system
from tessera.serving.server.named_thread import NamedThread

SPARE_S = 120.0
"""How long a server keeps memory that nobody uses."""


class _Kept(NamedTuple):
    begin: int
    size: int
    content: KeptContent | None
    until: float


class SpareMemory:
    """See `tessera.serving.package.table_memory.Spare`; a thread of low priority gives back what nobody has taken.

    Args:
        keep_s: seconds after which what nobody has taken goes back to the system.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        # A collection of garbage may end a mapping in the midst of `take`, on the same thread.
        self._lock = threading.RLock()
        self._kept: list[_Kept] = []  # the oldest first
        self._giving_back = False

    def take(self, size: int) -> int | None:
        """The address of a mapping of ``size`` bytes with any content.

        None: there is none, and then as many bytes of what was kept have gone back to the system.
        """
        room: list[tuple[int, int]] = []
        with self._lock:
            found = next((kept for kept in self._kept if kept.size == size), None)
            if found is not None:
                self._kept.remove(found)
                return found.begin
            gone = 0
            while gone < size and self._kept:
                first = self._kept.pop(0)
                room.append((first.begin, first.size))
                gone += first.size
        for begin, bytes_ in room:
            give_back_mapping(begin, bytes_)
        return None

    def find(
        self, file: FileIdentity, hashes: tuple[str, ...]
    ) -> tuple[int, int, KeptContent] | None:
        """See `tessera.serving.package.table_memory.Spare.find`."""
        now = time.monotonic()
        with self._lock:
            for kept in self._kept:
                content = kept.content
                if content is not None and content.is_of(file, hashes) and kept.until > now:
                    self._kept.remove(kept)
                    return kept.begin, kept.size, content
        return None

    def keep(self, begin: int, size: int, content: KeptContent | None) -> None:
        """See `tessera.serving.package.table_memory.Spare.keep`."""
        if not leave_to_system(begin, size):  # Linux 4.5
            give_back_mapping(begin, size)
            return
        with self._lock:
            self._kept.append(_Kept(begin, size, content, time.monotonic() + self._keep_s))
            if self._giving_back:
                return
            self._giving_back = True
        try:
            NamedThread(target=self._run, name="spare-memory", daemon=True).start()
        except RuntimeError:  # no thread is left, or the interpreter ends
            self._giving_back = False

    def _run(self) -> None:
        """Give back what has been kept for long enough, until nothing is kept."""
        stand_aside()
        while True:
            with self._lock:
                if not self._kept:
                    self._giving_back = False
                    return
                oldest = self._kept[0]
                wait_s = oldest.until - time.monotonic()
                if wait_s <= 0:
                    self._kept.pop(0)
            if wait_s > 0:
                time.sleep(wait_s)
            else:
                give_back_mapping(oldest.begin, oldest.size)
