"""Ranks for tests: persistent processes joined in a process group, that run test functions.

``run_on_ranks(2, function, *args)`` calls ``function(*args)`` on two ranks and returns what each
gave.  The processes of a world size are started at its first call and live as long as pytest, so
a call costs milliseconds.  ``function`` stands at the top level of a test file (it is sent by
its name); arguments and results are pickled.  On the CPU ranks are forked from a process that has
imported torch and Tessera and runs nothing.

Gloo on the CPU, unless the environment variable ``TESSERA_TEST_DEVICE`` is ``cuda``: then each
rank has a GPU of its own and NCCL carries CUDA tensors; tests whose world is larger than the
number of GPUs are skipped.  With ``NCCL_MULTI_RANK_GPU_ENABLE=1`` they are not, and ranks share GPUs,
which NCCL can from 2.30 on, where CUDA's Multi-Process Service runs.  `rank_device` says which device
a rank works on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree

from tessera.training.distributed.checkpoint import writer
from tessera.training.distributed.comm import nodes
from tests.patience import PATIENCE_S

START_TIMEOUT_S = CALL_TIMEOUT_S = float(PATIENCE_S)
# How long ranks may stay in a call that has failed on another rank.
STRAGGLER_TIMEOUT_S = 5.0
# What ranks import sooner or later (optimizers import the compiler); some seconds of a CPU for each of them otherwise.
PRELOADED = (
    "tessera.training.distributed",
    "fbgemm_gpu.split_table_batched_embeddings_ops_training",
    "torch._dynamo",
    "tessera.training.trainer.run",
    "hypothesis",
)


_ALL_HAVE_ANSWERED = b""


class RankError(AssertionError):
    """A function failed on a rank; the text holds that rank's traceback."""


def uses_cuda() -> bool:
    """Whether the ranks work on GPUs."""
    return os.environ.get("TESSERA_TEST_DEVICE", "cpu") == "cuda"


def rank_device() -> torch.device:
    """The device of the rank that asks (called inside a function on a rank; elsewhere: that of the first)."""
    if not uses_cuda():
        return torch.device("cpu")
    return torch.device("cuda", _gpu_of(int(os.environ.get("LOCAL_RANK", "0"))))


def _share_gpus() -> bool:
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def _gpu_of(local_rank: int) -> int:
    return local_rank % torch.cuda.device_count() if _share_gpus() else local_rank


def whole_on_each_rank(table: Any) -> torch.Tensor:
    """All of a ``ShardedTensor`` on the CPU; every rank must call it.

    ``ShardedTensor.gather`` cannot: with a backend for CPU and one for CUDA tensors it picks gloo
    for both.
    """
    own = [
        (shard.metadata.shard_offsets, shard.metadata.shard_sizes, shard.tensor.detach().cpu())
        for shard in table.local_shards()
    ]
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    whole = torch.full(tuple(table.size()), float("nan"))
    for offsets, sizes, values in itertools.chain.from_iterable(parts):
        spans = [slice(o, o + size) for o, size in zip(offsets, sizes, strict=True)]
        whole[tuple(spans)] = values
    return whole


@dataclass
class _Outcome:
    value: Any = None
    error: str | None = None


def _join(rank: int, world_size: int, store_path: str) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    if uses_cuda():
        torch.cuda.set_device(_gpu_of(rank))
        # Sums that do not depend on how a matrix product is cut.
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.distributed.init_process_group(
        backend="cpu:gloo,cuda:nccl" if uses_cuda() else "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=CALL_TIMEOUT_S),
    )


def _work(rank: int, world_size: int, store_path: str, pipe: Connection) -> None:
    """What a rank does all its life: run what comes through the pipe."""
    try:
        _join(rank, world_size, store_path)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        pipe.send_bytes(pickle.dumps(_Outcome(error=traceback.format_exc())))
        return
    gc.collect()
    gc.freeze()  # later collections look at what calls have made, and at nothing else
    pipe.send_bytes(pickle.dumps(_Outcome()))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        if message == _ALL_HAVE_ANSWERED:
            _destroy_groups()
            continue
        try:
            pipe.send_bytes(_answer(message))
        except BrokenPipeError:  # another rank failed and the parent gave this group up
            return


