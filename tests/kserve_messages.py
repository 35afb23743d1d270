"""Requests of the KServe v2 protocol from PredictionRequests, and calls that send them."""

import numpy as np

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import inference_pb2_grpc
from tests.patience import PATIENCE_S

DTYPES = {"FP32": "<f4", "INT32": "<i4", "INT64": "<i8"}
FIELDS = {"FP32": "fp32_contents", "INT32": "int_contents", "INT64": "int64_contents"}


def tensors_of(message):
    """Name, datatype, shape and bytes of every tensor that stands for ``message``."""
    B, F = message.batch_size, message.float_features.num_features
    tensors = []
    if F:
        tensors.append(("float_features", "FP32", [B, F], message.float_features.values))
    for group in ("id_list_features", "id_score_list_features"):
        part = getattr(message, group)
        if not part.num_features:
            continue
        wide = bool(part.values_int64) or not part.values
        values = part.values_int64 if wide else part.values
        ids = len(values) // (8 if wide else 4)
        tensors.append((f"{group}_lengths", "INT32", [B * part.num_features], part.lengths))
        tensors.append((f"{group}_values", "INT64" if wide else "INT32", [ids], values))
        if group == "id_score_list_features":
            tensors.append((f"{group}_weights", "FP32", [ids], part.weights))
    return tensors


def infer_request(message, *, typed=False, **fields):
    """``message`` as a ModelInferRequest, with raw or typed contents."""
    request = ipb.ModelInferRequest(
        model_name=message.model_name, model_version=message.model_version, **fields
    )
    for name, datatype, shape, content in tensors_of(message):
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        if typed:
            numbers = np.frombuffer(content, DTYPES[datatype]).tolist()
            getattr(tensor.contents, FIELDS[datatype]).extend(numbers)
        else:
            request.raw_input_contents.append(content)
    if message.priority:
        request.parameters["priority"].uint64_param = 2**31 - 1 - message.priority
    return request


def stub_of(server):
    return inference_pb2_grpc.GRPCInferenceServiceStub(server.channel)


def infer(server, request, **options):
    options.setdefault("timeout", PATIENCE_S)
    return stub_of(server).ModelInfer(request, **options)


def raw_infer(server):
    """ModelInfer from bytes to bytes."""
    return server.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")


def outputs_of(response):
    """Every output's numbers by name."""
    return {
        output.name: np.frombuffer(content, "<f4").reshape(list(output.shape))
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
