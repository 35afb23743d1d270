"""The engine in this process: scores bit for bit those of the package and of tessera-server, and its bounds."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tessera.errors import UserError
from tessera.serving.client import (
    Draw,
    InvalidRequest,
    Overloaded,
    PredictorClient,
    RequestDrawer,
    Unavailable,
)
from tessera.serving.engine import (
    Engine,
    EngineHandle,
    EngineOptions,
    PreparedRequest,
    RequestSet,
    engine_library,
)
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.training.models.config import TableConfig
from tests.conformance.conformance_harness import RunningServer, same_bits
from tests.package_factory import FEATURES, make_package
from tests.patience import PATIENCE_S

try:
    engine_library()
except UserError as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    features = {**FEATURES, "liked": TableConfig(rows=90, weighted=True)}
    return make_package(tmp_path_factory.mktemp("engine"), name="ranker", features=features)[0]


@pytest.fixture(scope="module")
def loaded(package):
    return load_package(package)


@pytest.fixture
def drawer(loaded):
    draw = Draw(ids="uniform", bags="uniform", max_bag=5)
    return RequestDrawer(loaded.manifest.schema, draw)


@pytest.fixture(scope="module")
def engine(package):
    with Engine(package, EngineOptions(max_request_samples=1_000)) as opened:
        yield opened


def expected(loaded, arrays):
    """The package's own scores of a request."""
    plain, scored = arrays.id_list, arrays.id_score_list
    batch = HostBatch(
        float_features=torch.from_numpy(arrays.dense),
        id_list_features_lengths=torch.from_numpy(plain.lengths.ravel()),
        id_list_features_values=torch.from_numpy(plain.values),
        id_score_list_features_lengths=torch.from_numpy(scored.lengths.ravel()),
        id_score_list_features_values=torch.from_numpy(scored.values),
        id_score_list_features_weights=torch.from_numpy(scored.weights),
        batch_size=arrays.batch_size,
    )
    return loaded.runner.forward(batch)["default"].numpy()


def test_scores_are_those_of_the_package_and_of_the_server(engine, package, loaded, drawer):
    with RunningServer("cpp", "--model", package, "--drain-propagation-ms", 0) as server:
        client = PredictorClient(server.address)
        for size in (1, 2, 7, 64, 600):
            arrays = drawer.samples(size)
            scores = engine.predict(arrays)["default"]
            assert scores.shape == (size,)
            assert same_bits(scores, expected(loaded, arrays)), size
            answer = client.predict_arrays(arrays)
            assert same_bits(scores, answer.outputs["default"]), size
        client.close()


def test_many_threads_submit_at_once(package, loaded, drawer):
    sent = [drawer.samples(1 + index % 9) for index in range(300)]
    # A worker that waits a moment merges what comes at once.
    options = EngineOptions(workers=1, max_delay_us=3_000)
    with Engine(package, options) as engine, ThreadPoolExecutor(8) as pool:
        futures = list(pool.map(engine.submit, sent))
        for arrays, future in zip(sent, futures, strict=True):
            scores = future.result(PATIENCE_S)["default"]
            assert same_bits(scores, expected(loaded, arrays))


def test_ids_of_32_bits_and_arrays_that_change_later(engine, loaded, drawer):
    arrays = drawer.samples(3)
    arrays.id_list.values[:] = arrays.id_list.values % 10
    wanted = expected(loaded, arrays)
    narrow = type(arrays.id_list)(arrays.id_list.lengths, arrays.id_list.values.astype(np.int32))
    object.__setattr__(arrays, "id_list", narrow)
    future = engine.submit(arrays)
    arrays.dense[:] = 0  # the engine has a copy
    assert same_bits(future.result(PATIENCE_S)["default"], wanted)


def test_bad_requests_are_refused_with_the_server_s_words(engine, drawer):
    arrays = drawer.samples(2)
    arrays.id_list.lengths[0, 0] = -1
    with pytest.raises(InvalidRequest, match=r"id_list_features.lengths\[0\] is -1, expected >= 0"):
        engine.submit(arrays)
    with pytest.raises(InvalidRequest, match="batch_size is 1001, the limit is 1000 samples"):
        engine.submit(drawer.samples(1_001))
    arrays = drawer.samples(2)
    object.__setattr__(arrays, "dense", None)
    with pytest.raises(InvalidRequest, match=r"float_features.values has 0 bytes, expected 32"):
        engine.submit(arrays)
    with pytest.raises(UserError, match="shared features are not taken by the engine"):
        engine.submit(drawer.ranking(3))
    with pytest.raises(UserError, match="timeout_s is 0; give seconds above 0"):
        engine.submit(drawer.samples(1), timeout_s=0)


