"""The metrics of tokens and certificates: what was refused, and how their files were read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

REFUSALS = ("no_token", "unknown_token", "rate")
RESULTS = ("taken", "refused")


class SecurityMetrics:
    """Counters of one process, and of others of the same server.

    Attributes:
        refused: calls that were refused for their token, by reason.
        reloads: files that were read again, by kind (``tokens``, ``certificates``) and result; only kinds that this
            server has.
        certificate_ends: when the certificate ends, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.reloads: dict[str, dict[str, int]] = {}
        self.certificate_ends = 0.0
        self._others: Sequence[dict[str, int]] = ()

    def watch(self, kind: str) -> None:
        """This server has files of this ``kind``."""
        self.reloads[kind] = dict.fromkeys(RESULTS, 0)

    def take_others(self, refused: Sequence[dict[str, int]]) -> None:
        """Show these beside this process's own ``refused``, in the place of those of before."""
        self._others = refused

    def collect(self) -> Iterator[Metric]:
        """The families, as `prometheus_client` asks for them; without figures where nothing guards the server."""
        refused = CounterMetricFamily(
            "tessera_calls_refused",
            "Calls and requests that were refused for their token, by reason",
            labels=("reason",),
        )
        if "tokens" in self.reloads:
            for reason, count in self.refused.items():
                others = sum(other[reason] for other in self._others)
                refused.add_metric((reason,), count + others)
        reloads = CounterMetricFamily(
            "tessera_secret_reloads",
            "Changed files of tokens or certificates that were read again, by result",
            labels=("files", "result"),
        )
        for kind, results in self.reloads.items():
            for result, count in results.items():
                reloads.add_metric((kind, result), count)
        end = GaugeMetricFamily(
            "tessera_certificate_end_seconds",
            "When the server's certificate ends, seconds since 1970",
        )
        if "certificates" in self.reloads:
            end.add_metric((), self.certificate_ends)
        yield from (refused, reloads, end)


def add_counts(to: dict[str, int], more: dict[str, Any]) -> None:
    """Add the counts of ``more`` to those of ``to``."""
    for name, count in more.items():
        to[name] += count
