"""Models of versions that nobody uses any more, kept for a while with their tables.

A version that comes again within that time, as where somebody goes back to the one before, is there as it was: nothing of its file
is read, its module is not opened and has been called before.  Opening one takes some 50 ms of the interpreter's lock,
for which calls wait; this takes the look at its file, and at the pages of its tables, which needs no lock.

What tables have is left to the system meanwhile (`tessera.serving.package.table_memory.TableMemory.lend`): the kernel takes their
pages as soon as anybody needs memory, and then the version is loaded anew.  It is loaded anew as well where its file has
been replaced or written to.  What a model has beside its tables stays in memory; so only those are kept that have little, and few of
them.

While another package is loaded none is kept: its tables take the memory of theirs
(`tessera.serving.server.repository.spare_memory`), and what is kept never adds to what is in use.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tessera.serving.package.archive import FileIdentity
from tessera.serving.package.table_memory import TableMemory
from tessera.serving.server.model.loader import LoadedModel
from tessera.serving.server.repository.kept_for import KeptFor

MOST_MODELS = 4
MOST_OWN_BYTES = 8 << 20
"""What a model that is kept may have beside its tables."""


class KeptModels:
    """See the module; any thread.

    Args:
        memory: that of the models' tables.
        keep_s: seconds after which a model that nobody has taken is gone, and its tables' memory is the system's.
    """

    def __init__(self, memory: TableMemory, keep_s: float) -> None:
        self._memory = memory
        self._kept = KeptFor[LoadedModel](keep_s, self._give_up, "kept-models")
        self._lock = threading.Lock()
        self._loads = 0

    def keep(self, model: LoadedModel) -> None:
        """Keep ``model``, which nobody calls any more and nobody but the caller refers to, if it can be kept."""
        if model.origin is None:
            return
        with self._lock:
            if self._loads or not self._memory.lend(model.origin.tables):
                return
            if len(self._kept) >= MOST_MODELS:
                self._kept.take()
            self._kept.add(model)

    def take(self, file: FileIdentity) -> LoadedModel | None:
        """The model that was kept of this file, with all that its tables have; None: there is none."""
        with self._lock:
            kept = self._kept.take(
                lambda model: model.origin is not None and model.origin.file == file, late=False
            )
            if kept is None or kept.origin is None:
                return None
            return kept if self._memory.take_back(kept.origin.tables) else None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While it is entered, a package is loaded and none is kept."""
        with self._lock:
            self._loads += 1
            while self._kept.take() is not None:
                pass
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1

    def _give_up(self, model: LoadedModel) -> None:
        if model.origin is not None:
            self._memory.give_up(model.origin.tables)
