"""Whose operators a package calls: the pooled lookup of many features, and what goes with it.

`LookupBackend` is the only place that knows whose operator it is.  A backend's module holds
plain tensors and calls ``torch.ops`` directly, so that the scripted graph needs the operator
library alone and no Python package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from tessera.errors import UserError
from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.fbgemm_backend import FbgemmBackend
from tessera.serving.packaging.lookups.tessera_backend import TesseraBackend
from tessera.serving.packaging.tables.stored import StoredTables


class LookupBackend(Protocol):
    """Whose operators look rows up and compute.

    Attributes:
        name: as in ``--backend`` and in the manifest.
        operator_libraries: what must be loaded before the modules can run.
        weight_types: names of the `tessera.kernels.row_types` that it can look up, in their order.
        dense_types: names of the `tessera.serving.packaging.dense_types` that it can multiply by.
    """

    name: str
    operator_libraries: tuple[str, ...]
    weight_types: tuple[str, ...]
    dense_types: tuple[str, ...]

    def lookup(
        self, tables: StoredTables, features: Sequence[FeatureSpec | None], names: Sequence[str]
    ) -> nn.Module:
        """A module that turns raw ids into rows, looks them up and pools them.

        Its ``forward(ids, lengths, weights)`` takes raw ids ``[N]`` int32 or int64; lengths
        ``[F * B]`` int32, feature-major in the order of ``features``; weights ``[N]`` float32
        or None.  It returns ``[B, sum of D]`` float32, the features side by side in the order
        of ``names`` (the same features); an empty bag gives zeros; a weighted mean divides by
        the number of ids.  A feature that is None has ids that are left out.  Whatever the ids are, no row outside a table is read.  It can be
        traced by ``torch.fx`` and then scripted, for any ``B``.

        Raises:
            UserError: a table that the operator cannot hold.
        """
        ...

    def lookup_rows(self, tables: StoredTables, features: Sequence[FeatureSpec]) -> nn.Module:
        """A module that turns raw ids into rows and looks them up without pooling.

        Its ``forward(ids, lengths)`` takes what `lookup`'s takes and returns ``[N, D]`` float32;
        all ``features`` have dimension ``D``.

        Raises:
            UserError: a table that the operator cannot hold.
        """
        ...


BACKENDS: dict[str, LookupBackend] = {
    backend.name: backend for backend in (TesseraBackend(), FbgemmBackend())
}
"""The backends that ``package-model --backend`` offers, the faster one first."""


def lookup_backend(name: str) -> LookupBackend:
    """The backend called ``name``; a `UserError` where there is none."""
    found = BACKENDS.get(name)
    if found is None:
        raise UserError(f"backend {name!r} is unknown; give one of {', '.join(BACKENDS)}")
    return found


def default_backend() -> str:
    """The first of `BACKENDS` whose operators can be loaded here.

    Raises:
        LibraryError: none of them can; says what to install for the last.
    """
    *better, last = BACKENDS.values()
    for backend in better:
        try:
            load_libraries(backend.operator_libraries)
        except LibraryError:
            continue
        return backend.name
    load_libraries(last.operator_libraries)
    return last.name
