"""What a server shows beside its answers: its metrics and its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import ModelMetrics


class Pages(Protocol):
    """What shows a server's metrics and state."""

    async def start(self, host: str, port: int) -> int:
        """Begin to show them; returns the port where they are."""
        ...

    def counted(self, model: ModelMetrics) -> ModelMetrics:
        """What the whole server has counted for ``model``, which is this process's share of it."""
        ...

    async def stop(self) -> None:
        """Show them no longer."""
        ...


MakePages = Callable[[MetricsPage, Callable[[], str]], Pages]
"""Makes it from the metrics and from what tells the server's state."""
