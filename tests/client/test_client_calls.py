"""Both clients against a real gRPC server: answers, errors, deadlines, retries, threads."""

import asyncio
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from tessera.errors import UserError
from tessera.serving.client import (
    AsyncPredictorClient,
    Bags,
    Credentials,
    DeadlineExceeded,
    Draw,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PredictError,
    PredictorClient,
    RequestDrawer,
    Retry,
    ServerBug,
    Shared,
    Unavailable,
    encode_request,
)
from tessera.serving.client.codec import check_address
from tessera.serving.protocol import predictor_pb2 as pb
from tests.client.client_schemas import schema
from tests.client.fake_predictor import FakeServer, reference_scores, running
from tests.patience import PATIENCE_S

DENSE = np.array([[0.5, 1.0], [2.0, 3.0]], dtype=np.float32)
SPARSE = {
    "C1": [[1], [2, 3]],
    "C2": [[], [4]],
    "W1": Bags.from_lists([[5], []], [[0.5], []]),
}
# Dense 1.5 and 5; C1 counts once, C2 twice, W1 (first of its group) once with its weight.
SCORES = [1.5 + 1 + 0.5 * 5, 5 + 2 + 3 + 2 * 4]


class AsBlocking:
    """The asyncio client behind the blocking client's interface, so that both are tested alike."""

    def __init__(self, *args, **kwargs):
        self.runner = asyncio.Runner() if sys.version_info >= (3, 11) else _OldRunner()

        async def make():
            return AsyncPredictorClient(*args, **kwargs)

        self.client = self.runner.run(make())

    def predict(self, *args, **kwargs):
        return self.runner.run(self.client.predict(*args, **kwargs))

    def predict_arrays(self, *args, **kwargs):
        return self.runner.run(self.client.predict_arrays(*args, **kwargs))

    def __enter__(self):
        assert self.runner.run(self.client.__aenter__()) is self.client
        return self

    def __exit__(self, *exc_info):
        self.runner.run(self.client.__aexit__(*exc_info))
        self.runner.close()


class _OldRunner:
    """`asyncio.Runner` for Python 3.10."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def close(self):
        self.loop.close()


@pytest.fixture(params=[PredictorClient, AsBlocking], ids=["sync", "asyncio"])
def connect(request):
    return request.param


@pytest.fixture
def closed_port():
    """A port that nothing listens on, for as long as the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_scores_come_back_per_sample(server, connect):
    with connect(server.address, schema=schema()) as client:
        prediction = client.predict(
            DENSE, SPARSE, model="m", version="7", traffic_key="user 7", priority=3
        )
    assert prediction.outputs["default"].tolist() == SCORES
    assert (prediction.model_name, prediction.model_version) == ("m", "7")
    assert prediction.timings.queue_us == 3
    assert prediction.timings.forward_us == 70
    assert prediction.timings.batch_requests == 2
    assert prediction.timings.batch_samples == 9
    assert (server.requests[0].priority, server.requests[0].traffic_key) == (3, "user 7")


