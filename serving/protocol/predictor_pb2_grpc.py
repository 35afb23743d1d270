"""The clients' and servers' classes of ``predictor.Predictor``."""

from tessera.serving.protocol import predictor_pb2
from tessera.serving.protocol.services import registration, servicer_class, stub_class

_SERVICE = predictor_pb2.DESCRIPTOR.services_by_name["Predictor"]

PredictorStub = stub_class(_SERVICE)
PredictorServicer = servicer_class(_SERVICE)
add_PredictorServicer_to_server = registration(_SERVICE)  # noqa: N816 - as protoc names it
