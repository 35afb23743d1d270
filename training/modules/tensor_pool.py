"""A pool of vectors; over ranks: `tessera.training.distributed.tensor_pool`."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.modules import pool_rows
from tessera.training.modules.object_pool import ObjectPool


class TensorPool(ObjectPool[Tensor]):
    """Holds ``pool_size`` vectors that are written and read by number, such as features of users.

    Its state dict has the rows as ``_pool``, as TorchRec's has.

    Args:
        pool_size: rows.
        dim: columns.
        dtype: of the rows.
        device: where they live; None: the CPU.
        loaded_values: the first rows ``[pool_size, dim]``, not copied; None: zeros.

    Raises:
        ValueError: ``loaded_values`` of another shape or dtype.
    """

    def __init__(
        self,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        loaded_values: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._pool: Tensor
        if loaded_values is None:
            loaded_values = torch.zeros(pool_size, dim, dtype=dtype, device=device)
        elif loaded_values.shape != (pool_size, dim) or loaded_values.dtype != dtype:
            raise ValueError(
                f"loaded_values are {loaded_values.dtype} of shape {list(loaded_values.shape)}; give "
                f"{dtype} of shape {[pool_size, dim]}"
            )
        self.register_buffer("_pool", loaded_values)

    @property
    def pool_size(self) -> int:
        """How many rows there are."""
        return self._pool.size(0)

    @property
    def dim(self) -> int:
        """How many columns there are."""
        return self._pool.size(1)

    @property
    def dtype(self) -> torch.dtype:
        """The rows' dtype."""
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self._pool.device

    @property
    def pool(self) -> Tensor:
        """All rows, ``[pool_size, dim]``."""
        return self._pool

    def lookup(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` ``[N]``, ``[N, dim]``.

        Raises:
            IndexError: an id is not a row.
            ValueError: ids are not integers ``[N]``.
        """
        pool = self._pool
        return pool.index_select(0, pool_rows.checked_ids(ids, pool.size(0)))

    def update(self, ids: Tensor, values: Tensor) -> None:
        """Write ``values`` ``[N, dim]`` to the rows of ``ids`` ``[N]``; the last one of an id counts.

        Raises:
            IndexError: an id is not a row.
            ValueError: values of another shape or dtype.
        """
        pool = self._pool
        ids = pool_rows.checked_ids(ids, pool.size(0))
        check_vectors(values, ids, pool)
        pool_rows.write_vectors(pool, ids, values)

    def forward(self, ids: Tensor) -> Tensor:
        """See `lookup`."""
        return self.lookup(ids)


def check_vectors(values: Tensor, ids: Tensor, pool: Tensor) -> None:
    """Refuse vectors that cannot be written to rows of ``pool`` ``[rows, dim]``.

    Raises:
        ValueError: they are not ``[N, dim]`` for ``N`` ids, or have another dtype.
    """
    rows, dim = ids.size(0), pool.size(1)
    fits = values.dim() == 2 and values.size(0) == rows and values.size(1) == dim
    if not fits or values.dtype != pool.dtype:
        wanted = [rows, dim]
        raise ValueError(
            f"values are {values.dtype} of shape {list(values.shape)}; give {pool.dtype} of shape {wanted}"
        )
