"""A thread that takes batches from an iterator and copies them to the device."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Condition, Thread
from typing import Any, Generic

import torch

from tessera.training.distributed.train_pipeline.pipelines import In
from tessera.training.distributed.train_pipeline.streams import make_stream, on_stream, to_device


class DataLoadingThread(Thread, Generic[In]):
    """Has the next batch on the device while the current one is worked on; holds one batch at most.

    Call ``start()``, then `get_next_batch` from one thread.  It is a daemon, so a program ends although
    the iterator waits.

    Args:
        device: where batches are copied to.
        dataloader_iter: gives the batches.
        to_device_non_blocking: whether a copy is queued rather than waited for.
        memcpy_stream_priority: of the stream of copies, where none is given.
        memcpy_stream: the stream of copies on a GPU; None: a stream of its own.
    """

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[In],
        to_device_non_blocking: bool,  # noqa: FBT001 - the signature TorchRec users know
        memcpy_stream_priority: int = 0,
        memcpy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(name="DataLoadingThread", daemon=True)
        self._device = device
        self._iterator = dataloader_iter
        self._non_blocking = to_device_non_blocking
        self._memcpy_stream = memcpy_stream or make_stream(device, memcpy_stream_priority)
        self._changed = Condition()
        self._batch: Any = None
        self._error: BaseException | None = None
        self._ended = False  # the thread takes no further batch
        self._stopping = False

    def run(self) -> None:
        """Take batches until the iterator ends, raises, or `stop` is called."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batch is None or self._stopping)
                if self._stopping:
                    return
            batch, error = None, None
            try:
                batch = self._load()
            except Exception as raised:  # noqa: BLE001 - raised again where the batch is asked for
                error = raised
            with self._changed:
                self._batch, self._error = batch, error
                self._ended = self._ended or batch is None
                self._changed.notify_all()
                if self._ended:
                    return

    def _load(self) -> Any:
        batch = next(self._iterator, None)
        if batch is None:
            return None
        with on_stream(self._memcpy_stream):
            return to_device(batch, self._device, non_blocking=self._non_blocking)

    def stop(self) -> None:
        """Take no further batch; one that was taken can still be asked for."""
        with self._changed:
            self._stopping = self._ended = True
            self._changed.notify_all()

    def get_next_batch(self, none_throws: bool = False) -> Any:  # noqa: FBT001, FBT002 - the signature TorchRec users know
        """The next batch, on the device; waits for it.

        Args:
            none_throws: raise ``StopIteration`` at the end rather than return None.

        Raises:
            StopIteration: no batch is left, and ``none_throws``.
            Exception: what the iterator raised, once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._batch is not None or self._ended)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            batch, self._batch = self._batch, None
            self._changed.notify_all()
        if batch is None and none_throws:
            raise StopIteration
        return batch
