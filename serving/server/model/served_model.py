"""A model that answers, with everything that its calls need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from tessera.serving.package.schema import InputSchema
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.batching.batch_scheduler import BatchScheduler
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.follow.followed_model import FollowedModel
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.request.decoder import RequestDecoder
from tessera.serving.server.request.encoder import ResponseEncoder
from tessera.serving.server.request.infer_decoder import InferDecoder
from tessera.serving.server.request.infer_encoder import InferEncoder


class CallCount:
    """Counts the calls that a version has to answer; owned by the event loop.

    Attributes:
        inside: calls that have been accepted and have no answer yet.
    """

    def __init__(self) -> None:
        self.inside = 0
        self._at_end: Callable[[], None] | None = None

    def enter(self) -> None:
        """A call goes to this version."""
        self.inside += 1

    def leave(self) -> None:
        """A call that came in has its answer."""
        self.inside -= 1
        self._tell()

    def at_end(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once, when no call is inside; none comes in any more."""
        self._at_end = tell
        self._tell()

    def _tell(self) -> None:
        if self._at_end is not None and not self.inside:
            tell, self._at_end = self._at_end, None
            tell()


@dataclass(frozen=True, kw_only=True)
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
        limits: of its requests, queue and batches.
        calls: those that it has to answer.
        followed: what commits change; None: nothing does.
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
    limits: ModelLimits
    calls: CallCount = field(default_factory=CallCount)
    followed: FollowedModel | None = None

    @functools.cached_property
    def sample_bytes(self) -> int:
        """What one sample makes besides its message: its pooled vectors and its scores."""
        pooled = sum(feature.dim for feature in self.schema.features)
        return 4 * (pooled + sum(output.width for output in self.schema.outputs))

    @functools.cached_property
    def _shared_row_bytes(self) -> dict[str, int]:
        # Its length twice, as it came and in the batch, and its pooled vector.
        return {feature.name: 8 + 4 * feature.dim for feature in self.schema.group("id_list")}

    def shared_bytes(self, shared: pb.SharedFeatures) -> int:
        """What the rows of ``shared``, which has been checked, make besides their ids."""
        return shared.num_rows * sum(self._shared_row_bytes[name] for name in shared.names)
