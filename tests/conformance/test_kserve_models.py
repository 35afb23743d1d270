"""The KServe v2 protocol with Triton's extensions: what it tells of the server and its models."""

import json
import socket
import time

import grpc
import pytest

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import inference_pb2_grpc
from tests.conformance.conformance_harness import LIMITS, TIMEOUT_S, RunningServer
from tests.conformance.tasks_module import package_tasks
from tests.kserve_messages import infer, infer_request, stub_of

NAMED = {
    "ModelReady": ipb.ModelReadyRequest,
    "ModelMetadata": ipb.ModelMetadataRequest,
    "ModelConfig": ipb.ModelConfigRequest,
    "ModelStatistics": ipb.ModelStatisticsRequest,
}
"""The calls that name a model."""


def ask(server, method, request):
    return getattr(stub_of(server), method)(request, timeout=TIMEOUT_S)


def refusal(server, method, request):
    with pytest.raises(grpc.RpcError) as caught:
        ask(server, method, request)
    return caught.value.code().name, caught.value.details()


def test_live_and_ready(server):
    assert ask(server, "ServerLive", ipb.ServerLiveRequest()).live
    assert ask(server, "ServerReady", ipb.ServerReadyRequest()).ready
    for name, version in [("", ""), ("ranker", ""), ("ranker", "3"), ("second", "1")]:
        assert ask(server, "ModelReady", ipb.ModelReadyRequest(name=name, version=version)).ready


@pytest.mark.parametrize("method", NAMED)
def test_unknown_models_and_versions(server, method):
    code, text = refusal(server, method, NAMED[method](name="nobody"))
    assert code == "NOT_FOUND"
    assert text == "model_name 'nobody' is unknown; this server has 'ranker', 'second'"
    code, text = refusal(server, method, NAMED[method](name="ranker", version="9"))
    assert code == "NOT_FOUND"
    assert text == "model_version '9' of model 'ranker' is not loaded; version '3' is"


def test_metadata_of_the_server(server):
    found = ask(server, "ServerMetadata", ipb.ServerMetadataRequest())
    (build,) = server.families()["tessera_build_info"].samples
    assert (found.name, found.version) == ("tessera", build.labels["version"])
    assert list(found.extensions) == [
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "schedule_policy",
        "statistics",
    ]


def described(tensors):
    return [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in tensors]


def test_metadata_of_a_model(server):
    for name in ("ranker", ""):
        found = ask(server, "ModelMetadata", ipb.ModelMetadataRequest(name=name))
        assert (found.name, list(found.versions)) == ("ranker", ["3"])
        assert found.platform == "pytorch_torchscript"
        assert described(found.inputs) == [
            ("float_features", "FP32", [-1, 4]),
            ("id_list_features_lengths", "INT32", [-1]),
            ("id_list_features_values", "INT64", [-1]),
        ]
        assert described(found.outputs) == [("default", "FP32", [-1])]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.pt"
    package_tasks(path)
    return path


def configured(tensors):
    return [
        (tensor.name, ipb.DataType.Name(tensor.data_type), list(tensor.dims)) for tensor in tensors
    ]


def test_metadata_and_config_of_a_model_with_every_group(kind, tasks):
    flags = ["--model", f"mine={tasks}", "--drain-propagation-ms", 0, "--workers", 3]
    flags += ["--max-delay-us", 700, "--max-queue-requests", 77]
    flags += ["--max-batch-samples", 99, "--max-batch-ids", 999]
    with RunningServer(kind, *flags) as server:
        metadata = ask(server, "ModelMetadata", ipb.ModelMetadataRequest(name="mine"))
        outputs = {name: shape for name, _, shape in described(metadata.outputs)}
        assert described(metadata.inputs) == [
            ("float_features", "FP32", [-1, 2]),
            ("id_list_features_lengths", "INT32", [-1]),
            ("id_list_features_values", "INT64", [-1]),
            ("id_score_list_features_lengths", "INT32", [-1]),
            ("id_score_list_features_values", "INT64", [-1]),
            ("id_score_list_features_weights", "FP32", [-1]),
        ]
        assert outputs == {"score": [-1], "logits": [-1, 3]}
        server.wait_for(
            lambda: (
                [
                    sample.labels["sha256"]
                    for sample in server.families()["tessera_model_info"].samples
                ]
                != [""]
            )
        )
        (info,) = (sample.labels for sample in server.families()["tessera_model_info"].samples)
        config = ask(server, "ModelConfig", ipb.ModelConfigRequest(name="mine")).config
    assert (config.name, config.platform, config.backend) == (
        "mine",
        "pytorch_torchscript",
        "tessera",
    )
    assert config.max_batch_size == 0
    assert configured(config.input) == [
        (name, f"TYPE_{datatype}", shape) for name, datatype, shape in described(metadata.inputs)
    ]
    assert configured(config.output) == [
        (name, f"TYPE_{datatype}", shape) for name, datatype, shape in described(metadata.outputs)
    ]
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    batching = config.dynamic_batching
    assert batching.max_queue_delay_microseconds == 700
    assert batching.priority_levels == batching.default_priority_level == 2**31 - 1
    assert batching.default_queue_policy.max_queue_size == 77
    (group,) = config.instance_group
    assert (group.name, group.count, list(group.gpus)) == ("mine", 3, [])
    assert group.kind == ipb.ModelInstanceGroup.KIND_CPU
    assert config.default_model_filename == "tasks.pt"
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    assert list(json.loads(parameters.pop("features"))) == [
        *("float_features", "id_list_features", "id_score_list_features")
    ]
    assert parameters == {
        "tessera_max_batch_samples": "99",
        "tessera_max_batch_ids": "999",
        "weight_dtype": info["dtype"],
        "sha256": info["sha256"],
    }


