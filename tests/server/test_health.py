import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tessera.serving.server.front.health_service import HealthService, Serving
from tests.patience import PATIENCE_S
from tests.server.server_harness import config, serving

STATUS = health_pb2.HealthCheckResponse.ServingStatus


@pytest.fixture(scope="module")
def server():
    with serving(config("m", "other")) as running:
        yield running


@pytest.mark.parametrize("name", ["", "m", "other"])
def test_check(server, name):
    stub = health_pb2_grpc.HealthStub(server.channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
    assert reply.status == STATUS.SERVING


def test_check_of_an_unknown_name_is_not_found(server):
    stub = health_pb2_grpc.HealthStub(server.channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_watch_of_an_unknown_name_says_so_and_stays_open(server):
    stub = health_pb2_grpc.HealthStub(server.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=PATIENCE_S)
    assert next(watch).status == STATUS.SERVICE_UNKNOWN
    assert watch.is_active()
    watch.cancel()


def test_watch_sees_the_drain_and_does_not_hold_it_up():
    with serving() as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        watches = [
            stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
            for name in ("", "m")
        ]
        assert [next(watch).status for watch in watches] == [STATUS.SERVING] * 2
        server.thread.__exit__(None, None, None)
        assert [next(watch).status for watch in watches] == [STATUS.NOT_SERVING] * 2
        for watch in watches:
            assert list(watch) == []


def test_reflection_lists_and_describes_the_services(server):
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="predictor.Predictor"),
    ]
    names, described = list(stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE_S))
    listed = {service.name for service in names.list_services_response.service}
    assert {"predictor.Predictor", "grpc.health.v1.Health"} <= listed
    assert b"SharedFeatures" in described.file_descriptor_response.file_descriptor_proto[0]


def test_the_whole_is_serving_when_it_says_so_whatever_its_models_do():
    async def body():
        health = HealthService(["a"])
        health.set("b", Serving.SERVING)
        assert (health.check("a"), health.check("b")) == (Serving.NOT_SERVING, Serving.SERVING)
        assert health.check("") is Serving.NOT_SERVING
        health.set("", Serving.SERVING)
        health.remove("a")
        assert (health.check("a"), health.check("")) == (None, Serving.SERVING)
        health.stop_serving()
        # A load that ends in a drain does not make anything serving again.
        health.set("b", Serving.SERVING)
        assert {health.check(name) for name in ("", "b")} == {Serving.NOT_SERVING}

    asyncio.run(body())


def test_watch_gives_each_change_once():
    async def body():
        health = HealthService(["a"])
        seen = []

        async def watch():
            seen.extend([state async for state in health.watch("a")])

        task = asyncio.create_task(watch())
        await asyncio.sleep(0)
        for state in (Serving.SERVING, Serving.SERVING, Serving.NOT_SERVING):
            health.set("a", state)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        health.close()
        await asyncio.wait_for(task, 10)
        assert seen == [Serving.NOT_SERVING, Serving.SERVING, Serving.NOT_SERVING]

    asyncio.run(body())
