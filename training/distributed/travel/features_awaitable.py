"""Features of a sharded module on their way to the ranks that look them up.

A module has one request per sharding.  Each is waited for twice: the first wait ends the
exchange of sizes, the second that of the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.travel.kjt_all_to_all import (
    KJTAllToAllTensorsAwaitable,
    KJTSplitsAllToAllMeta,
    SplitsAllToAllAwaitable,
)
from tessera.training.distributed.travel.kjt_list import KJTList, ListOfKJTList
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable

C = TypeVar("C", bound=Multistreamable)
T = TypeVar("T")


Request = Awaitable[Awaitable[KeyedJaggedTensor]] | KJTSplitsAllToAllMeta


def _with_contexts(ctx: Multistreamable, given: Sequence[T]) -> list[tuple[Any, T]]:
    """What the shardings gave, each with its sharding's context, where the module has such."""
    contexts = getattr(ctx, "sharding_contexts", [])
    return list(zip(contexts, given, strict=bool(contexts)))


class KJTListAwaitable(Awaitable[KJTList]):
    """The ids of all shardings of a module, under way.

    Args:
        awaitables: one per sharding.
        ctx: the module's context; the context of each sharding learns what arrives.
    """

    def __init__(
        self, awaitables: Sequence[Awaitable[KeyedJaggedTensor]], ctx: Multistreamable
    ) -> None:
        super().__init__()
        self.awaitables = list(awaitables)
        self.ctx = ctx

    def _wait_impl(self) -> KJTList:
        features = [awaitable.wait() for awaitable in self.awaitables]
        for context, received in _with_contexts(self.ctx, features):
            context.take_features(received)
        return KJTList(features)


def _in_rows(sizes: Sequence[Sequence[Tensor] | Tensor]) -> Tensor:
    """The sizes of several shardings below one another."""
    rows = [own if isinstance(own, Tensor) else torch.stack(list(own)) for own in sizes]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _tensors_begun(
    awaitables: Sequence[Awaitable[KeyedJaggedTensor]], ctx: Multistreamable
) -> KJTListAwaitable:
    for context, awaitable in _with_contexts(ctx, awaitables):
        if isinstance(awaitable, KJTAllToAllTensorsAwaitable):
            context.take_exchange(awaitable)
    return KJTListAwaitable(awaitables, ctx)


class KJTListSplitsAwaitable(Awaitable[Awaitable[KJTList]], Generic[C]):
    """The sizes of all shardings of a module, under way.

    Args:
        awaitables: one per sharding; a `KJTSplitsAllToAllMeta` is begun by
            `FusedKJTListSplitsAwaitable` only.
        ctx: as of `KJTListAwaitable`.
    """

    def __init__(self, awaitables: Sequence[Request], ctx: C) -> None:
        super().__init__()
        self.awaitables = list(awaitables)
        self.ctx = ctx

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks of the requests that are not begun; None if all are."""
        for awaitable in self.awaitables:
            if isinstance(awaitable, KJTSplitsAllToAllMeta):
                return awaitable.pg
        return None

    def _wait_impl(self) -> KJTListAwaitable:
        begun = []
        for awaitable in self.awaitables:
            assert isinstance(awaitable, Awaitable), "a pipeline begins what it prepared"
            begun.append(awaitable.wait())
        return _tensors_begun(begun, self.ctx)


class FusedKJTListSplitsAwaitable(Awaitable[list[KJTListAwaitable]], Generic[C]):
    """The sizes of several modules, exchanged at once.

    Args:
        requests: one per module, of `KJTSplitsAllToAllMeta` or of what is here already.
        contexts: the modules' contexts.
        pg: the ranks; None: nothing is to be exchanged.
    """

    def __init__(
        self,
        requests: Sequence[KJTListSplitsAwaitable[C]],
        contexts: Sequence[C],
        pg: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self._requests, self._contexts = list(requests), list(contexts)
        sizes = [
            part.splits_tensors
            for request in requests
            for part in request.awaitables
            if isinstance(part, KJTSplitsAllToAllMeta)
        ]
        self._sizes = (
            SplitsAllToAllAwaitable(_in_rows(sizes), pg) if sizes and pg is not None else None
        )

    def _wait_impl(self) -> list[KJTListAwaitable]:
        exchanged = [] if self._sizes is None else self._sizes.wait()
        begun = []
        for request, ctx in zip(self._requests, self._contexts, strict=True):
            awaitables: list[Awaitable[KeyedJaggedTensor]] = []
            for part in request.awaitables:
                if isinstance(part, KJTSplitsAllToAllMeta):
                    count = len(part.splits_tensors)
                    awaitables.append(part.send_tensors(exchanged[:count]))
                    exchanged = exchanged[count:]
                else:
                    awaitables.append(part.wait())
            begun.append(_tensors_begun(awaitables, ctx))
        return begun


class ListOfKJTListAwaitable(Awaitable[ListOfKJTList]):
    """The ids of all shardings, each with one tensor per device, under way."""

    def __init__(self, awaitables: Sequence[Awaitable[KJTList]]) -> None:
        super().__init__()
        self.awaitables = list(awaitables)

    def _wait_impl(self) -> ListOfKJTList:
        return ListOfKJTList([awaitable.wait() for awaitable in self.awaitables])


class ListOfKJTListSplitsAwaitable(Awaitable[Awaitable[ListOfKJTList]]):
    """The sizes of all shardings, each with one tensor per device, under way."""

    def __init__(self, awaitables: Sequence[Awaitable[Awaitable[KJTList]]]) -> None:
        super().__init__()
        self.awaitables = list(awaitables)

    def _wait_impl(self) -> Awaitable[ListOfKJTList]:
        return ListOfKJTListAwaitable([awaitable.wait() for awaitable in self.awaitables])