def statistics(server, name):
    (one,) = ask(server, "ModelStatistics", ipb.ModelStatisticsRequest(name=name)).model_stats
    return one


def test_statistics_count_both_protocols(server, drawn):
    server.settle()
    before = statistics(server, "second")
    began_ms = time.time_ns() // 1_000_000
    server.predict(drawn.samples(3, model="second"))
    infer(server, infer_request(drawn.samples(5, model="second")))
    bad = infer_request(drawn.samples(1, model="second"))
    bad.inputs[0].name = "nothing"
    assert refusal(server, "ModelInfer", bad)[0] == "INVALID_ARGUMENT"

    def counted(found):
        return found.execution_count, found.inference_stats.fail.count

    batches, failures = counted(before)
    server.wait_for(lambda: counted(statistics(server, "second")) == (batches + 2, failures + 1))
    after = statistics(server, "second")
    ended_ms = time.time_ns() // 1_000_000
    assert (after.name, after.version) == ("second", "1")
    assert began_ms <= after.last_inference <= ended_ms
    assert after.inference_count == before.inference_count + 8
    past, now = before.inference_stats, after.inference_stats
    assert now.success.count == past.success.count + 2
    assert now.success.ns > past.success.ns
    assert now.fail.ns > past.fail.ns
    assert now.queue.count == past.queue.count + 2
    for part in ("compute_input", "compute_infer", "compute_output"):
        assert getattr(now, part).count == getattr(past, part).count + 2, part
        assert getattr(now, part).ns > getattr(past, part).ns, part


def test_statistics_are_those_of_the_metrics_page(server, drawn):
    infer(server, infer_request(drawn.samples(2)))
    server.predict(drawn.samples(2))

    def total(name, **labels):
        return server.value(name, model="ranker", **labels)

    def stage(*names):
        return sum(total("tessera_stage_duration_seconds_sum", stage=name) for name in names) * 1e9

    asked = []

    def is_settled():
        """Whether nothing was counted while the statistics were asked for; an answer's last stages come after it."""
        stages = ("queue", "decode", "assemble", "transfer", "forward", "split", "encode")
        before = [stage(name) for name in stages]
        asked.append(statistics(server, "ranker"))
        return before == [stage(name) for name in stages] and (
            total("tessera_requests_total", code="OK") == asked[-1].inference_stats.success.count
        )

    server.wait_for(is_settled)
    found = asked[-1]
    parts = found.inference_stats
    requests = total("tessera_requests_total")
    near = {"rel": 1e-3, "abs": 5e3}
    assert parts.success.count + parts.fail.count == requests
    assert parts.success.ns + parts.fail.ns == pytest.approx(
        total("tessera_request_duration_seconds_sum") * 1e9, **near
    )
    assert parts.queue.count == total("tessera_stage_duration_seconds_count", stage="queue")
    assert parts.queue.ns == pytest.approx(stage("queue"), **near)
    assert parts.compute_input.ns == pytest.approx(stage("decode", "assemble", "transfer"), **near)
    assert parts.compute_infer.ns == pytest.approx(stage("forward"), **near)
    assert parts.compute_output.ns == pytest.approx(stage("split", "encode"), **near)
    batches = total("tessera_batch_samples_count")
    assert found.execution_count == batches
    assert (parts.compute_input.count, parts.compute_infer.count) == (batches, batches)
    assert parts.compute_output.count == batches