def test_close_answers_what_was_submitted(package, loaded, drawer):
    engine = Engine(package, EngineOptions(workers=1))
    sent = [drawer.samples(64) for _ in range(40)]
    futures = [engine.submit(arrays) for arrays in sent]
    engine.close()
    for arrays, future in zip(sent, futures, strict=True):
        assert future.done()
        assert same_bits(future.result()["default"], expected(loaded, arrays))
    with pytest.raises(Unavailable, match="the engine is closed"):
        engine.submit(sent[0])
    engine.close()


def test_an_engine_that_nobody_holds_ends(package, drawer):
    before = set(threading.enumerate())
    future = Engine(package).submit(drawer.samples(1))
    assert future.result(PATIENCE_S)["default"].shape == (1,)
    limit = time.monotonic() + PATIENCE_S
    while any(t.name == "tessera-engine" for t in set(threading.enumerate()) - before):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_handle_is_bounded_until_completions_are_taken(package, drawer):
    handle = EngineHandle(package, EngineOptions(max_inflight_bytes=40_000))
    assert handle.outputs == [("default", 1)]
    request = PreparedRequest(drawer.samples(1))
    scores = handle.scores(1)
    handle.submit(request, scores, 7)
    handle.submit(request, scores, 8)
    with pytest.raises(Overloaded, match="the engine is full: requests in it take"):
        handle.submit(request, scores, 9)
    taken = []
    while len(taken) < 2:
        ended = handle.wait(PATIENCE_S)
        assert not ended.codes.any()
        taken += ended.tags.tolist()
    assert sorted(taken) == [7, 8]
    assert handle.wait(0).tags.size == 0
    handle.submit(request, scores, 9)
    handle.close()
    assert handle.wait().tags.tolist() == [9]
    assert handle.wait() is None


def test_many_requests_go_in_one_call(package, loaded, drawer):
    drawn = [drawer.samples(1 + index % 7) for index in range(40)]
    bad = drawer.samples(2)
    bad.id_list.lengths[0, 0] = -1
    requests = RequestSet([PreparedRequest(arrays) for arrays in [*drawn, bad]])
    handle = EngineHandle(package)
    numbers = np.random.default_rng(0).integers(0, len(drawn), 150)
    scores = np.zeros((len(numbers), 7), np.float32)
    slots = np.random.default_rng(1).permutation(len(numbers))
    spoilt = numbers.copy()
    spoilt[100] = len(drawn)
    taken, refusal = handle.submit_many(requests, spoilt, scores, slots, slots)
    assert taken == 100
    assert isinstance(refusal, InvalidRequest)
    assert "id_list_features.lengths[0] is -1" in refusal.message
    rest = numbers[100:], scores, slots[100:], slots[100:]
    assert handle.submit_many(requests, *rest) == (50, None)
    with pytest.raises(UserError, match="scores has room for 1 numbers a row; give 7"):
        handle.submit_many(requests, np.array([6]), scores[:, :1].copy(), slots[:1], slots[:1])
    handle.close()
    ended = []
    while (completions := handle.wait()) is not None:
        assert not completions.codes.any()
        ended += completions.tags.tolist()
    assert sorted(ended) == list(range(len(numbers)))
    wanted = [expected(loaded, arrays) for arrays in drawn]
    for number, slot in zip(numbers, slots, strict=True):
        assert same_bits(scores[slot, : len(wanted[number])], wanted[number])


def test_what_cannot_be_opened_is_one_line(package, tmp_path):
    with pytest.raises(UserError, match=r"--workers is 0; give a whole number") as raised:
        Engine(package, EngineOptions(workers=0))
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=r"missing\.pt"):
        Engine(tmp_path / "missing.pt")
    damaged = tmp_path / "damaged.pt"
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged\.pt"):
        Engine(damaged)


def test_the_library_that_the_variable_names(monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_ENGINE", str(tmp_path / "none.so"))
    with pytest.raises(UserError, match=r"TESSERA_ENGINE=.*none\.so is not a file"):
        engine_library()
    (tmp_path / "none.so").write_text("text")
    with pytest.raises(UserError, match="cannot be loaded"):
        EngineHandle("m.pt")
