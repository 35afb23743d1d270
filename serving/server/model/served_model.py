"""A model that answers, with everything that its calls need."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.serving.package.schema import InputSchema
from tessera.serving.server.batching.batch_scheduler import BatchScheduler
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.request.decoder import RequestDecoder
from tessera.serving.server.request.encoder import ResponseEncoder
from tessera.serving.server.request.infer_decoder import InferDecoder
from tessera.serving.server.request.infer_encoder import InferEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that answers.

    Attributes:
        name: what requests call it.
        version: the version that is loaded.
        file_name: its package's, without the folder.
        gpus: CUDA's numbers of the GPUs that it runs on.
        schema: what it takes and gives.
        decoder: checks its requests.
        encoder: writes its responses.
        infer_decoder: checks its requests in the KServe protocol.
        infer_encoder: writes its responses in the KServe protocol.
        scheduler: computes its scores.
        metrics: counts its requests.
        sample_answer_bytes: the scores of one sample.
    """

    name: str
    version: str
    file_name: str
    gpus: tuple[int, ...]
    schema: InputSchema
    decoder: RequestDecoder
    encoder: ResponseEncoder
    infer_decoder: InferDecoder
    infer_encoder: InferEncoder
    scheduler: BatchScheduler
    metrics: ModelMetrics
    sample_answer_bytes: int
