"""Packages of users' own modules: several outputs, ids with weights, and a model with a bug."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tessera.serving.package.loading import load_package
from tests.conformance.conformance_harness import RunningServer, f32, same_bits
from tests.conformance.tasks_module import KNOWN, POISON, draw, expected, package_tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.pt"
    package_tasks(path)
    return path


@pytest.fixture(scope="module")
def loaded(tasks):
    return load_package(tasks)


@pytest.fixture(scope="module")
def tasks_server(kind, tasks):
    # A worker that waits a moment finds other requests.
    flags = ["--model", tasks, "--workers", 1, "--max-delay-us", 3000]
    with RunningServer(kind, *flags, "--drain-propagation-ms", 0) as running:
        yield running


def hold(answer, message, loaded):
    wanted = expected(loaded, message)
    assert answer.predictions.keys() == wanted.keys()
    for name, scores in wanted.items():
        assert same_bits(np.array(answer.predictions[name].data), scores.ravel()), name


def test_several_outputs_and_weighted_ids(tasks_server, loaded):
    for size in (1, 2, 7, 100):
        message = draw(loaded, size, seed=size)
        hold(tasks_server.predict(message), message, loaded)


def with_items(message, items):
    """The message with these items, one for each that it has."""
    lengths = np.frombuffer(message.id_list_features.lengths, "<i4").reshape(2, -1)
    values = np.frombuffer(message.id_list_features.values_int64, "<i8").copy()
    users = int(lengths[0].sum())
    values[users:] = np.resize(items, len(values) - users)
    message.id_list_features.values_int64 = values.tobytes()
    return message


def test_mapped_ids_have_rows_of_their_own_and_all_others_one(tasks_server, loaded):
    (item,) = (feature for feature in loaded.manifest.schema.features if feature.name == "item")
    assert item.hashing == "vocabulary"
    drawn = [draw(loaded, 40, seed=3) for _ in range(4)]
    known = with_items(drawn[0], KNOWN)
    unknown = [with_items(drawn[1], [31, -8]), with_items(drawn[2], [2**63 - 1, -(2**63)])]
    for message in (known, *unknown):
        hold(tasks_server.predict(message), message, loaded)
    scores = [expected(loaded, message)["score"] for message in (known, *unknown)]
    assert same_bits(scores[1], scores[2])
    assert not same_bits(scores[0], scores[1])


def poisoned(loaded):
    message = draw(loaded, 2, seed=9)
    message.float_features.values = f32([0.5, 0.5, POISON, 0.5])
    return message


def test_a_bug_is_internal_with_an_id_that_is_in_the_log(tasks_server, loaded):
    code, text = tasks_server.outcome(poisoned(loaded).SerializeToString())
    assert code == "INTERNAL"
    words = text.split()
    assert words[:3] == ["internal", "error,", "id"]
    error_id = words[3]
    tasks_server.wait_for(
        lambda: any(entry.get("error_id") == error_id for entry in tasks_server.log)
    )
    assert tasks_server.value("tessera_requests_total", code="INTERNAL") >= 1
    message = draw(loaded, 3)
    hold(tasks_server.predict(message), message, loaded)  # it lives on


def test_a_bug_does_not_fail_its_neighbours(tasks_server, loaded):
    bad = poisoned(loaded).SerializeToString()
    good = [draw(loaded, 1 + seed % 3, seed=seed) for seed in range(60)]
    with ThreadPoolExecutor(16) as pool:
        failures = [pool.submit(tasks_server.outcome, bad) for _ in range(20)]
        answers = list(pool.map(tasks_server.predict, good))
    for message, answer in zip(good, answers, strict=True):
        hold(answer, message, loaded)
    assert {future.result()[0] for future in failures} == {"INTERNAL"}
    # Some shared a batch, which then was computed again request by request.
    events = [entry["event"] for entry in tasks_server.log]
    assert "batch_failed_retrying_each" in events
