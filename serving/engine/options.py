"""How an engine is opened: tessera-server's flags that mean something without its ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

_JOINED = {"gpus"}
"""Flags that take all of their values in one word."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `Engine`; None is the server's default, which `tessera-server --help` names.

    Attributes:
        workers: threads that compute batches, for each device.
        threads_per_worker: threads inside one forward pass.
        worker_niceness: nice levels by which workers stand back behind other threads.
        gpus: CUDA's numbers of the GPUs that a package made for GPUs is loaded on; None: every one.
        max_batch_samples: samples of a batch.
        max_batch_ids: ids of a batch.
        max_delay_us: how long a free worker waits for more requests, microseconds.
        max_request_samples: samples of a request.
        max_request_ids: ids of a request.
        max_queue_requests: requests that may wait for a worker.
        max_queue_samples: samples that may wait for a worker.
        max_inflight_bytes: what requests may take until their completion is taken, bytes.
        skip_golden: do not compute the package's golden answers first.
        allow_op: operators that the graph may call beside those that every package may.
        ops_dir: folders with operator libraries, searched first.
        require_signature: refuse a package that no key of ``public_key`` has signed.
        public_key: PEM files with Ed25519 public keys.
        log_level: which lines are written to stderr.
        log_format: how they are written.
    """

    workers: int | None = None
    threads_per_worker: int | None = None
    worker_niceness: int | None = None
    gpus: Sequence[int] | None = None
    max_batch_samples: int | None = None
    max_batch_ids: int | None = None
    max_delay_us: int | None = None
    max_request_samples: int | None = None
    max_request_ids: int | None = None
    max_queue_requests: int | None = None
    max_queue_samples: int | None = None
    max_inflight_bytes: int | None = None
    skip_golden: bool = False
    allow_op: Sequence[str] = ()
    ops_dir: Sequence[str | Path] = ()
    require_signature: bool = False
    public_key: Sequence[str | Path] = ()
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_format: Literal["json", "text"] | None = None

    def flags(self) -> list[str]:
        """The options as words of the C API, each ``--name=value`` or ``--name``."""
        words = []
        for field in fields(self):
            name, value = "--" + field.name.replace("_", "-"), getattr(self, field.name)
            if value is None or value is False:
                continue
            if value is True:
                words.append(name)
            elif field.name in _JOINED:
                words.append(f"{name}={','.join(map(str, value))}")
            elif isinstance(value, Sequence) and not isinstance(value, str):
                words += [f"{name}={each}" for each in value]
            else:
                words.append(f"{name}={value}")
        return words
