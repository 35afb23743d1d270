"""The steps of a pool over ranks, for pools of any kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Generic

import torch
from torch import Tensor, nn

from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.plan.sharded_module import (
    DistOut,
    Out,
    ShardedModule,
    ShrdCtx,
)
from tessera.training.modules.object_pool import ObjectPool


class ShardedObjectPool(
    ObjectPool[Out],
    ShardedModule[Tensor, DistOut, Out, ShrdCtx],  # type: ignore[type-var] # ids are a tensor, which records streams itself
    Generic[Out, DistOut, ShrdCtx],
):
    """A pool of ``Out`` of which each rank holds some rows.

    A lookup is three steps, which a training pipeline may call apart: ids travel to the ranks that hold their
    rows, rows are read, and travel back as ``DistOut``.  An update is two exchanges and a write.  Every rank
    takes part in each of them, with as many ids as it likes or none.
    """

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def _update_preproc(self, values: Out) -> Out:
        """What is written of ``values``, checked and in the pool's form."""

    @abstractmethod
    def _update_ids_dist(self, ctx: ShrdCtx, ids: Tensor) -> Awaitable[Awaitable[Tensor]]:
        """Send the ids of rows that are written; gives those of the rows here, counted from the first."""

    @abstractmethod
    def _update_values_dist(self, ctx: ShrdCtx, values: Out) -> Awaitable[DistOut]:
        """Send what is written, in the order in which the ids went."""

    @abstractmethod
    def _update_local(self, ctx: ShrdCtx, ids: Tensor, values: DistOut) -> None:
        """Write what came to the rows here; of an id that is there twice the last one counts."""

    @abstractmethod
    def _lookup_ids_dist(self, ctx: ShrdCtx, ids: Tensor) -> Awaitable[Awaitable[Tensor]]:
        """Send the ids of rows that are read; gives those of the rows here, counted from the first."""

    @abstractmethod
    def _lookup_local(self, ctx: ShrdCtx, ids: Tensor) -> DistOut:
        """Read rows here."""

    @abstractmethod
    def _lookup_values_dist(self, ctx: ShrdCtx, values: DistOut) -> LazyAwaitable[Out]:
        """Send rows back to the ranks that asked, in the order of their ids."""

    def input_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[Tensor]]:  # noqa: A002 - the base's name
        """Send the ids of a lookup."""
        return self._lookup_ids_dist(ctx, *input, **kwargs)

    def compute(self, ctx: ShrdCtx, dist_input: Tensor) -> DistOut:
        """Read the rows of the ids that came."""
        return self._lookup_local(ctx, dist_input)

    def output_dist(self, ctx: ShrdCtx, output: DistOut) -> LazyAwaitable[Out]:
        """Send the rows that were read back."""
        return self._lookup_values_dist(ctx, output)

    def lookup(self, ids: Tensor) -> LazyAwaitable[Out]:  # type: ignore[override] # waits when it is used
        """The rows of ``ids``, an integer tensor ``[N]``; waits for them when they are first used."""
        found: LazyAwaitable[Out] = self(ids=ids)
        return found

    @torch.no_grad()
    def update(self, ids: Tensor, values: Out) -> None:
        """Write the rows of ``ids`` on whatever ranks they are.

        Args:
            ids: ``[N]`` int32 or int64.
            values: ``N`` rows.
        """
        values = self._update_preproc(values)
        ctx = self.create_context()
        ids_on_the_way = self._update_ids_dist(ctx, ids).wait()
        values_on_the_way = self._update_values_dist(ctx, values)
        self._update_local(ctx, ids_on_the_way.wait(), values_on_the_way.wait())

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """The names of the tensors of which each rank holds other rows."""
        for name, _ in self.named_buffers(prefix=prefix):
            yield name

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The type of module that this is the sharded form of."""
        return ObjectPool
