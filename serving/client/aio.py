"""`AsyncPredictorClient`: the client for asyncio programs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc.aio

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


class AsyncPredictorClient:
    """`PredictorClient` for asyncio; arguments, results and errors are the same.

    To be made and used within one running event loop::

        async with AsyncPredictorClient("127.0.0.1:50051", schema=schema) as client:
            answers = await asyncio.gather(*(client.predict(...) for ... in ...))

    Cancelling a call's task cancels the request at the server.
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
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(options))
        self._call = self._channel.unary_unary(METHOD, None, None)

    async def predict(
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
        """Score ``B`` samples; see `PredictorClient.predict`."""
        arrays = self._codec.assemble(dense, sparse, shared)
        return await self.predict_arrays(
            arrays, model=model, version=version, priority=priority, timeout_s=timeout_s
        )

    async def predict_arrays(
        self,
        arrays: RequestArrays,
        *,
        model: str = "",
        version: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Prediction:
        """Score a request that is laid out; see `PredictorClient.predict_arrays`."""
        data = self._codec.encode(arrays, model=model, version=version, priority=priority)
        response = await self.send(data, timeout_s=timeout_s)
        return self._codec.decode(response, arrays.batch_size)

    async def send(self, request: bytes, *, timeout_s: float | None = None) -> bytes:
        """Send an encoded request and return the encoded response; see `PredictorClient.send`."""
        limit_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        deadline = time.monotonic() + limit_s
        waits_s = self._retry.waits_s(self._rng)
        while True:
            try:
                remaining_s = max(0.0, deadline - time.monotonic())
                return bytes(await self._call(request, timeout=remaining_s))
            except grpc.aio.AioRpcError as rpc_error:
                error = error_for_status(rpc_error.code(), rpc_error.details(), self._address)
                wait_s = next(waits_s, None) if isinstance(error, Unavailable) else None
                if wait_s is None or time.monotonic() + wait_s >= deadline:
                    raise error from rpc_error
            await self._sleep(wait_s)

    async def close(self) -> None:
        """Close the connection; calls in flight end as CANCELLED.  May be called twice."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
