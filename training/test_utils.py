"""What the tests of TorchRec programs import from `torchrec.test_utils`."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import unittest
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def get_free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_asan() -> bool:
    """Whether this process has the address sanitizer."""
    return hasattr(ctypes.CDLL(None), "__asan_init")


def is_tsan() -> bool:
    """Whether this process has the thread sanitizer."""
    return hasattr(ctypes.CDLL(None), "__tsan_init")


def is_asan_or_tsan() -> bool:
    """Whether this process has one of both."""
    return is_asan() or is_tsan()


def skip_if_asan(func: Callable[P, R]) -> Callable[P, R]:
    """Make a test that is skipped in a process with a sanitizer."""

    @functools.wraps(func)
    def skips(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_asan_or_tsan():
            raise unittest.SkipTest(
                "this process has a sanitizer, under which the test is too slow"
            )
        return func(*args, **kwargs)

    return skips


def skip_if_asan_class(cls: C) -> C:
    """Make a class of tests that are skipped in a process with a sanitizer."""
    if is_asan_or_tsan():
        return unittest.skip("this process has a sanitizer, under which the tests are too slow")(
            cls
        )
    return cls


def init_distributed_single_host(
    rank: int, world_size: int, backend: str, local_size: int | None = None
) -> dist.ProcessGroup:
    """Join the default process group anew; ``MASTER_ADDR`` and ``MASTER_PORT`` say where.

    Args:
        rank: of this process.
        world_size: processes.
        backend: ``gloo`` or ``nccl``.
        local_size: processes that count as one node; None: all.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size or world_size)
    os.environ["LOCAL_RANK"] = str(rank % local_size if local_size else rank)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(rank=rank, world_size=world_size, backend=backend)
    group = dist.group.WORLD
    assert group is not None
    return group
