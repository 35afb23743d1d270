"""A thousand malformed requests and more: a proper status each, and a server that goes on.

Three sources: valid messages with one field damaged so that it cannot be valid, messages with
random fields, and random bytes.  After every one of them a good request is answered correctly.
"""

import gc

import grpc
import hypothesis.strategies as st
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.config import ModelLimits
from tests.patience import PATIENCE_S
from tests.server.server_harness import config, f32, i32, i64, request, scores_of, serving, value

GOOD = request(3, bag=2)
GOOD_SCORES = scores_of(GOOD)
EXAMPLES = 400  # of each of the three sources

ALLOWED = {"INVALID_ARGUMENT", "NOT_FOUND"}


@pytest.fixture(scope="module")
def server():
    limits = ModelLimits(workers=1, max_request_samples=1000, max_request_ids=100_000)
    with serving(config(limits=limits)) as running:
        yield running


def outcome(server, content):
    try:
        server.raw(content, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return error.code().name if error.details() else "no message"
    return "OK"


def still_good(server):
    scores = np.array(server.predict(GOOD).predictions["default"].data, "<f4")
    np.testing.assert_array_equal(scores, GOOD_SCORES)


sparse = st.sampled_from(["id_list_features", "id_score_list_features"])
junk = st.binary(max_size=200)


@st.composite
def damaged(draw):
    """A message that was valid but for one field, which can no longer be."""
    B = draw(st.integers(1, 5))
    message = request(B, bag=draw(st.integers(1, 3)))
    group = getattr(message, draw(sparse))
    features = group.num_features
    kind = draw(st.integers(0, 9))
    if kind == 0:
        message.batch_size = draw(st.integers(-(2**31), 2**31 - 1).filter(lambda n: n != B))
    elif kind == 1:
        wrong = st.integers(-(2**31), 2**31 - 1)
        message.float_features.num_features = draw(wrong.filter(lambda n: n != 2))
    elif kind == 2:
        group.num_features = draw(st.integers(-(2**31), 2**31 - 1).filter(lambda n: n != features))
    elif kind == 3:
        message.float_features.values = draw(junk.filter(lambda b: len(b) != 8 * B))
    elif kind == 4:
        group.lengths = draw(junk.filter(lambda b: len(b) != len(group.lengths)))
    elif kind == 5:
        group.values = draw(junk.filter(lambda b: len(b) != len(group.values)))
    elif kind == 6:
        lengths = np.frombuffer(group.lengths, "<i4").copy()
        lengths[draw(st.integers(0, lengths.size - 1))] += draw(
            st.integers(-(2**31), 2**31 - 4).filter(bool)
        )
        group.lengths = i32(lengths)
    elif kind == 7:
        bad = draw(st.sampled_from([np.inf, -np.inf, np.nan]))
        message.id_score_list_features.weights = f32(
            np.full(len(message.id_score_list_features.weights) // 4, bad)
        )
    elif kind == 8:
        ids = np.frombuffer(message.id_score_list_features.values, "<i4").astype("<i8")
        outside = st.one_of(st.integers(-(2**63), -1), st.integers(50, 2**63 - 1))
        ids[draw(st.integers(0, ids.size - 1))] = draw(outside)
        message.id_score_list_features.ClearField("values")
        message.id_score_list_features.values_int64 = i64(ids)
    else:
        message.model_name = draw(st.text(min_size=1).filter(lambda name: name != "m"))
    return message.SerializeToString()


sparse_messages = st.builds(
    pb.SparseFeatures,
    num_features=st.integers(-1, 4),
    lengths=st.one_of(junk, st.lists(st.integers(-2, 5), max_size=8).map(i32)),
    values=junk,
    weights=junk,
    values_int64=st.one_of(st.just(b""), junk),
)
random_messages = st.builds(
    pb.PredictionRequest,
    batch_size=st.one_of(st.integers(-1, 5), st.integers(-(2**31), 2**31 - 1)),
    float_features=st.builds(pb.FloatFeatures, num_features=st.integers(-1, 3), values=junk),
    id_list_features=sparse_messages,
    id_score_list_features=sparse_messages,
    model_name=st.one_of(st.just(""), st.text(max_size=5)),
    priority=st.integers(-(2**31), 2**31 - 1),
    shared_features=st.one_of(
        st.none(),
        st.builds(
            pb.SharedFeatures,
            names=st.lists(st.sampled_from(["a", "b", "c", "w", "zzz"]), max_size=3),
            num_rows=st.integers(-1, 3),
            features=sparse_messages,
            row_index=junk,
        ),
    ),
).map(lambda message: message.SerializeToString())

fuzzed = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@fuzzed
@given(content=damaged())
def test_damaged_messages_are_refused(server, content):
    assert outcome(server, content) in ALLOWED
    still_good(server)


@fuzzed
@given(content=random_messages)
def test_random_messages_are_refused_or_valid(server, content):
    assert outcome(server, content) in ALLOWED | {"OK"}
    still_good(server)


@fuzzed
@given(content=st.binary(max_size=300))
def test_random_bytes_are_refused(server, content):
    assert outcome(server, content) in ALLOWED
    still_good(server)


def test_memory_does_not_grow(server):
    """The same thousand bad requests again and again: what they need is given back."""
    rng = np.random.default_rng(0)
    contents = [rng.bytes(int(rng.integers(0, 400))) for _ in range(100)]
    for seed in range(100):
        message = request(1 + seed % 5)
        message.id_list_features.values = rng.bytes(100_000)
        contents.append(message.SerializeToString())
    process = psutil.Process()

    def thousand():
        for _ in range(5):
            for content in contents:
                outcome(server, content)
        gc.collect()
        return process.memory_info().rss

    thousand()  # allocators take their first pages
    before, grown = thousand(), []
    for _ in range(6):
        after = thousand()
        grown.append(after - before)
        if grown[-1] < 4 << 20:
            break
        before = after
    # A leak of one message in ten would be 5 MB in every thousand; what a thread's allocator or another test's
    # thread takes once is in one of them.
    assert grown[-1] < 4 << 20, grown


def test_nothing_of_it_was_a_bug(server):
    metrics = server.metrics()
    assert value(metrics, "tessera_requests_total", code="INTERNAL") == 0
    assert value(metrics, "tessera_queue_requests") == 0
    assert "internal_error" not in server.log.getvalue()
    refused = value(metrics, "tessera_rejected_total", reason="invalid")
    assert refused > 1000
