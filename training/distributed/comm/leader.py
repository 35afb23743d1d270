"""Work that one rank does for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
P = ParamSpec("P")


def is_leader(pg: dist.ProcessGroup | None, leader_rank: int = 0) -> bool:
    """Whether this process has rank ``leader_rank`` in ``pg``; without a group it is rank 0."""
    return (0 if pg is None else pg.rank()) == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: dist.ProcessGroup,
    rank: int,
    func: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call ``func`` on one rank of ``pg`` and give its result to all.

    Every rank of ``pg`` calls this.  The result is pickled on its way.

    Args:
        pg: the group.
        rank: the caller's rank in ``pg``.
        func: what that rank calls.
        *args: positional arguments of ``func``.
        **kwargs: keyword arguments of ``func``.

    Raises:
        Exception: on ``rank``, what ``func`` raised.
        RuntimeError: on the other ranks, if ``func`` raised; it names the error.
    """
    # [error's text or None, result]: a failure must travel too, or the others would wait.
    outcome: list[object] = [None, None]
    failure: Exception | None = None
    if pg.rank() == rank:
        try:
            outcome[1] = func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it is raised below, when the others know
            failure = error
            outcome[0] = f"{type(error).__name__}: {error}"
    if pg.size() > 1:
        dist.broadcast_object_list(outcome, group=pg, group_src=rank)
    if failure is not None:
        raise failure
    if outcome[0] is not None:
        raise RuntimeError(f"rank {rank} failed in {func!r} with {outcome[0]}")
    return cast("T", outcome[1])


def run_on_leader(pg: dist.ProcessGroup, rank: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: the function runs on rank ``rank`` of ``pg`` and all ranks get its result."""

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        @wraps(func)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return wrapped

    return decorate