def test_a_call_carries_metadata_of_its_own_beside_the_token(server, connect, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    credentials = Credentials(token_file=tmp_path / "token")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with connect(server.address, schema=schema(), credentials=credentials) as client:
        client.predict(DENSE, SPARSE, metadata={"traceparent": parent, "x-request-id": "a page"})
        client.predict(DENSE, SPARSE)
    first, second = server.metadata
    assert (first["traceparent"], first["x-request-id"]) == (parent, "a page")
    assert "traceparent" not in second
    assert first["authorization"] == second["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"Traceparent": "x"}, "metadata has the name 'Traceparent'"),
        ({"a-bin": "x"}, "metadata has the name 'a-bin'"),
        ({"grpc-timeout": "1S"}, "metadata has the name 'grpc-timeout'"),
        ({"": "x"}, "metadata has the name ''"),
        ({"a": "b\nc"}, "metadata['a'] is 'b\\nc'; give printable ASCII"),
        ({"a": 3}, "metadata['a'] is 3; give printable ASCII"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_sent_is_named(server, connect, metadata, expected):
    with connect(server.address) as client, pytest.raises(UserError) as refused:
        client.predict(DENSE, SPARSE, metadata=metadata)
    assert str(refused.value).startswith(expected)
    assert server.requests == []


def test_servers_of_one_name_are_called_in_turn(server, connect):
    with running(FakeServer()) as other:
        ports = [fake.address.rpartition(":")[2] for fake in (server, other)]
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        with connect(target, schema=schema()) as client:
            # The second connection may come a moment after the first one.
            until = time.monotonic() + PATIENCE_S
            while not (server.requests and other.requests) and time.monotonic() < until:
                client.predict(DENSE, SPARSE)
            before = len(server.requests), len(other.requests)
            for _ in range(20):
                client.predict(DENSE, SPARSE)
        assert (len(server.requests), len(other.requests)) == (before[0] + 10, before[1] + 10)


def test_wide_outputs_are_a_matrix(server, connect):
    server.width = 3
    with connect(server.address) as client:
        prediction = client.predict(DENSE, SPARSE)
    assert prediction.outputs["default"].tolist() == [[score] * 3 for score in SCORES]


def test_shared_user_features_give_the_same_scores(server, connect):
    own = {"C1": [[1], [2]], "C2": [[7, 8], [7, 8]], "W1": ([0, 0], [], [])}
    shared = Shared.one_user({"C2": own.pop("C2")[:1]}, 2)
    with connect(server.address, schema=schema()) as client:
        once = client.predict(DENSE, own, shared=shared).outputs["default"]
    # C2 is the only shared feature and so counts once rather than as second of its group.
    assert once.tolist() == [1.5 + 1 + 15, 5 + 2 + 15]


def test_random_requests_are_answered(server, connect):
    drawer = RequestDrawer(schema(), Draw(missing_dense=0), seed=3)
    with connect(server.address) as client:
        for arrays in (drawer.samples(1), drawer.samples(17), drawer.ranking(9)):
            prediction = client.predict_arrays(arrays)
            request = pb.PredictionRequest.FromString(encode_request(arrays))
            expected = np.array(reference_scores(request), dtype=np.float32)
            assert np.array_equal(prediction.outputs["default"], expected)


def test_a_wrong_request_is_not_sent(server, connect):
    with connect(server.address, schema=schema()) as client, pytest.raises(UserError):
        client.predict(DENSE, {"C1": [[1], [2]]})
    assert server.requests == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sparse": [[[1], [2]]]}, "sparse is a list; give a dictionary"),
        ({"priority": "high"}, "priority is 'high'; give a whole number"),
        ({"priority": 2**31}, "priority is 2147483648; give a whole number from -2147483648 to 21"),
        ({"model": 3}, "model is 3; give a string"),
        ({"version": 1}, "version is 1; give a string"),
        ({"traffic_key": 7}, "traffic_key is 7; give a string"),
        ({"traffic_key": "\u00fc" * 513}, "traffic_key has 1026 bytes; give at most 1024"),
        ({"traffic_key": "\udc80"}, r"traffic_key is '\\udc80', which UTF-8 cannot hold"),
    ],
)
def test_arguments_of_another_kind_are_not_sent(server, connect, wrong, message):
    given = {"sparse": {"C1": [[1], [2]]}, **wrong}
    with connect(server.address) as client, pytest.raises(UserError, match=message):
        client.predict(DENSE, given.pop("sparse"), **given)
    assert server.requests == []


def test_a_path_is_no_schema(server, connect):
    with pytest.raises(UserError, match=r"schema is 'model.pt'; give what read_schema"):
        connect(server.address, schema="model.pt")


CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.INTERNAL: ServerBug,
    grpc.StatusCode.UNKNOWN: ServerBug,
    grpc.StatusCode.CANCELLED: PredictError,
}


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_each_status_has_its_exception(server, connect, code):
    server.failures = [(code, "lengths: 3 of 4")]
    with connect(server.address) as client:
        with pytest.raises(PredictError) as caught:
            client.predict(DENSE, SPARSE)
        assert type(caught.value) is CODES[code]
        assert caught.value.code is code
        assert caught.value.message == "lengths: 3 of 4"
        assert str(caught.value) == f"{server.address} answered {code.name}: lengths: 3 of 4"
        assert len(server.requests) == 1
        # The connection lives on.
        assert client.predict(DENSE, SPARSE).outputs["default"].tolist() == SCORES


def test_an_answer_of_the_wrong_size_is_the_servers_bug(server, connect):
    server.width = 0
    with connect(server.address) as client, pytest.raises(ServerBug, match="has 0 values"):
        client.predict(DENSE, SPARSE)


def test_no_answer_within_the_limit(server, connect):
    server.hold = True
    with connect(server.address) as client, pytest.raises(DeadlineExceeded):
        client.predict(DENSE, SPARSE, timeout_s=0.05)


def test_nobody_there(closed_port, connect):
    with connect(f"127.0.0.1:{closed_port}") as client, pytest.raises(Unavailable):
        client.predict(DENSE, SPARSE)