def _answer(message: bytes) -> bytes:
    try:
        environment, call = pickle.loads(message)
        os.environ.update(environment)
        function, args, kwargs = pickle.loads(call)
        torch.manual_seed(0)
        random.seed(0)
        value = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, function(*args, **kwargs))
        return pickle.dumps(_Outcome(value=value))
    except BaseException:  # noqa: BLE001 - a failed assertion is the usual case
        return pickle.dumps(_Outcome(error=traceback.format_exc()))


def _destroy_groups() -> None:
    """Destroy the process groups that the last call made, where gloo serves them.

    Each has a thread that wakes up a hundred times a second for as long as the group lives: with the two hundred
    groups that the tests of 2D parallelism make, four idle ranks took at least half a CPU from the tests after them.
    """
    if uses_cuda() or len(distributed_c10d._world.pg_map) == 1:
        return
    # These keep groups for as long as the default group lives, which here is as long as pytest.
    nodes._node_groups.cache_clear()
    writer._gloo = None
    gc.collect()
    for group in list(distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def process_context(*preloaded: str) -> Any:
    """How processes start: as copies of one that has imported everything; with CUDA, which a copy cannot use, anew.

    ``preloaded`` are modules that it imports beside ours, unless a copy was started before.
    """
    if uses_cuda():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED, *preloaded])
    return context


class _Pool:
    """The processes of one world size."""

    def __init__(self, world_size: int) -> None:
        context = process_context()
        self._folder = tempfile.TemporaryDirectory(prefix="tessera-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when the processes load torch
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work, args=(rank, world_size, store, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        self._results(START_TIMEOUT_S)

    def call(self, message: bytes, timeout_s: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send_bytes(message)
        try:
            return self._results(timeout_s)
        finally:
            # No rank is in a collective by now; a group that a rank closes earlier may take an answer with it.
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # it has died; the next call hears of it
                    pipe.send_bytes(_ALL_HAVE_ANSWERED)

    def _results(self, timeout_s: float) -> list[Any]:
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < len(self._pipes):
            missing = {self._pipes[r]: r for r in range(len(self._pipes)) if r not in outcomes}
            ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = missing[pipe]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    outcomes[rank] = _Outcome(error="the process died")
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + STRAGGLER_TIMEOUT_S)
        failed = {rank: o.error for rank, o in sorted(outcomes.items()) if o.error}
        late = sorted(set(range(len(self._pipes))) - set(outcomes))
        if late or 0 < len(failed) < len(outcomes) or (failed and uses_cuda()):
            # Some ranks are, or were, in the middle of a collective, or a GPU's context is lost:
            # the group is of no more use.
            self.stop()
        if failed:
            raise RankError("\n".join(f"rank {rank}: {error}" for rank, error in failed.items()))
        if late:
            raise RankError(f"ranks {late} did not answer within {timeout_s:.0f} s")
        return [outcomes[rank].value for rank in range(len(outcomes))]

    @property
    def stopped(self) -> bool:
        if not all(process.is_alive() for process in self._processes):
            self.stop()
        return not self._pipes

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        with contextlib.suppress(OSError):
            self._folder.cleanup()


_pools: dict[int, _Pool] = {}


@atexit.register
def _stop_all() -> None:
    for pool in _pools.values():
        pool.stop()


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    local_world_size: int | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank of a world.

    Args:
        world_size: number of ranks.
        function: a top-level function of a test file; it finds its rank in ``torch.distributed``.
        local_world_size: ranks per node (``LOCAL_WORLD_SIZE``); None puts all on one node.
        timeout_s: seconds after which a call counts as hanging.
        args, kwargs: what the function takes; pickled.

    Returns:
        What the ranks returned, by rank; tensors in it, also in lists, tuples and dictionaries, are
        on the CPU.

    Raises:
        RankError: the function failed on a rank, or did not return in time.
    """
    if uses_cuda() and torch.cuda.device_count() < world_size and not _share_gpus():
        pytest.skip(f"{world_size} ranks need as many GPUs; here are {torch.cuda.device_count()}")
    local = world_size if local_world_size is None else local_world_size
    environment = {"LOCAL_WORLD_SIZE": str(local)}
    call = pickle.dumps((function, args, kwargs))
    if world_size not in _pools or _pools[world_size].stopped:
        _pools[world_size] = _Pool(world_size)
    return _pools[world_size].call(pickle.dumps((environment, call)), timeout_s)
