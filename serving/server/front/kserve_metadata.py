"""What the KServe protocol's calls tell of the server and its models, without gRPC.

ModelInfer is answered like Predict (`wire_protocol`), what is about repositories by `repository_methods`; everything
else of the service is here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from tessera.serving.package.schema import InputSchema, OutputSpec
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.batching.workers import refusal_of
from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.front.shared_memory_calls import SharedMemoryCalls
from tessera.serving.server.front.wire_protocol import invalid_message
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.model.registry import Registry
from tessera.serving.server.model.served_model import ServedModel
from tessera.serving.server.request.infer_decoder import LOWEST_PRIORITY, inputs_of
from tessera.serving.server.request.infer_tensors import Tensor
from tessera.serving.server.request.shared_memory import SharedMemory

_PLATFORM = "pytorch_torchscript"
_BACKEND = "tessera"
_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "schedule_policy",
    "statistics",
)


class KserveMetadata:
    """Answers every call of the service but ModelInfer.

    Args:
        registry: the models.
        version: the server's.
        state: ``ready`` or the word for why it is not.
        counted: from a model's counters in this process to those of the whole server.
        log: where bugs go.
        memory: what clients may register; None: the calls about it are not there.

    Attributes:
        regions: answers these calls; None: they are not there.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        version: str,
        state: Callable[[], str],
        counted: Callable[[ModelMetrics], ModelMetrics],
        log: Any,
        memory: SharedMemory | None = None,
    ) -> None:
        self._registry = registry
        self._version = version
        self._state = state
        self._counted = counted
        self._log = log
        # Each request's type, and what answers it.
        self._calls: dict[str, tuple[type[Message], Callable[[Any], Message]]] = {
            "ServerLive": (ipb.ServerLiveRequest, self._server_live),
            "ServerReady": (ipb.ServerReadyRequest, self._server_ready),
            "ModelReady": (ipb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": (ipb.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": (ipb.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": (ipb.ModelConfigRequest, self._model_config),
            "ModelStatistics": (ipb.ModelStatisticsRequest, self._model_statistics),
        }
        self._extensions: tuple[str, ...] = _EXTENSIONS
        self.regions = None if memory is None else SharedMemoryCalls(memory)
        if self.regions is not None:
            self._calls |= self.regions.calls()
            self._extensions += ("system_shared_memory",)

    def methods(self) -> list[str]:
        """The calls that `answer` knows."""
        return list(self._calls)

    def answer(self, method: str, content: bytes) -> bytes:
        """One call's response.

        Raises:
            ServeError: the status to answer with.
        """
        kind, call = self._calls[method]
        try:
            request = kind.FromString(content)
        except DecodeError as error:
            raise invalid_message(content, f"{method}Request", error) from None
        return self._told(call, request).SerializeToString()

    async def tell(self, request: Message) -> Any:
        """The response to ``request``, as `answer` gives it in bytes.

        Raises:
            ServeError: the status to answer with.
        """
        _, call = self._calls[request.DESCRIPTOR.name.removesuffix("Request")]
        return self._told(call, request)

    def _told(self, call: Callable[[Any], Message], request: Message) -> Message:
        try:
            return call(request)
        except ServeError:
            raise
        except Exception as failure:
            raise refusal_of(self._log, failure) from failure

    def _server_live(self, _request: ipb.ServerLiveRequest) -> ipb.ServerLiveResponse:
        return ipb.ServerLiveResponse(live=True)

    def _server_ready(self, _request: ipb.ServerReadyRequest) -> ipb.ServerReadyResponse:
        return ipb.ServerReadyResponse(ready=self._state() == "ready")

    def _model_ready(self, request: ipb.ModelReadyRequest) -> ipb.ModelReadyResponse:
        try:
            self._registry.find(request.name, request.version)
        except ServeError as error:
            if error.code is not Code.UNAVAILABLE:
                raise
            return ipb.ModelReadyResponse(ready=False)
        return ipb.ModelReadyResponse(ready=self._state() != "draining")

    def _server_metadata(self, _request: ipb.ServerMetadataRequest) -> ipb.ServerMetadataResponse:
        return ipb.ServerMetadataResponse(
            name=_BACKEND, version=self._version, extensions=self._extensions
        )

    def _model_metadata(self, request: ipb.ModelMetadataRequest) -> ipb.ModelMetadataResponse:
        model = self._registry.find(request.name, request.version)
        response = ipb.ModelMetadataResponse(
            name=model.name,
            versions=[model.version] if request.version else self._versions(model),
            platform=_PLATFORM,
        )
        for tensor in inputs_of(model.schema):
            response.inputs.add(
                name=tensor.name, datatype=tensor.datatypes[0], shape=_input_shape(tensor, model)
            )
        for output in model.schema.outputs:
            response.outputs.add(name=output.name, datatype="FP32", shape=_output_shape(output))
        return response

    def _versions(self, model: ServedModel) -> list[str]:
        """The versions of its model that answer."""
        return [each.version for each in self._registry.loaded_of(model.name)]

    def _model_config(self, request: ipb.ModelConfigRequest) -> ipb.ModelConfigResponse:
        model = self._registry.find(request.name, request.version)
        limits = model.limits
        config = ipb.ModelConfig(
            name=model.name,
            platform=_PLATFORM,
            backend=_BACKEND,
            max_batch_size=0,
            default_model_filename=model.file_name,
        )
        for tensor in inputs_of(model.schema):
            config.input.add(
                name=tensor.name,
                data_type=ipb.DataType.Value(f"TYPE_{tensor.datatypes[0]}"),
                dims=_input_shape(tensor, model),
            )
        for output in model.schema.outputs:
            config.output.add(name=output.name, data_type=ipb.TYPE_FP32, dims=_output_shape(output))
        config.dynamic_batching.max_queue_delay_microseconds = limits.max_delay_us
        config.dynamic_batching.priority_levels = LOWEST_PRIORITY
        config.dynamic_batching.default_priority_level = LOWEST_PRIORITY
        config.dynamic_batching.default_queue_policy.max_queue_size = limits.max_queue_requests
        kind = ipb.ModelInstanceGroup.KIND_GPU if model.gpus else ipb.ModelInstanceGroup.KIND_CPU
        config.instance_group.add(name=model.name, kind=kind, count=limits.workers, gpus=model.gpus)
        info = model.metrics.info
        parameters = {
            "tessera_max_batch_samples": str(limits.max_batch_samples),
            "tessera_max_batch_ids": str(limits.max_batch_ids),
            "features": _feature_names(model.schema),
            "weight_dtype": info.dtype if info else "",
            "sha256": (info.sha256() if info else None) or "",
        }
        if model.followed is not None:
            parameters["commit"] = str(model.followed.lock.state.commit)
        for name, value in parameters.items():
            config.parameters[name].string_value = value
        return ipb.ModelConfigResponse(config=config)

    def _model_statistics(self, request: ipb.ModelStatisticsRequest) -> ipb.ModelStatisticsResponse:
        if request.name and request.version:
            models = [self._registry.find(request.name, request.version)]
        elif request.name:
            self._registry.find(request.name, "")
            models = list(self._registry.loaded_of(request.name))
        else:
            models = list(self._registry.loaded())
        return ipb.ModelStatisticsResponse(
            model_stats=[_statistics(self._counted(model.metrics)) for model in models]
        )


def _feature_names(schema: InputSchema) -> str:
    """The names of the features of each group that the model has, in their order, as JSON."""
    groups = {
        "float_features": list(schema.dense_features),
        "id_list_features": [feature.name for feature in schema.group("id_list")],
        "id_score_list_features": [feature.name for feature in schema.group("id_score_list")],
    }
    present = {group: names for group, names in groups.items() if names}
    return json.dumps(present, ensure_ascii=False, separators=(",", ":"))


def _input_shape(tensor: Tensor, model: ServedModel) -> list[int]:
    return [-1] if tensor.rank == 1 else [-1, len(model.schema.dense_features)]


def _output_shape(output: OutputSpec) -> list[int]:
    return [-1] if output.width == 1 else [-1, output.width]


def _statistics(metrics: ModelMetrics) -> ipb.ModelStatistics:
    """What the metrics page shows as histograms, as the sums that Triton tells."""
    calls = sum(metrics.requests.values())
    answered = metrics.requests[Code.OK]
    batches = metrics.batch_samples.count()

    def spent(*stages: str) -> float:
        return sum(metrics.stages[stage].sum for stage in stages)

    return ipb.ModelStatistics(
        name=metrics.model,
        version=metrics.version,
        last_inference=metrics.last_answer_ms,
        inference_count=metrics.answered_samples,
        execution_count=batches,
        inference_stats=ipb.InferStatistics(
            success=_duration(answered, metrics.answered_seconds),
            fail=_duration(calls - answered, metrics.duration.sum - metrics.answered_seconds),
            queue=_duration(metrics.stages["queue"].count(), spent("queue")),
            compute_input=_duration(batches, spent("decode", "assemble", "transfer")),
            compute_infer=_duration(batches, spent("forward")),
            compute_output=_duration(batches, spent("split", "encode")),
        ),
    )


def _duration(count: int, seconds: float) -> ipb.StatisticDuration:
    # A difference of sums may be a rounding error below 0.
    return ipb.StatisticDuration(count=count, ns=max(0, round(seconds * 1e9)))
