"""An allocation that fails is a refusal of the request that asked for it, and the server lives on."""

import resource
from collections import Counter
from pathlib import Path

import grpc
import pytest
import torch

from tessera.serving.protocol import predictor_pb2 as pb
from tests.package_factory import package_file
from tests.patience import PATIENCE_S
from tests.server.server_harness import ForkedServer, f32, i32, request, serving, value

FULL = "the server has no memory left for this request; try again later"


def torchs_own():
    torch.empty(1 << 46)


def torchscripts():
    """What TorchScript makes of an error of torch's: another text around it, and no type."""
    torch.jit.script(_too_much)(1 << 46)


def _too_much(size: int) -> torch.Tensor:
    return torch.zeros(size)


def pythons():
    raise MemoryError


@pytest.mark.parametrize("fail", [torchs_own, torchscripts, pythons])
def test_a_failed_allocation_refuses_the_request(fail):
    with serving() as server:
        answer = server.predict(request())
        forward = server.runner.forward
        server.runner.forward = lambda _: fail()
        error = server.refused(request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == FULL
        server.runner.forward = forward
        assert server.predict(request()).predictions == answer.predictions
        metrics = server.metrics()
        assert value(metrics, "tessera_requests_total", model="m", code="RESOURCE_EXHAUSTED") == 1
        assert value(metrics, "tessera_rejected_total", model="m", reason="queue_full") == 1
    assert '"event": "out_of_memory"' in server.log.getvalue()
    assert "internal_error" not in server.log.getvalue()


def test_a_request_that_cannot_be_decoded_is_refused(monkeypatch):
    with serving() as server:
        monkeypatch.setattr(pb.PredictionRequest, "FromString", lambda _: pythons(), raising=False)
        assert server.refused(request()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def large_request(ids):
    message = pb.PredictionRequest(batch_size=1)
    message.float_features.num_features = 4
    message.float_features.values = f32([0.5] * 4)
    message.id_list_features.num_features = 7
    message.id_list_features.lengths = i32([ids, 0, 0, 0, 0, 0, 0])
    message.id_list_features.values = bytes(4 * ids)
    return message.SerializeToString()


def test_requests_under_a_limit_of_address_space(tmp_path):
    path = package_file(tmp_path)
    flags = ["--max-request-ids", "20000000", "--max-message-bytes", "100000000"]
    with ForkedServer(["--model", str(path), *flags, "--drain-propagation-ms", "0"]) as server:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(server.address, options) as channel:
            call = channel.unary_unary("/predictor.Predictor/Predict")
            small, large = large_request(3), large_request(10_000_000)
            expected = call(small, timeout=PATIENCE_S)
            pid = server.process.pid
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            room = pages * resource.getpagesize() + (150 << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (room, room))
            outcomes = Counter(call.future(large, timeout=PATIENCE_S).code().name for _ in range(4))
            assert outcomes.keys() <= {"OK", "RESOURCE_EXHAUSTED"}
            assert outcomes["RESOURCE_EXHAUSTED"]
            scores = [
                pb.PredictionResponse.FromString(answer).predictions["default"].data
                for answer in (expected, call(small, timeout=PATIENCE_S))
            ]
            assert scores[0] == scores[1]
        assert server.terminate() == 0
