"""The clients' and servers' classes of ``inference.GRPCInferenceService``."""

from tessera.serving.protocol import inference_pb2
from tessera.serving.protocol.services import registration, servicer_class, stub_class

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

GRPCInferenceServiceStub = stub_class(_SERVICE)
GRPCInferenceServiceServicer = servicer_class(_SERVICE)
add_GRPCInferenceServiceServicer_to_server = registration(_SERVICE)  # noqa: N816 - as protoc names it
