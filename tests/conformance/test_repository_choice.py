"""Which version answers: numbers, labels, shares of the traffic, and what answers without any of them."""

import math
from collections import Counter

import grpc
import pytest
import xxhash

from tessera.serving.protocol import inference_pb2 as ipb
from tests.conformance.conformance_harness import TIMEOUT_S
from tests.conformance.live_models import (
    Models,
    asking,
    bits,
    index,
    predict_all,
    serve,
)
from tests.kserve_messages import infer, infer_request, stub_of

VERSIONS = {"1": "a", "2": "b", "3": "c"}
LABELS = {"stable": "2", "canary": "3"}
CANARY_PERCENT = 25


@pytest.fixture(scope="module")
def server(kind, variants, tmp_path_factory):
    """Models with shares, with a label alone, and without settings but all of its versions."""
    models = Models(tmp_path_factory.mktemp("repository"), variants)
    for model in ("shared", "stable", "plain"):
        for version, name in VERSIONS.items():
            models.put(model, version, name)
    labels = {label: int(version) for label, version in LABELS.items()}
    shares = {"canary": CANARY_PERCENT, "stable": 100 - CANARY_PERCENT}
    models.settings("shared", versions="all", labels=labels, traffic=shares)
    models.settings("stable", versions={"latest": 3}, labels={"stable": 1})
    models.settings("plain", versions=[1, 3], batching={"max_batch_samples": 2})
    with serve(kind, models, "none") as running:
        yield running


def drawn_version(key, model="shared"):
    """The version of a key, as docs/repository.md defines the draw."""
    point = xxhash.xxh64(f"{model}\0{key}".encode(), seed=0).intdigest() / 2**64
    return LABELS["canary"] if point < CANARY_PERCENT / 100 else LABELS["stable"]


@pytest.mark.parametrize("asked", [*VERSIONS, *LABELS])
def test_a_number_or_a_label_answers_and_the_answer_names_the_number(
    server, answers, message, asked
):
    response = server.predict(asking(message, "shared", asked))
    version = LABELS.get(asked, asked)
    assert (response.model_name, response.model_version) == ("shared", version)
    assert bits(response) == answers(VERSIONS[version], message).tobytes()
    request = infer_request(asking(message, "shared", asked))
    assert infer(server, request).model_version == version


@pytest.mark.parametrize(("model", "version"), [("stable", "1"), ("plain", "3")])
def test_nothing_is_answered_by_stable_or_else_by_the_highest(server, message, model, version):
    assert server.predict(asking(message, model)).model_version == version
    assert infer(server, infer_request(asking(message, model))).model_version == version


def within_a_binomial_bound(hits, count):
    share = CANARY_PERCENT / 100
    return abs(hits - count * share) < 5 * math.sqrt(count * share * (1 - share))


def test_the_draw_itself_shares_as_asked():
    found = Counter(drawn_version(f"user {number}") for number in range(10_000))
    assert within_a_binomial_bound(found[LABELS["canary"]], 10_000)


def test_keys_are_shared_as_the_page_says_and_keep_their_version(server, message):
    keys = [f"user {number}" for number in range(1_000)] + ["", "\u00fc", "x" * 1_024] * 2
    messages = [asking(message, "shared", key=key) for key in keys if key]
    found = [response.model_version for response in predict_all(server, messages)]
    assert found == [drawn_version(request.traffic_key) for request in messages]
    assert within_a_binomial_bound(found.count(LABELS["canary"]), len(found))


def test_the_traffic_key_comes_before_the_request_id_and_that_before_the_peer(server, message):
    by_version = {drawn_version(f"user {n}"): f"user {n}" for n in range(40)}
    assert set(by_version) == set(LABELS.values())
    plain = asking(message, "shared")
    for version, key in by_version.items():
        metadata = [("x-request-id", key)]
        assert server.predict(plain, metadata=metadata).model_version == version
        request = infer_request(plain)
        assert infer(server, request, metadata=metadata).model_version == version
        request.id = key
        for other in by_version.values():  # beside another key that does not count
            ids = [("x-request-id", other)]
            keyed = asking(message, "shared", key=key)
            assert server.predict(keyed, metadata=ids).model_version == version
            assert infer(server, request, metadata=ids).model_version == version
            request.parameters["traffic_key"].string_param = key
            request.id = other
            assert infer(server, request).model_version == version
            request.parameters.clear()
            request.id = key
    assert server.predict(plain).model_version == drawn_version("127.0.0.1")
    assert infer(server, infer_request(plain)).model_version == drawn_version("127.0.0.1")


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


