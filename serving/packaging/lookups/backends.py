"""Whose operators a package calls: the pooled lookup of many features, and what goes with it.

`LookupBackend` is the only place that knows whose operator it is.  A backend's module holds
plain tensors and calls ``torch.ops`` directly, so that the scripted graph needs the operator
library alone and no Python package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from tessera.errors import refuse_unknown
from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.kernels.row_types import ROW_TYPES
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.lookups.fbgemm_backend import FbgemmLookup, FbgemmRows
from tessera.serving.packaging.lookups.tessera_backend import tessera_lookup, tessera_rows
from tessera.serving.packaging.tables.stored import StoredTables


@dataclass(frozen=True, kw_only=True)
class LookupBackend:
    """Whose operators look rows up and compute.

    Attributes:
        name: as in ``--backend`` and in the manifest.
        operator_libraries: what must be loaded before the modules can run.
        dense_types: names of the `tessera.serving.packaging.dense_types` that it can multiply by.
        lookup: from tables, features and names to a module that turns raw ids into rows, looks them
            up and pools them.  Its ``forward(ids, lengths, weights)`` takes raw ids ``[N]`` int32 or
            int64; lengths ``[F * B]`` int32, feature-major in the order of the features; weights
            ``[N]`` float32 or None.  It returns ``[B, sum of D]`` float32, the features side by side
            in the order of the names (of the same features); an empty bag gives zeros; a weighted
            mean divides by the number of ids.  A feature that is None has ids that are left out.
            Whatever the ids are, no row outside a table is read.  It can be traced by ``torch.fx``
            and then scripted, for any ``B``.  A table that the operator cannot hold is a `UserError`.
        lookup_rows: the same without pooling.  The module's ``forward(ids, lengths)`` returns ``[N, D]``
            float32; all features have dimension ``D``.
    """

    name: str
    operator_libraries: tuple[str, ...]
    dense_types: tuple[str, ...]
    lookup: Callable[[StoredTables, Sequence[FeatureSpec | None], Sequence[str]], nn.Module]
    lookup_rows: Callable[[StoredTables, Sequence[FeatureSpec]], nn.Module]

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Names of the `tessera.kernels.row_types` that it can look up, in their order."""
        return tuple(name for name, kind in ROW_TYPES.items() if self.name in kind.backends)


_TESSERA = LookupBackend(
    name="tessera",
    operator_libraries=("tessera_ops",),
    dense_types=tuple(DENSE_TYPES),
    lookup=tessera_lookup,
    lookup_rows=tessera_rows,
)
_FBGEMM = LookupBackend(
    name="fbgemm",
    operator_libraries=("fbgemm_gpu_tbe_inference", "fbgemm_gpu_sparse_async_cumsum"),
    dense_types=("fp32",),
    lookup=FbgemmLookup,
    lookup_rows=FbgemmRows,
)
BACKENDS = {backend.name: backend for backend in (_TESSERA, _FBGEMM)}
"""The backends that ``package-model --backend`` offers, the faster one first."""


def lookup_backend(name: str) -> LookupBackend:
    """The backend called ``name``; a `UserError` where there is none."""
    refuse_unknown("backend", name, BACKENDS)
    return BACKENDS[name]


def default_backend() -> str:
    """The first of `BACKENDS` that can be loaded here; a `LibraryError` where none can."""
    *better, last = BACKENDS.values()
    for backend in better:
        try:
            load_libraries(backend.operator_libraries)
        except LibraryError:
            continue
        return backend.name
    load_libraries(last.operator_libraries)
    return last.name
