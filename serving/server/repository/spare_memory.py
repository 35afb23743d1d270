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

from typing import NamedTuple

from tessera.serving.package.archive import FileIdentity
from tessera.serving.package.table_memory import KeptContent, give_back_mapping, leave_to_system
from tessera.serving.server.repository.kept_for import KeptFor

SPARE_S = 120.0
"""How long a server keeps memory that nobody uses."""


class _Kept(NamedTuple):
    begin: int
    size: int
    content: KeptContent | None


class SpareMemory:
    """See `tessera.serving.package.table_memory.Spare`; a thread of low priority gives back what nobody has taken.

    Args:
        keep_s: seconds after which what nobody has taken goes back to the system.
    """

    def __init__(self, keep_s: float) -> None:
        self._kept = KeptFor[_Kept](keep_s, _give_back, "spare-memory")

    def take(self, size: int) -> int | None:
        """The address of a mapping of ``size`` bytes with any content.

        None: there is none, and then as many bytes of what was kept have gone back to the system.
        """
        found = self._kept.take(lambda kept: kept.size == size)
        if found is not None:
            return found.begin
        gone = 0
        while gone < size and (oldest := self._kept.take()) is not None:
            gone += oldest.size
            _give_back(oldest)
        return None

    def find(
        self, file: FileIdentity, hashes: tuple[str, ...]
    ) -> tuple[int, int, KeptContent] | None:
        """See `tessera.serving.package.table_memory.Spare.find`."""
        found = self._kept.take(
            lambda kept: kept.content is not None and kept.content.is_of(file, hashes),
            late=False,
        )
        if found is None or found.content is None:
            return None
        return found.begin, found.size, found.content

    def keep(self, begin: int, size: int, content: KeptContent | None) -> None:
        """See `tessera.serving.package.table_memory.Spare.keep`."""
        if leave_to_system(begin, size):
            self._kept.add(_Kept(begin, size, content))
        else:  # Linux before 4.5
            give_back_mapping(begin, size)


def _give_back(kept: _Kept) -> None:
    give_back_mapping(kept.begin, kept.size)
