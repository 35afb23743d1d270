"""What a batch must offer to be moved and used across CUDA streams."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Multistreamable(ABC):
    """Something that holds tensors and may be used on a stream that did not make them."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until the work now queued on ``stream`` is done.

        See https://pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html.
        """


class Pipelineable(Multistreamable):
    """A batch that a training pipeline can copy to a device ahead of its use."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Pipelineable:  # noqa: FBT001, FBT002 - as of torch.Tensor
        """The same batch on ``device``."""
