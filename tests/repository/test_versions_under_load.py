"""Versions that come, go, break and vanish while clients ask: no call fails, and each answer is its version's."""

import os
import signal

import numpy as np
import pytest

from tessera.training.models.config import TableConfig
from tests.package_factory import FEATURES, make_package
from tests.packaging.test_operators import with_statement
from tests.repository.server_repository import (
    Answers,
    Load,
    put,
    rows_of,
    serving,
    wait_until,
)
from tests.server.server_harness import value

NOT_WANTED = ("UNAVAILABLE", "it is not wanted")
READY = ("READY", "")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    return {
        version: make_package(folder, version=str(version), seed=version)[0]
        for version in (1, 2, 3)
    }


@pytest.fixture(scope="module")
def answers(packages):
    return Answers(packages)


def test_polled_versions_change_without_any_client_noticing(tmp_path, packages):
    answers = Answers({1: packages[1], 2: packages[2], 4: packages[1], 5: packages[3]})
    model = tmp_path / "ranker"
    put(packages[1], model, 1)
    flags = ["--model-control", "poll", "--poll-s", "0.1"]
    with serving(tmp_path, *flags) as repository, Load(repository, answers) as load:
        put(packages[2], model, 2)
        repository.wait(lambda index: index == {"1": NOT_WANTED, "2": READY})
        # Half of a file, then one of other bytes: what answered stays.
        content = packages[3].read_bytes()
        (model / "3").mkdir()
        (model / "3" / "model.pt").write_bytes(content[: len(content) // 2])
        index = repository.wait(lambda index: "damaged" in index.get("3", READY)[1])
        assert index["2"] == READY
        (model / "3" / "model.pt").write_bytes(b"not a package")
        (model / "1" / "model.pt").unlink()
        (model / "2" / "model.pt").unlink()
        repository.wait(lambda index: set(index) == {"2", "3"} and index["2"] == READY)
        (model / "3" / "model.pt").unlink()
        put(packages[1], model, 4)
        # A file that is replaced is loaded again, under the same version.
        put(packages[3], model, 5)
        (model / "serving.yaml").write_text("versions: [5]\nlabels: {stable: 5}\n")
        repository.wait(lambda index: index.get("5") == READY and "2" not in index)
        metrics = repository.metrics()
        assert value(metrics, "tessera_model_loads_total", model="ranker", result="ok") >= 3
        assert value(metrics, "tessera_model_loads_total", model="ranker", result="failed") >= 2
        state = {"model": "ranker", "version": "5", "state": "READY"}
        assert value(metrics, "tessera_model_state", **state) == 1
        assert not [name for name, labels in metrics if ("version", "2") in labels], (
            "series of a version end with it"
        )
        # An error in serving.yaml changes nothing but what is told.
        (model / "serving.yaml").write_text("versions: [5]\nlabel: {stable: 4}\n")
        repository.wait(lambda index: "did you mean labels?" in index["5"][1])
        assert "did you mean labels?" in repository.page("/")
        assert load.failures == []
        assert load.count > 0
        assert load.versions >= {"2"}


def test_versions_of_answers_are_those_of_their_package(tmp_path, packages):
    answers = Answers({4: packages[1], 5: packages[3]})
    model = tmp_path / "ranker"
    put(packages[1], model, 4)
    put(packages[3], model, 5)
    (model / "serving.yaml").write_text(
        "{versions: all, labels: {stable: 4, canary: 5}, traffic: {stable: 50, canary: 50}}"
    )
    with serving(tmp_path) as repository:

        def version(number=0, metadata=(), **fields):
            response = repository.predict(answers.request(number, **fields), metadata=metadata)
            return answers.check(number, response)

        assert version(model_version="4") == version(model_version="stable") == "4"
        assert version(model_version="5") == version(model_version="canary") == "5"
        by_key = {key: version(traffic_key=key) for key in map(str, range(16))}
        assert set(by_key.values()) == {"4", "5"}
        # The same key gives the same version, from wherever it comes.
        for key, expected in by_key.items():
            assert version(1, [("x-request-id", key)]) == expected
        assert {version(2) for _ in range(4)} == {version(2)}
        code, text = repository.refused(answers.request(0, model_version="6"))
        assert code == "NOT_FOUND"
        assert text.endswith("there is version '4', '5' and label 'canary', 'stable'")
        code, text = repository.refused(answers.request(0, traffic_key="x" * 1025))
        assert (code, text) == ("INVALID_ARGUMENT", "traffic_key has 1025 bytes, the limit is 1024")
        assert repository.call("load", "ranker") == (
            "FAILED_PRECONDITION",
            "--model-control is none; calls may load and unload with --model-control explicit",
        )


def test_calls_change_what_is_served_and_outlive_kill_9(tmp_path, packages, answers):
    model = tmp_path / "ranker"
    for version, package in packages.items():
        put(package, model, version)
    flags = ["--model-control", "explicit"]
    with serving(tmp_path, *flags) as repository, Load(repository, answers) as load:
        assert repository.index() == {"1": NOT_WANTED, "2": NOT_WANTED, "3": READY}
        assert repository.call("load", "ranker", version=2, label="stable") is None
        assert repository.call("unload", "ranker", version=2) == (
            "FAILED_PRECONDITION",
            "version '2' of model 'ranker' cannot be unloaded: the label 'stable' names it; move that first",
        )
        assert repository.call("load", "ranker", version=9)[0] == "NOT_FOUND"
        assert repository.call("load", "nobody")[0] == "NOT_FOUND"
        assert repository.call("load", "ranker", version="02")[0] == "INVALID_ARGUMENT"
        assert repository.call("load", "ranker", rollback="previous") is None
        assert repository.index() == {"1": READY, "2": NOT_WANTED, "3": READY}
        # A version that cannot be loaded changes nothing.
        (model / "2" / "model.pt").write_bytes(b"damaged")
        code, text = repository.call("load", "ranker", version=2, label="stable")
        assert code == "FAILED_PRECONDITION"
        assert "damaged" in text
        path = "/v2/repository/models/ranker"
        assert repository.post(f"{path}/unload", b'{"parameters": {"version": "3"}}') == (200, "")
        assert repository.post(f"{path}/load", b"{}", Origin="http://page")[0] == 403
        assert repository.post(f"{path}/load", b" " * 65_537)[0] == 413
        assert repository.post(f"{path}/load", b"[]")[0] == 400
        assert repository.post("/v2/repository/models/nobody/load")[0] == 404
        expected = {"1": READY, "2": NOT_WANTED, "3": NOT_WANTED}
        status, text = repository.post("/v2/repository/index")
        assert (status, rows_of(text)) == (200, expected)
        assert load.failures == []
        assert load.versions == {"1", "2", "3"}
    with serving(tmp_path, *flags) as repository:
        assert repository.index() == expected
        os.kill(repository.server.process.pid, signal.SIGKILL)
        repository.server.process.wait()
    with serving(tmp_path, *flags) as repository:
        assert repository.index() == expected
        assert repository.call("unload", "ranker") is None
        assert repository.refused(answers.request(0))[0] == "UNAVAILABLE"
        assert {state for state, _ in repository.index().values()} == {"UNAVAILABLE"}
        assert repository.call("load", "ranker") is None
        assert answers.check(0, repository.predict(answers.request(0))) == "1"


def test_a_package_that_is_too_large_or_never_ends_leaves_the_others(tmp_path, packages, answers):
    model = tmp_path / "ranker"
    put(packages[1], model, 1)
    (model / "2").mkdir()
    loop = "i = 0\nwhile True:\n  i = torch.add(i, 1)"
    with_statement(packages[2], model / "2" / "model.pt", loop)
    (model / "serving.yaml").write_text("versions: all")
    size = packages[1].stat().st_size
    flags = ["--load-timeout-s", "15", "--model-control", "explicit"]
    with serving(tmp_path, *flags, "--max-model-bytes", str(3 * size)) as repository:
        index = repository.index()
        assert index["1"] == READY
        assert "ran longer than --load-timeout-s 15" in index["2"][1]
        assert answers.check(1, repository.predict(answers.request(1))) == "1"
        put(packages[3], model, 3)
        assert repository.call("load", "ranker", version=3) is None
        assert answers.check(1, repository.predict(answers.request(1))) == "3"
        (model / "4").mkdir()
        (model / "4" / "model.pt").write_bytes(bytes(2 * size))
        code, text = repository.call("load", "ranker", version=4)
        assert code == "FAILED_PRECONDITION"
        assert f"has {2 * size} bytes" in text
        assert f"more than --max-model-bytes {3 * size}" in text


def test_each_request_is_checked_against_the_version_that_it_goes_to(tmp_path, packages):
    folder = tmp_path / "repository"
    fewer = {name: FEATURES[name] for name in ("user", "item")} | {"new": TableConfig(rows=9)}
    changed, _ = make_package(tmp_path, version="2", features=fewer)
    put(packages[1], folder / "ranker", 1)
    put(changed, folder / "ranker", 2)
    (folder / "ranker" / "serving.yaml").write_text(
        "{versions: all, batching: {max_batch_samples: 7}}"
    )
    old, new = Answers({1: packages[1]}), Answers({2: changed})
    with serving(folder) as repository:
        for number in range(3):
            assert (
                old.check(number, repository.predict(old.request(number, model_version="1"))) == "1"
            )
            assert new.check(number, repository.predict(new.request(number))) == "2"
        code, text = repository.refused(old.request(0))
        assert code == "INVALID_ARGUMENT"
        assert "num_features is 7, expected 3" in text
        # 20 samples in batches of 7.
        assert (
            value(repository.metrics(), "tessera_batch_samples_bucket", version="2", le="8.0") == 5
        )


def test_a_shadow_computes_a_share_of_the_calls_and_answers_none(tmp_path, packages, answers):
    for version in (1, 3):
        put(packages[version], tmp_path / "ranker", version)
    (tmp_path / "ranker" / "serving.yaml").write_text("shadow: {version: 3, share: 100}")
    with serving(tmp_path) as repository:
        assert answers.check(2, repository.predict(answers.request(2))) == "1"

        def results():
            metrics = repository.metrics()
            return {
                dict(labels)["result"]: count
                for (name, labels), count in metrics.items()
                if name == "tessera_shadow_calls_total"
            }

        wait_until(lambda: results() == {"compared": 1, "dropped": 0, "failed": 0})
        metrics = repository.metrics()
        place = {"model": "ranker", "version": "1", "shadow_version": "3"}
        first, third = (np.frombuffer(answers.expected[one][2], np.float32) for one in "13")
        differences = np.abs(first.astype(np.float64) - third)
        name = "tessera_shadow_score_difference"
        assert value(metrics, f"{name}_count", **place) == 20
        assert value(metrics, f"{name}_sum", **place) == pytest.approx(differences.sum())
        below = value(metrics, f"{name}_bucket", **place, le="0.1")
        assert below == (differences <= 0.1).sum()
        # The calls of clients are those that they have made; the shadow's are not among them.
        assert value(metrics, "tessera_requests_total", model="ranker") == 1
        assert answers.check(0, repository.predict(answers.request(0, model_version="3"))) == "3"
