"""CUDA streams, which do nothing on a CPU."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from tessera.errors import UserError


def make_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    """A stream of its own on a GPU, None elsewhere."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call] # torch leaves it untyped


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Work in the block is queued on ``stream``, or where it always is."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``, without waiting for the copy.

    Raises:
        UserError: the batch has no ``to``.
    """
    if not hasattr(batch, "to"):
        raise UserError(
            f"a batch is a {type(batch).__name__}; a pipeline takes tensors and what has "
            "to(device, non_blocking) and record_stream(stream), see Pipelineable"
        )
    return batch.to(device, non_blocking=True)


def hand_over(stream: torch.cuda.Stream | None, *made: Any) -> None:
    """Let the current stream use a batch, or anything else, that ``stream`` made.

    Raises:
        UserError: it has no ``record_stream``.
    """
    if stream is None:
        return
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    for part in made:
        if not hasattr(part, "record_stream"):
            raise UserError(
                f"a batch is a {type(part).__name__} without record_stream(stream); its memory could "
                "be reused while it is in use, see Multistreamable"
            )
        part.record_stream(current)


def hand_over_all(stream: torch.cuda.Stream | None, made: Any) -> None:
    """Let the current stream use what ``stream`` made: anything with ``record_stream``, in containers too."""
    if stream is None:
        return
    if isinstance(made, dict):
        made = list(made.values())
    if isinstance(made, (list, tuple)):
        for part in made:
            hand_over_all(stream, part)
    elif hasattr(made, "record_stream"):
        hand_over(stream, made)
