"""Benchmarks of several ranks: processes of this machine that form one process group."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def in_ranks(work: Callable[..., Any], ranks: int, backend: str, *arguments: Any) -> Any:
    """Call ``work(*arguments)`` in every rank; returns what it returns in rank 0, as JSON has it.

    ``work`` is a function of a module.  With NCCL in the ``backend``, each rank has a GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, backend, folder, work, arguments), nprocs=ranks)  # type: ignore[no-untyped-call] # torch leaves it untyped
        return json.loads((Path(folder) / "found.json").read_text())


def _rank(  # noqa: PLR0917 - torch's spawn gives them by position
    rank: int,
    ranks: int,
    backend: str,
    folder: str,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    try:
        found = work(*arguments)
    finally:
        gc.collect()  # cycles of pipelines and models hold the group, whose threads end with it
        dist.destroy_process_group()
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
