"""The ranks of a run: one process alone, or those that ``torchrun`` started.

Every method but the properties is an exchange between all ranks: each of them must call it, in
the same order.  With one rank none of them does anything.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tessera.errors import UserError
from tessera.training.distributed.comm.environment import (
    ShardingEnv,
    default_env,
    world_size_of_environment,
)

T = TypeVar("T")

PARENT_LOOK_S = 0.5
"""Seconds between a rank's looks whether the process that started it still runs."""
PARENT_VARIABLE = "TESSERA_PARENT"
"""The environment variable with the id of a process that a training is to end with."""


def is_restart() -> bool:
    """Whether torchrun started this process in place of one that had failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in {"", "0"}


@contextlib.contextmanager
def when_parent_dies(call: Callable[[], object]) -> Iterator[None]:
    """Call ``call`` from a thread when what started this process has died: torchrun, or a search.

    A search gives its process id as `PARENT_VARIABLE`.  Without either nothing is watched: a process
    that was put into the background may outlive the shell that started it.
    """
    given = os.environ.get(PARENT_VARIABLE, "")
    if not given and "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    parent, left = int(given) if given.isdigit() else os.getppid(), threading.Event()

    def watch() -> None:
        while not left.wait(PARENT_LOOK_S):
            if os.getppid() != parent:
                call()
                return

    watcher = threading.Thread(target=watch, name="tessera-torchrun", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        watcher.join()


def device_of(name: str) -> torch.device:
    """This rank's device: for ``cpu`` the CPU, for ``cuda`` the GPU of its ``LOCAL_RANK``.

    Raises:
        UserError: there is no such GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"train.device=cuda: torch sees {count} GPUs, and this is local rank {index}; start "
            "fewer ranks or set train.device=cpu"
        )
    return torch.device("cuda", index)


class Ranks:
    """The exchanges of this process with those that it trains with.

    Args:
        env: who takes part; None: this process alone.
    """

    def __init__(self, env: ShardingEnv | None = None) -> None:
        self.env = env or ShardingEnv.from_local(1, 0)

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.env.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self.env.world_size

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return self.world_size == 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, the same numbers on each."""
        if self.alone:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def any(self, flag: bool) -> bool:  # noqa: FBT001 - it is the one thing that is asked
        """Whether it is True on some rank."""
        return bool(self.sum([float(flag)])[0]) if not self.alone else flag

    def on_first(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on rank 0, on every rank.

        Raises:
            UserError: ``work`` has raised one; the same on every rank.
        """
        if self.alone:
            return work()
        outcome: list[tuple[T | None, str | None]] = [(None, None)]
        error: UserError | None = None
        if self.first:
            try:
                outcome = [(work(), None)]
            except UserError as raised:
                error, outcome = raised, [(None, str(raised))]
        dist.broadcast_object_list(outcome, src=0)
        if error is not None:
            raise error
        result, message = outcome[0]
        if message is not None:
            raise UserError(message)
        return result  # type: ignore[return-value] # work's own, None where that is what it gives

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0, and when it is done on the others: what it keeps, they find.

        Raises:
            UserError: ``work`` has raised one on rank 0; the same on every rank.
        """
        mine: list[T] = []
        self.on_first(lambda: mine.append(work()))
        return mine[0] if mine else work()

    def joined(self, rows: Tensor) -> Tensor:
        """``[N_0 + N_1 + ..., ...]``: all ranks' rows, rank by rank, on each rank."""
        if self.alone:
            return rows
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = rows.size(0)
        dist.all_reduce(counts)
        most = int(counts.max())
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.size(0)] = rows
        everyone = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(everyone, padded)
        return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)])


@contextlib.contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the ranks for the time of the context.

    A process group that is there is used and left; one rank alone needs none.

    Raises:
        UserError: ``WORLD_SIZE`` says that there are several, and nothing says who this one is.
    """
    if dist.is_available() and dist.is_initialized():
        yield Ranks(default_env())
        return
    if world_size_of_environment() == 1:
        yield Ranks()
        return
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(n)]
    if missing:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {missing[0]} is not set; start the ranks with "
            "torchrun, or unset WORLD_SIZE to train with one"
        )
    # Where and who: torchrun's environment variables.
    store, rank, world_size = next(rendezvous("env://"))
    # The store outlives a failed attempt, whose addresses are still in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=PrefixStore(f"tessera/attempt_{attempt}", store),
        rank=rank,
        world_size=world_size,
    )
    try:
        yield Ranks(default_env())
    finally:
        dist.destroy_process_group()
