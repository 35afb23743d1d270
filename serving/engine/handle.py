"""The C API in Python's types: prepared requests, numbers as tags, completions in lots.

`Engine` builds futures on it.  Shape legend: ``B`` samples of a request.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tessera.errors import UserError
from tessera.serving.client.arrays import Array, GroupArrays, RequestArrays
from tessera.serving.client.errors import PredictError, error_for_status
from tessera.serving.engine import c_api
from tessera.serving.engine.installed import engine_library
from tessera.serving.engine.options import EngineOptions

_LOT = 1_024  # completions that are taken at once
_MESSAGE_BYTES = 1_024
_OK = 0
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_COMPLETION = np.dtype(c_api.Completion)
_SUBMISSION = np.dtype(c_api.Submission)


class PreparedRequest:
    """A request in the C API's form, which may be submitted any number of times, also at once.

    ``arrays`` are borrowed where they have the right type and are contiguous, and copied otherwise;
    with ``copy`` always.  Borrowed ones must not change while a request of them is computed.

    Raises:
        UserError: ``arrays`` has shared features, which the engine does not take.
    """

    def __init__(
        self,
        arrays: RequestArrays,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        copy: bool = False,
    ) -> None:
        if arrays.shared is not None:
            raise UserError("shared features are not taken by the engine; give each sample its own")
        if timeout_s is not None and not 0 < timeout_s < 1e9:
            raise UserError(
                f"timeout_s is {timeout_s}; give seconds above 0 and below 1e9, or None"
            )
        self.batch_size = arrays.batch_size
        self._held: list[Array] = []
        dense, dense_count = self._pointer(arrays.dense, np.float32, copy)
        self.struct = c_api.Request(
            samples=arrays.batch_size,
            dense=dense,
            dense_count=dense_count,
            id_list=self._group(arrays.id_list, copy),
            id_score_list=self._group(arrays.id_score_list, copy),
            timeout_us=0 if timeout_s is None else max(1, round(timeout_s * 1e6)),
            priority=priority,
        )
        self.reference = ctypes.byref(self.struct)

    def _pointer(self, array: Array | None, dtype: Any, copy: bool) -> tuple[int | None, int]:  # noqa: FBT001
        if array is None or array.size == 0:
            return None, 0
        flat = np.array(array, dtype, copy=True) if copy else np.ascontiguousarray(array, dtype)
        self._held.append(flat)
        return flat.ctypes.data, flat.size

    def _group(self, group: GroupArrays | None, copy: bool) -> c_api.Group:  # noqa: FBT001
        if group is None:
            return c_api.Group()
        narrow = group.values.dtype == np.int32
        lengths, length_count = self._pointer(group.lengths, np.int32, copy)
        values, value_count = self._pointer(group.values, np.int32 if narrow else np.int64, copy)
        weights, weight_count = self._pointer(group.weights, np.float32, copy)
        return c_api.Group(
            lengths=lengths,
            length_count=length_count,
            values=values,
            value_count=value_count,
            weights=weights,
            weight_count=weight_count,
            value_bytes=4 if narrow else 8,
        )


class RequestSet:
    """Prepared requests that are submitted by their numbers, many in one call.

    Attributes:
        requests: the requests.
        batch_sizes: ``[R]`` int64, each request's ``B``.
        addresses: ``[R]`` uint64, where each lies in the C API's form.
    """

    def __init__(self, requests: Sequence[PreparedRequest]) -> None:
        self.requests = list(requests)
        self.batch_sizes = np.array([request.batch_size for request in self.requests], np.int64)
        found = [ctypes.addressof(request.struct) for request in self.requests]
        self.addresses = np.array(found, np.uint64)


@dataclass(frozen=True)
class Completions:
    """Requests that have ended, in their order.

    Attributes:
        tags: ``[N]`` uint64, the tags that they were submitted with.
        codes: ``[N]`` int32, gRPC's status codes; 0: the scores are there.
        messages: ``[N]`` bytes, why a request failed; empty where it did not.
    """

    tags: Array
    codes: Array
    messages: Array


class EngineHandle:
    """One loaded package; tessera_engine.h is the contract.  Any thread.

    What is left of it after `close` goes with the object.  A thread that waits must have ended before
    the interpreter does.

    Attributes:
        path: of the package.
        outputs: each output's name and how many scores it has of a sample.
        scores_per_sample: the sum of those.
        device: ``cpu`` or ``cuda``.

    Raises:
        UserError: the library is not there, or the package or an option has to be changed.
    """

    def __init__(self, package: str | Path, options: EngineOptions | None = None) -> None:
        self.path = Path(package)
        self._library = c_api.load(engine_library())
        self._own = threading.local()
        words = [word.encode() for word in (options or EngineOptions()).flags()]
        handle = ctypes.c_void_p()
        message = self._message()
        code = self._library.tessera_engine_open(
            str(self.path).encode(),
            (ctypes.c_char_p * len(words))(*words),
            len(words),
            ctypes.byref(handle),
            message,
            _MESSAGE_BYTES,
        )
        if code != _OK:
            raise UserError(message.value.decode())
        self._handle = handle
        weakref.finalize(self, self._library.tessera_engine_free, handle)
        facts = c_api.Facts()
        self._library.tessera_engine_describe(handle, ctypes.byref(facts))
        self.device = facts.device.decode()
        self.scores_per_sample: int = facts.scores_per_sample
        self.outputs: list[tuple[str, int]] = []
        width = ctypes.c_int64()
        for index in range(facts.outputs):
            name = self._library.tessera_engine_output(handle, index, ctypes.byref(width))
            self.outputs.append((name.decode(), width.value))

    def scores(self, batch_size: int) -> Array:
        """Memory for the scores of ``batch_size`` samples, float32 ``[B * scores_per_sample]``."""
        return np.empty(batch_size * self.scores_per_sample, np.float32)

    def submit(self, request: PreparedRequest, scores: Array, tag: int) -> None:
        """Queue ``request``; the completion ``tag`` will follow, with the scores in ``scores``.

        Both must live until then.  ``scores`` is float32, contiguous, with room for exactly
        ``B * scores_per_sample``.

        Raises:
            PredictError: the request was not taken; the type says why, as for `PredictorClient`.
        """
        message = self._message()
        code = self._library.tessera_engine_submit(
            self._handle,
            request.reference,
            scores.ctypes.data,
            scores.size,
            tag,
            message,
            _MESSAGE_BYTES,
        )
        if code != _OK:
            raise self.error(code, message.value)

    def submit_many(
        self, requests: RequestSet, numbers: Array, scores: Array, rows: Array, tags: Array
    ) -> tuple[int, PredictError | None]:
        """Queue many requests in one call, without the interpreter's lock while they are checked.

        All arrays and ``requests`` must live until the completions of what was taken have come.

        Args:
            requests: where the requests are.
            numbers: ``[N]`` integers, which of them are submitted, in this order; one may come again.
            scores: ``[M, k]`` float32, contiguous; the request ``i`` has its ``B * scores_per_sample``
                scores, of which ``k`` has to have room, at the beginning of row ``rows[i]``.
            rows: ``[N]`` integers, each row once among the requests that have not ended.
            tags: ``[N]`` integers from 0 on, of the completions.

        Returns:
            How many were taken, from the first on, and why the next one was not; None: all were.
        """
        lot = np.empty(len(numbers), _SUBMISSION)
        lot["request"] = requests.addresses[numbers]
        lot["scores"] = scores.ctypes.data + np.asarray(rows, np.uint64) * scores.strides[0]
        counts = requests.batch_sizes[numbers] * self.scores_per_sample
        if len(lot) > 0 and counts.max() > scores.shape[1]:
            raise UserError(
                f"scores has room for {scores.shape[1]} numbers a row; give {counts.max()}"
            )
        lot["score_count"] = counts
        lot["tag"] = tags
        message, code = self._message(), ctypes.c_int32()
        taken = self._library.tessera_engine_submit_many(
            self._handle, lot.ctypes.data, len(lot), ctypes.byref(code), message, _MESSAGE_BYTES
        )
        return taken, None if code.value == _OK else self.error(code.value, message.value)

    def _message(self) -> ctypes.Array[ctypes.c_char]:
        """This thread's memory for what a call says."""
        found: ctypes.Array[ctypes.c_char] | None = getattr(self._own, "message", None)
        if found is None:
            found = self._own.message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        return found

    def _completions(self) -> Array:
        """This thread's memory for completions."""
        found: Array | None = getattr(self._own, "completions", None)
        if found is None:
            found = self._own.completions = np.empty(_LOT, _COMPLETION)
        return found

    def error(self, code: int, message: bytes) -> PredictError:
        """What ``code`` and ``message`` of a completion are as an exception."""
        status = _CODES.get(code, grpc.StatusCode.UNKNOWN)
        return error_for_status(status, message.decode(errors="replace"), str(self.path))

    def wait(self, timeout_s: float | None = None) -> Completions | None:
        """The next completions, none where ``timeout_s`` passes first; None: closed, and all taken."""
        lot = self._completions()
        timeout_us = -1 if timeout_s is None else round(timeout_s * 1e6)
        count = self._library.tessera_engine_wait(self._handle, lot.ctypes.data, _LOT, timeout_us)
        if count < 0:
            return None
        tags, codes = lot["tag"][:count].copy(), lot["code"][:count].copy()
        if codes.any():
            return Completions(tags, codes, lot["message"][:count].copy())
        return Completions(tags, codes, np.zeros(count, "S1"))

    def close(self) -> None:
        """Compute what was taken, end the workers and give the model's memory back; blocks until then.

        `submit` raises `Unavailable` from now on; completions can still be taken.
        """
        self._library.tessera_engine_close(self._handle)


def split_outputs(
    outputs: Sequence[tuple[str, int]], scores: Array, batch_size: int
) -> dict[str, Array]:
    """Views of ``scores``: each output as ``[B]``, or ``[B, k]`` where it has ``k`` scores a sample."""
    found: dict[str, Array] = {}
    begin = 0
    for name, width in outputs:
        part = scores[begin : begin + batch_size * width]
        found[name] = part if width == 1 else part.reshape(batch_size, width)
        begin += batch_size * width
    return found