def test_statistics_of_all_models(server):
    found = ask(server, "ModelStatistics", ipb.ModelStatisticsRequest()).model_stats
    assert [(one.name, one.version) for one in found] == [("ranker", "3"), ("second", "1")]


def test_cancelled_calls_count_as_failures(kind, package, drawn):
    # The C++ server drops a cancelled request when the delay has passed.
    flags = ["--model", package, "--workers", 1, "--max-delay-us", 10_000_000]
    with RunningServer(kind, *flags, "--drain-propagation-ms", 0) as server:
        assert statistics(server, "ranker").last_inference == 0
        call = stub_of(server).ModelInfer.future(infer_request(drawn.samples(1)))
        server.wait_for(lambda: server.value("tessera_queue_requests") == 1)
        call.cancel()
        server.wait_for(lambda: statistics(server, "ranker").inference_stats.fail.count == 1)
        assert statistics(server, "ranker").inference_count == 0


def test_repository_index(server):
    for ready in (False, True):
        found = ask(server, "RepositoryIndex", ipb.RepositoryIndexRequest(ready=ready)).models
        assert [(one.name, one.version, one.state, one.reason) for one in found] == [
            ("ranker", "3", "READY", ""),
            ("second", "1", "READY", ""),
        ]


def test_there_is_one_repository(server):
    request = ipb.RepositoryIndexRequest(repository_name="other")
    assert refusal(server, "RepositoryIndex", request) == (
        "INVALID_ARGUMENT",
        "repository_name is 'other', expected '': the models given at start are the only repository",
    )


# The second is there with --shared-memory: test_shared_memory.py.
@pytest.mark.parametrize("method", ["TraceSetting", "SystemSharedMemoryRegister"])
def test_calls_that_are_not_there(server, method):
    call = server.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert server.http("/v2/systemsharedmemory/status")[0] == 404


def test_bytes_that_are_no_message(server):
    for method in ("ModelReady", "ModelConfig", "RepositoryIndex"):
        call = server.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff" * 7, timeout=TIMEOUT_S)
        # Whether gRPC or the server reads them is each server's own.
        assert caught.value.code() in {
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.INVALID_ARGUMENT,
        }


def reachable(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_what_is_said_while_models_load(kind, package, other_package):
    if kind == "given":
        pytest.skip("watches a server start")
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    models = ["--model", package, "--model", f"second={other_package}"]
    server = RunningServer(kind, *models, *LIMITS, "--drain-propagation-ms", 0, port=port)
    server.address = f"127.0.0.1:{port}"
    while not reachable(port):
        assert server.process.poll() is None, "".join(server.noise)
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        options = {"timeout": TIMEOUT_S, "wait_for_ready": True}
        assert stub.ServerLive(ipb.ServerLiveRequest(), **options).live
        ready = False
        while not ready:
            first = stub.ModelReady(ipb.ModelReadyRequest(name="ranker"), **options).ready
            index = stub.RepositoryIndex(ipb.RepositoryIndexRequest(), **options).models
            only_ready = stub.RepositoryIndex(ipb.RepositoryIndexRequest(ready=True), **options)
            ready = stub.ServerReady(ipb.ServerReadyRequest(), **options).ready
            assert [one.name for one in index] == ["ranker", "second"]
            for one, version in zip(index, ("3", "1"), strict=True):
                expected = {("LOADING", ""), ("READY", version)}
                assert (one.state, one.version) in expected
            assert all(one.state == "READY" for one in only_ready.models)
            if first:
                assert stub.ModelMetadata(ipb.ModelMetadataRequest(), **options).name == "ranker"
        assert stub.ModelReady(ipb.ModelReadyRequest(name="second"), **options).ready
    with server:
        pass


def test_what_is_said_while_the_server_drains(kind, package):
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 2000) as server:
        server.signal()
        server.wait_for(lambda: server.http("/readyz")[0] == 503)
        assert ask(server, "ServerLive", ipb.ServerLiveRequest()).live
        assert not ask(server, "ServerReady", ipb.ServerReadyRequest()).ready
        assert not ask(server, "ModelReady", ipb.ModelReadyRequest(name="ranker")).ready
        assert ask(server, "ModelMetadata", ipb.ModelMetadataRequest()).name == "ranker"
        assert ask(server, "ServerMetadata", ipb.ServerMetadataRequest()).name == "tessera"
        assert server.exit_status() == 0