def record_sleeps(client, monkeypatch):
    slept = []

    def sleep(seconds):
        slept.append(seconds)

    async def sleep_async(seconds):
        slept.append(seconds)

    if isinstance(client, AsBlocking):
        monkeypatch.setattr(client.client, "_sleep", sleep_async)
    else:
        monkeypatch.setattr(client, "_sleep", sleep)
    return slept


RETRY = Retry(attempts=3, first_backoff_s=0.1, max_backoff_s=0.15)


def test_unavailable_is_tried_again_where_asked(server, connect, monkeypatch):
    server.failures = [(grpc.StatusCode.UNAVAILABLE, "draining")] * 2
    with connect(server.address, retry=RETRY) as client:
        slept = record_sleeps(client, monkeypatch)
        assert client.predict(DENSE, SPARSE).outputs["default"].tolist() == SCORES
    assert len(server.requests) == 3
    assert 0.05 <= slept[0] <= 0.1
    assert 0.075 <= slept[1] <= 0.15


def test_attempts_end(server, connect, monkeypatch):
    server.failures = [(grpc.StatusCode.UNAVAILABLE, "draining")] * 9
    with connect(server.address, retry=RETRY) as client:
        record_sleeps(client, monkeypatch)
        with pytest.raises(Unavailable, match="draining"):
            client.predict(DENSE, SPARSE)
    assert len(server.requests) == 3


def test_no_attempt_beyond_the_time_limit(server, connect, monkeypatch):
    server.failures = [(grpc.StatusCode.UNAVAILABLE, "draining")] * 9
    retry = Retry(attempts=5, first_backoff_s=60, max_backoff_s=60)
    with connect(server.address, retry=retry) as client:
        slept = record_sleeps(client, monkeypatch)
        with pytest.raises(Unavailable):
            client.predict(DENSE, SPARSE, timeout_s=20)
    assert slept == []
    assert len(server.requests) == 1


def test_nothing_but_unavailable_is_tried_again(server, connect):
    server.failures = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")]
    with connect(server.address, retry=RETRY) as client, pytest.raises(Overloaded):
        client.predict(DENSE, SPARSE)
    assert len(server.requests) == 1


def test_threads_share_one_client(server):
    drawer = RequestDrawer(schema(), Draw(missing_dense=0), seed=1)
    requests = [drawer.samples(1 + i % 5) for i in range(200)]
    with (
        PredictorClient(server.address, timeout_s=60) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(client.predict_arrays, requests))
    for arrays, answer in zip(requests, answers, strict=True):
        request = pb.PredictionRequest.FromString(encode_request(arrays))
        expected = np.array(reference_scores(request), dtype=np.float32)
        assert np.array_equal(answer.outputs["default"], expected)


def test_cancelling_a_task_cancels_the_request(server):
    server.hold = True

    async def cancel_one():
        async with AsyncPredictorClient(server.address, timeout_s=60) as client:
            task = asyncio.create_task(client.predict(DENSE, SPARSE))
            assert await asyncio.to_thread(server.arrived.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel_one())
    assert server.done.wait(20)
    assert server.saw_cancel


def test_closing_twice_is_fine(server):
    client = PredictorClient(server.address)
    client.close()
    client.close()


@pytest.mark.parametrize(
    "address", ["localhost:1", "127.0.0.1:65535", "[::1]:50051", "unix:/run/s", "dns:///h:1"]
)
def test_usable_addresses(address):
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    ["", "localhost", "localhost:", "host:0", "host:65536", ":50051", "http://h:1", "a b:1", None],
)
def test_unusable_addresses(address, connect):
    with pytest.raises(UserError, match="is not HOST:PORT"):
        connect(address)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "5"])
def test_unusable_timeouts(server, timeout_s):
    with pytest.raises(UserError, match="timeout_s"):
        PredictorClient(server.address, timeout_s=timeout_s)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"first_backoff_s": 0},
        {"first_backoff_s": 2, "max_backoff_s": 1},
    ],
)
def test_unusable_retries(wrong):
    with pytest.raises(UserError, match="retry"):
        Retry(**wrong)


def test_waits_grow_to_the_limit():
    retry = Retry(attempts=6, first_backoff_s=1, max_backoff_s=5)
    waits = list(retry.waits_s(random.Random(1)))
    ceilings = [1, 2, 4, 5, 5]
    assert len(waits) == len(ceilings)
    for wait, ceiling in zip(waits, ceilings, strict=True):
        assert ceiling / 2 <= wait <= ceiling


def test_the_client_needs_no_torch():
    probe = "import sys, tessera.serving.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