@pytest.mark.parametrize("asked", ["9", "nosuch", "01", "-1", "2 ", "18446744073709551617"])
def test_an_unknown_version_or_label_is_told_what_there_is(server, message, asked):
    ways = (
        lambda: server.predict(asking(message, "shared", asked)),
        lambda: infer(server, infer_request(asking(message, "shared", asked))),
    )
    there = "there is version '1', '2', '3' and label 'canary', 'stable'"
    for way in ways:
        code, text = refusal(way)
        assert code == "NOT_FOUND"
        assert text == f"model_version '{asked}' of model 'shared' is unknown; {there}"


def test_an_unknown_model_is_told_which_there_are(server, message):
    code, text = refusal(lambda: server.predict(asking(message, "nobody")))
    assert code == "NOT_FOUND"
    assert text == "model_name 'nobody' is unknown; this server has 'plain', 'shared', 'stable'"


def test_a_version_that_was_not_chosen_is_unknown(server, message):
    code, text = refusal(lambda: server.predict(asking(message, "plain", "2")))
    assert code == "NOT_FOUND"
    assert text.endswith("there is version '1', '3'")


def test_a_key_beyond_the_limit_is_refused_with_both_numbers(server, message):
    code, text = refusal(lambda: server.predict(asking(message, "shared", key="x" * 1_025)))
    assert code == "INVALID_ARGUMENT"
    assert "traffic_key" in text
    assert "1025" in text.replace(",", "")
    assert "1024" in text.replace(",", "")


def test_the_index_has_every_version(server):
    found = index(server)
    states = {place: state for place, (state, _) in found.items()}
    asked = {(model, v): "READY" for model in ("shared", "stable") for v in VERSIONS}
    asked |= {("plain", "1"): "READY", ("plain", "2"): "UNAVAILABLE", ("plain", "3"): "READY"}
    assert states == asked
    assert found["plain", "2"][1]
    request = ipb.RepositoryIndexRequest(ready=True)
    rows = stub_of(server).RepositoryIndex(request, timeout=TIMEOUT_S).models
    assert {(row.name, row.version) for row in rows} == set(asked) - {("plain", "2")}


def test_kserve_s_calls_take_numbers_and_labels(server):
    stub = stub_of(server)
    for asked in (*VERSIONS, *LABELS, ""):
        request = ipb.ModelReadyRequest(name="shared", version=asked)
        assert stub.ModelReady(request, timeout=TIMEOUT_S).ready
        metadata = stub.ModelMetadata(
            ipb.ModelMetadataRequest(name="shared", version=asked), timeout=TIMEOUT_S
        )
        number = LABELS.get(asked, asked)
        assert list(metadata.versions) == ([number] if number else sorted(VERSIONS))


def test_the_models_own_limits_cut_its_batches(server, message, drawn_live):
    eight = drawn_live.samples(8)
    assert server.predict(asking(eight, "stable")).timings.batch_samples == 8
    limited = server.predict(asking(eight, "plain", "3"))
    assert limited.timings.batch_samples <= 2
    assert len(limited.predictions["default"].data) == 8


def test_every_metric_names_the_version(server, message):
    def requests(version):
        return server.value("tessera_requests_total", model="shared", version=version, code="OK")

    before = {version: requests(version) for version in VERSIONS}
    for asked, times in (("1", 2), ("stable", 3), ("canary", 1)):
        for _ in range(times):
            server.predict(asking(message, "shared", asked))
    grown = {"1": 2, "2": 3, "3": 1}
    server.wait_for(
        lambda: {version: requests(version) - before[version] for version in VERSIONS} == grown
    )
    for version in VERSIONS:
        labels = {"model": "shared", "version": version}
        assert server.value("tessera_model_ready", **labels) == 1
        assert server.value("tessera_model_state", **labels, state="READY") == 1
        assert server.value("tessera_model_state", **labels) == 1
    assert server.value("tessera_model_loads_total", model="shared", result="ok") == 3
    assert server.value("tessera_model_loads_total", model="shared", result="failed") == 0
