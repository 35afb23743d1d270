"""What a batch must offer to be moved and used across CUDA streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, cast

import torch


class Multistreamable:
    """Something that holds tensors and may be used on a stream that did not make them."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until the work now queued on ``stream`` is done.

        These are the tensors in this object's fields, and in lists and tuples there.  See
        https://pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html.
        """
        _record(vars(self).values(), cast("torch.cuda.Stream", stream))


def _record(parts: Iterable[Any], stream: torch.cuda.Stream) -> None:
    for part in parts:
        if isinstance(part, (list, tuple)):
            _record(part, stream)
        elif isinstance(part, Multistreamable) or (isinstance(part, torch.Tensor) and part.is_cuda):
            part.record_stream(stream)


class Pipelineable(Multistreamable, ABC):
    """A batch that a training pipeline can copy to a device ahead of its use."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Pipelineable:  # noqa: FBT001, FBT002 - as of torch.Tensor
        """The same batch on ``device``."""
