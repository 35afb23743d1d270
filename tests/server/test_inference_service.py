"""The KServe protocol's calls over the wire, where a test needs a model that it can hold."""

import io
import time

import grpc
import numpy as np
import pytest

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import inference_pb2_grpc
from tessera.serving.server.background import ServerThread
from tessera.serving.server.log import make_logger
from tests.kserve_messages import infer, infer_request, outputs_of, raw_infer, stub_of
from tests.patience import PATIENCE_S
from tests.server.server_harness import FakeLoader, config, request, scores_of, serving, value


def refusal(call, message, **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=PATIENCE_S, **options)
    return caught.value.code().name, caught.value.details()


def timed(micros):
    message = infer_request(request(7))
    message.parameters["timeout"].int64_param = micros
    return message


def test_scores_and_what_comes_with_them():
    with serving() as server:
        message = request(3, bag=2)
        response = infer(server, infer_request(message, id="mine"))
        np.testing.assert_array_equal(outputs_of(response)["default"], scores_of(message))
        assert [(output.name, list(output.shape)) for output in response.outputs] == [
            ("default", [3]),
            ("pair", [3, 2]),
        ]
        assert (response.model_name, response.model_version, response.id) == ("m", "m-v1", "mine")


def test_a_timeout_is_told_while_the_worker_is_busy():
    with serving() as server:
        server.runner.open.clear()
        busy = server.start(request())
        server.runner.entered.acquire()
        began = time.monotonic()
        code, text = refusal(stub_of(server).ModelInfer, timed(50_000))
        assert code == "DEADLINE_EXCEEDED"
        assert text == "the deadline passed while the request waited for a worker"
        assert time.monotonic() - began >= 0.05
        assert not busy.done()  # nobody waited for the batch
        metrics = server.metrics()
        assert value(metrics, "tessera_rejected_total", reason="deadline") == 1
        assert value(metrics, "tessera_requests_total", code="DEADLINE_EXCEEDED") == 1
        server.runner.open.set()
        assert busy.code().name == "OK"
        server.predict(request(2))
        assert server.runner.batch_sizes == [1, 2]  # the 7 samples were never computed
        metrics = server.metrics()
        assert value(metrics, "tessera_rejected_total", reason="deadline") == 1
        assert value(metrics, "tessera_queue_requests") == 0


def test_a_timeout_does_not_end_work_that_has_begun():
    with serving() as server:
        server.runner.open.clear()
        begun = stub_of(server).ModelInfer.future(timed(50_000))
        server.runner.entered.acquire()
        time.sleep(0.1)
        server.runner.open.set()
        assert len(outputs_of(begun.result(PATIENCE_S))["default"]) == 7


def test_a_timeout_that_is_over_at_once():
    with serving() as server:
        for micros in (1, 2):
            assert refusal(stub_of(server).ModelInfer, timed(micros))[0] == "DEADLINE_EXCEEDED"
        assert value(server.metrics(), "tessera_batch_samples_count") == 0


def test_the_call_s_deadline_stays_where_the_timeout_is_later():
    with serving() as server:
        server.runner.open.clear()
        busy = server.start(request())
        server.runner.entered.acquire()
        with pytest.raises(grpc.RpcError) as caught:
            stub_of(server).ModelInfer(timed(10**12), timeout=0.2)
        assert caught.value.code().name == "DEADLINE_EXCEEDED"
        server.runner.open.set()
        assert busy.code().name == "OK"


def test_while_a_model_loads():
    loader = FakeLoader()
    loader.open.clear()
    thread = ServerThread(config(), loader=loader, log=make_logger("error", "json", io.StringIO()))
    thread._thread.start()
    while thread.server is None or thread.server.port == 0:
        thread._thread.join(0.001)
    with grpc.insecure_channel(f"127.0.0.1:{thread.server.port}") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        loading = ("UNAVAILABLE", "model 'm' is still loading")
        assert refusal(stub.ModelInfer, infer_request(request())) == loading
        assert refusal(stub.ModelMetadata, ipb.ModelMetadataRequest(name="m")) == loading
        assert refusal(stub.ModelConfig, ipb.ModelConfigRequest()) == loading
        assert refusal(stub.ModelStatistics, ipb.ModelStatisticsRequest(name="m")) == loading
        assert not stub.ModelStatistics(ipb.ModelStatisticsRequest()).model_stats
        assert stub.ServerLive(ipb.ServerLiveRequest()).live
        assert not stub.ServerReady(ipb.ServerReadyRequest()).ready
        assert not stub.ModelReady(ipb.ModelReadyRequest(name="m")).ready
        assert refusal(stub.ModelReady, ipb.ModelReadyRequest(name="x"))[0] == "NOT_FOUND"
        (one,) = stub.RepositoryIndex(ipb.RepositoryIndexRequest()).models
        assert (one.name, one.version, one.state) == ("m", "", "LOADING")
        assert not stub.RepositoryIndex(ipb.RepositoryIndexRequest(ready=True)).models
        loader.open.set()
        thread._ready.wait(PATIENCE_S)
        assert stub.ModelReady(ipb.ModelReadyRequest(name="m")).ready
    thread.__exit__(None, None, None)


def test_a_model_on_gpus():
    class OnGpus(FakeLoader):
        def load(self, source):
            model = super().load(source)
            fields = {name: getattr(model, name) for name in model.__slots__}
            fields["table_bytes"] = {"cuda:2": 5, "cuda:0": 5}
            return type(model)(**fields)

    with serving(loader=OnGpus()) as server:
        config = stub_of(server).ModelConfig(ipb.ModelConfigRequest()).config
        (group,) = config.instance_group
        assert group.kind == ipb.ModelInstanceGroup.KIND_GPU
        assert list(group.gpus) == [0, 2]


def test_a_bug_has_an_id_that_is_in_the_log(monkeypatch):
    with serving() as server:
        module = "tessera.serving.server"
        monkeypatch.setattr(
            f"{module}.request.infer_encoder.InferEncoder.encode", lambda *_, **__: 1 / 0
        )
        monkeypatch.setattr(f"{module}.front.kserve_metadata._statistics", lambda _: 1 / 0)
        asked = [
            (stub_of(server).ModelInfer, infer_request(request())),
            (stub_of(server).ModelStatistics, ipb.ModelStatisticsRequest()),
        ]
        for call, message in asked:
            code, text = refusal(call, message)
            assert code == "INTERNAL"
            assert text.split("id ")[1].split()[0] in server.log.getvalue()
        monkeypatch.undo()
        infer(server, infer_request(request()))


def test_large_requests_come_back_whole():
    with serving() as server:
        message = request(2000)
        for typed in (False, True):
            response = infer(server, infer_request(message, typed=typed))
            np.testing.assert_array_equal(outputs_of(response)["default"], scores_of(message))


def test_the_message_limit_is_that_of_predict():
    with serving(config(max_message_bytes=2048)) as server:
        with pytest.raises(grpc.RpcError) as caught:
            raw_infer(server)(b"\0" * 4096, timeout=PATIENCE_S)
        assert caught.value.code().name == "RESOURCE_EXHAUSTED"
        infer(server, infer_request(request()))
