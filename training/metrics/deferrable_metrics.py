"""The values of metrics, at hand or still being computed, as one mapping.

`RecMetricModule.compute` returns one whose values are at hand.  A program that computes elsewhere wraps a
`concurrent.futures.Future` of the values: what waits for them says `subscribe`, and what reads an entry
waits until they are there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Values = dict[str, Any]


def device_supports_async(device: torch.device) -> bool:
    """Return whether copies from the device run beside the program: from CUDA devices."""
    return device.type == "cuda"


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which values are copied, so that copies do not wait for later kernels."""
    if device not in _streams:
        _streams.setdefault(device, torch.cuda.Stream(device=device))  # type: ignore[no-untyped-call]
    return _streams[device]


def transfer_tensors_to_cpu(tensors: Values) -> tuple[Values, torch.cuda.Event | None]:
    """Begin to copy the CUDA tensors among values to page-locked memory.

    Args:
        tensors: tensors, all CUDA ones of one device, and other values.

    Returns:
        The values with the copies in the place of CUDA tensors, and an event after which the copies may be
        read; ``tensors`` itself and None where none is on a CUDA device.
    """
    on_device = {
        name: value
        for name, value in tensors.items()
        if isinstance(value, Tensor) and device_supports_async(value.device)
    }
    if not on_device:
        return tensors, None
    device = next(iter(on_device.values())).device
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    copies: Values = {}
    with torch.cuda.stream(stream):
        for name, value in on_device.items():
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            copies[name] = copy.copy_(value.detach(), non_blocking=True)
            value.record_stream(stream)  # its memory is not given to others before the copy
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return tensors | copies, event


class DeferrableMetrics(Mapping[str, Any]):
    """Values by name that are there, or will be when a future is done.

    Reading entries waits for the future, and says so once in the process's log.  It is always true, also
    without entries, so that ``metrics or {}`` keeps it.  Threads may share one.

    Args:
        inner: the values, which are copied, or the future of them.
    """

    _warned = False

    def __init__(self, inner: Values | Future[Values]) -> None:
        self._lock = threading.Lock()
        self._future: Future[Values] | None = inner if isinstance(inner, Future) else None
        self._values: Values | None = None if isinstance(inner, Future) else dict(inner)

    def is_resolved(self) -> bool:
        """Return whether the values are here; this does not wait."""
        return self._values is not None

    def resolve(self) -> Values:
        """The values themselves; waits for them.

        Raises:
            Exception: what the future ended with.
        """
        with self._lock:
            values, future = self._values, self._future
        if values is not None:
            return values
        assert future is not None, "what has no values has a future"
        return self._take(future, future.result())

    def _take(self, future: Future[Values], values: Values) -> Values:
        """Keep the values of ``future``, unless it was replaced or they are here; returns what is kept."""
        with self._lock:
            if self._values is not None:
                return self._values
            if self._future is future:
                self._values = values
        return values

    def subscribe(
        self,
        callback: Callable[[Values], None],
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """Have ``callback`` called with the values: now, or by the thread that ends the future.

        Args:
            callback: gets what later calls of `update` do not change.
            on_error: called with the future's or the callback's exception, which is logged without it.
        """
        with self._lock:
            values, future = self._values, self._future
        if values is not None:
            callback(values)
            return
        assert future is not None, "what has no values has a future"

        def ended(done: Future[Values]) -> None:
            try:
                callback(self._take(done, done.result()))
            except Exception as error:
                if on_error is None:
                    raise  # the future logs it
                on_error(error)

        future.add_done_callback(ended)

    def update(self, other: Values | DeferrableMetrics) -> None:
        """Put values over these, now or when these, and those of ``other``, are there.

        CUDA tensors are copied to the host.  Callbacks of earlier calls of `subscribe` get these values
        without the others.  An error of ``other`` ends the future of these where that is not done.
        """
        if isinstance(other, DeferrableMetrics):
            with self._lock:
                mine = self._future

            def failed(error: Exception) -> None:
                if mine is not None and not mine.done():
                    mine.set_exception(error)

            other.subscribe(self.update, failed)
            return
        copies, event = transfer_tensors_to_cpu(other)
        with self._lock:
            if self._values is not None:
                if event is not None:
                    event.synchronize()
                self._values.update(copies)
                return
            before, merged = self._future, Future[Values]()
            self._future = merged
        assert before is not None, "what has no values has a future"

        def ended(done: Future[Values]) -> None:
            try:
                if event is not None:
                    event.synchronize()
                merged.set_result({**done.result(), **copies})
            except Exception as error:  # noqa: BLE001 - whoever waits for the values gets it
                merged.set_exception(error)

        before.add_done_callback(ended)

    def _entries(self) -> Values:
        if self._values is None and not DeferrableMetrics._warned:
            DeferrableMetrics._warned = True
            logger.warning(
                "metrics are waited for, since an entry of a DeferrableMetrics was read before they were "
                "there; use subscribe"
            )
        return self.resolve()

    def __getitem__(self, name: str) -> Any:
        return self._entries()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.resolve()[name] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __bool__(self) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        state = "pending" if self._values is None else f"resolved, {len(self._values)} keys"
        return f"DeferrableMetrics({state})"
