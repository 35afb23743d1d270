"""From a loaded model to one that answers: its decoders, its batch scheduler and its counters."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessera.serving.server.batching.batch_scheduler import BatchScheduler
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.metrics.feature_counts import FeatureCounter
from tessera.serving.server.metrics.model_metrics import ModelInfo, ModelMetrics
from tessera.serving.server.model.loader import LoadedModel
from tessera.serving.server.model.replicas import Replicas
from tessera.serving.server.model.served_model import ServedModel
from tessera.serving.server.request.decoder import RequestDecoder
from tessera.serving.server.request.encoder import ResponseEncoder
from tessera.serving.server.request.infer_decoder import InferDecoder
from tessera.serving.server.request.infer_encoder import InferEncoder


def serve_model(
    model: LoadedModel, path: str, metrics: ModelMetrics, limits: ModelLimits, log: Any
) -> ServedModel:
    """``model``, of the package ``path``, with everything that its calls need; on the event loop's thread.

    Args:
        model: see `LoadedModel`.
        path: its package.
        metrics: its counters; the model's name and version are theirs.
        limits: of its requests, queue and batches.
        log: where failures go.

    Raises:
        UserError: the system gives no thread for a worker.
    """
    _show(model, metrics)
    scheduler = BatchScheduler(
        schema=model.schema,
        runner=model.runner,
        limits=limits,
        metrics=metrics,
        loop=asyncio.get_running_loop(),
        log=log,
        clock=time.monotonic,
        lock=None if model.followed is None else model.followed.lock,
        short_passes=(
            model.followed is None and model.devices == ("cpu",) and limits.threads_per_worker == 1
        ),
    )
    if isinstance(model.runner, Replicas):
        for replica, device in enumerate(model.devices):
            metrics.inflight_by_device[device] = functools.partial(model.runner.in_work, replica)
    else:
        metrics.inflight_by_device[model.devices[0]] = metrics.inflight_batches
    schema, shares_rows = model.schema, model.runner.shares_rows
    names = {"model_name": metrics.model, "model_version": metrics.version}
    return ServedModel(
        name=metrics.model,
        version=metrics.version,
        file_name=Path(path).name,
        gpus=_gpus(model),
        schema=schema,
        decoder=RequestDecoder(schema, limits, shares_rows=shares_rows),
        encoder=ResponseEncoder(schema.outputs, **names),
        infer_decoder=InferDecoder(schema, limits, shares_rows=shares_rows),
        infer_encoder=InferEncoder(schema.outputs, **names, follows=model.followed is not None),
        scheduler=scheduler,
        metrics=metrics,
        limits=limits,
        followed=model.followed,
    )


def _show(model: LoadedModel, metrics: ModelMetrics) -> None:
    metrics.device = model.device
    metrics.info = ModelInfo(sha256=model.file_hash.known, torch=model.torch, dtype=model.dtype)
    metrics.load_seconds = model.load_seconds
    metrics.feature_counter = FeatureCounter(model.schema, model.vocabularies)
    for device, held in model.table_bytes.items():
        metrics.memory_bytes[device, "tables"] = _always(held)
        if device != "cpu":
            # Of the whole process: tables, dense weights and activations.
            metrics.memory_bytes[device, "reserved"] = functools.partial(
                torch.cuda.memory_reserved, device
            )


def _always(number: int) -> Callable[[], int]:
    return lambda: number


def _gpus(model: LoadedModel) -> tuple[int, ...]:
    """CUDA's numbers of the GPUs that hold tables of ``model``."""
    return tuple(
        sorted(int(device[5:]) for device in model.table_bytes if device.startswith("cuda:"))
    )
