"""`PredictorClient`: numpy in, numpy out, one blocking call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from tessera.serving.client.arrays import Array, BagsLike, RequestArrays, Shared
from tessera.serving.client.codec import (
    DEFAULT_TIMEOUT_S,
    METHOD,
    ChannelOptions,
    Codec,
    channel_options,
    check_address,
    check_timeout,
)
from tessera.serving.client.errors import Unavailable, error_for_status
from tessera.serving.client.prediction import Prediction
from tessera.serving.client.retry import Retry
from tessera.serving.package.schema import InputSchema

if TYPE_CHECKING:
    from typing_extensions import Self


class PredictorClient:
    """A connection to a Tessera (or TorchRec) inference server.

    One client may be used by many threads at once; they share its connection.  Close it, or
    use it as a context manager::

        with PredictorClient("127.0.0.1:50051", schema=read_schema("model.pt")) as client:
            scores = client.predict(dense, {"C1": [[7], [8, 9]], ...}).outputs["default"]

    Args:
        address: ``HOST:PORT``, or another target form of gRPC's.  Nothing is sent until the
            first call.
        schema: the model's inputs (`read_schema` takes them from a package).  With it, names,
            order, widths and dtypes are checked before anything is sent.
        timeout_s: the time limit of a call that gives none, in seconds.
        retry: send again after UNAVAILABLE; None (the default) never does.
        compact_ids: send int64 ids as int32 where they fit.
        options: further gRPC channel options.

    Raises:
        UserError: the address or the timeout cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        schema: InputSchema | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: Retry | None = None,
        compact_ids: bool = False,
        options: ChannelOptions = (),
    ) -> None:
        self._address = check_address(address)
        self._timeout_s = check_timeout(timeout_s)
        self._codec = Codec(address, schema, compact_ids=compact_ids)
        self._retry = retry or Retry(attempts=1)
        self._rng = random.Random()  # noqa: S311 - spreads retries, guards nothing
        self._sleep: Callable[[float], None] = time.sleep
        self._channel = grpc.insecure_channel(address, options=channel_options(options))
        # Bytes pass through: encoding is a step of its own, which load generators do ahead.
        self._call = self._channel.unary_unary(METHOD, None, None)

    def predict(
        self,
        dense: Array | Sequence[Sequence[float]] | None,
        sparse: Mapping[str, BagsLike],
        *,
        shared: Shared | None = None,
        model: str = "",
        version: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Prediction:
        """Score ``B`` samples.

        Args:
            dense: ``[B, F]`` floats, NaN where a value is missing; None for a model without.
            sparse: each feature's bags: ``(lengths [B], values [N])`` or ``(lengths, values,
                weights [N])`` as a tuple, or one list of ids per sample, or an integer array
                ``[B]`` or ``[B, k]``.  Without a schema, in the model's order.
            shared: features given once per user, see `Shared`.
            model: the model's name; empty for the server's only or first one.
            version: its version; empty for the one that is loaded.
            priority: a request with a higher number is served first.
            timeout_s: the call's time limit in seconds, retries included; the server drops
                the work when it has passed.

        Raises:
            UserError: the request was wrong and has not been sent.
            PredictError: it brought no answer; the subclass says why.
        """
        arrays = self._codec.assemble(dense, sparse, shared)
        return self.predict_arrays(
            arrays, model=model, version=version, priority=priority, timeout_s=timeout_s
        )

    def predict_arrays(
        self,
        arrays: RequestArrays,
        *,
        model: str = "",
        version: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Prediction:
        """Score a request whose arrays are laid out already, as `RequestDrawer` draws them.

        They are sent as they are; the server checks them.

        Raises:
            PredictError: as `predict`.
        """
        data = self._codec.encode(arrays, model=model, version=version, priority=priority)
        response = self.send(data, timeout_s=timeout_s)
        return self._codec.decode(response, arrays.batch_size)

    def send(self, request: bytes, *, timeout_s: float | None = None) -> bytes:
        """Send an encoded ``PredictionRequest`` and return the encoded response.

        Raises:
            PredictError: as `predict`.
        """
        limit_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        deadline = time.monotonic() + limit_s
        waits_s = self._retry.waits_s(self._rng)
        while True:
            try:
                return bytes(self._call(request, timeout=max(0.0, deadline - time.monotonic())))
            except grpc.RpcError as rpc_error:
                error = error_for_status(rpc_error.code(), rpc_error.details(), self._address)
                wait_s = next(waits_s, None) if isinstance(error, Unavailable) else None
                if wait_s is None or time.monotonic() + wait_s >= deadline:
                    raise error from rpc_error
            self._sleep(wait_s)

    def close(self) -> None:
        """Close the connection; calls in flight end as CANCELLED.  May be called twice."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
