"""Blocking work beside the event loop, on a thread that cannot keep the process alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from tessera.serving.server.named_thread import NamedThread

_Result = TypeVar("_Result")


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """``work()`` on a thread that cannot keep the process alive, unlike an executor's."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type] # None is right where _Result is None

    def body() -> None:
        result: _Result | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - it is raised again where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed without waiting
            loop.call_soon_threadsafe(settle, result, error)

    NamedThread(target=body, name="loader", daemon=True).start()
    return await done
