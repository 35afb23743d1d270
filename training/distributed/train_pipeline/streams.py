"""CUDA streams, which do nothing on a CPU."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch

from tessera.errors import UserError


def make_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    """A stream of its own on a GPU, None elsewhere."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call] # torch leaves it untyped


def is_cuda(stream: torch.Stream | None) -> TypeGuard[torch.cuda.Stream]:
    """Whether it is a stream of a GPU; a stream of the CPU (``torch.cpu.Stream``) orders nothing."""
    return isinstance(stream, torch.cuda.Stream)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Work in the block is queued on ``stream``, or where it always is."""
    return torch.cuda.stream(stream) if is_cuda(stream) else contextlib.nullcontext()


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """The batch on ``device``; the copy is waited for unless ``non_blocking``.

    Raises:
        UserError: the batch has no ``to``.
    """
    if not hasattr(batch, "to"):
        raise UserError(
            f"a batch is a {type(batch).__name__}; a pipeline takes tensors and what has "
            "to(device, non_blocking) and record_stream(stream), see Pipelineable"
        )
    return batch.to(device, non_blocking=non_blocking)


def get_h2d_func(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``, for a stage of `StagedTrainPipeline`; the copy is queued.

    Raises:
        UserError: the batch has no ``to``.
    """
    return to_device(batch, device)


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
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
        record_all(made)


def follow_current(*streams: torch.cuda.Stream | None) -> None:
    """Let streams wait for what is queued on the current one so far, such as a model's first weights."""
    for stream in streams:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))


def record_all(made: Any) -> Any:
    """Keep the memory of CUDA tensors until the work now queued on the current stream is done; return them."""
    if isinstance(made, (list, tuple, dict)):
        for part in made.values() if isinstance(made, dict) else made:
            record_all(part)
    elif hasattr(made, "record_stream") and getattr(made, "is_cuda", True):
        made.record_stream(torch.cuda.current_stream())
    return made


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after the work now queued on the current stream of a GPU, None elsewhere."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def work_queued() -> torch.cuda.Event | None:
    """`record_event` of the current device; None where no GPU was used so far, which then has nothing to wait for."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch leaves it untyped
    return torch.cuda.current_stream().record_event() if used else None


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let the current stream wait for an event of `record_event`."""
    if event is not None:
        event.wait()
