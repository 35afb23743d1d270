"""Folders that change beneath a server with --model-control poll: versions, labels, faults, limits."""

import signal

import grpc
import pytest

from tessera.cli import main
from tessera.serving.package.loading import load_package
from tests.conformance.conformance_harness import same_bits, scores_of
from tests.conformance.conftest import Drawn
from tests.conformance.live_models import Models, asking, bits, index, ready, serve

POLL = ("--poll-s", "0.1")


@pytest.fixture(scope="module")
def models(kind, tmp_path_factory, variants):
    """One repository for all tests; each test has a model of its own."""
    return Models(tmp_path_factory.mktemp("repository"), variants)


@pytest.fixture(scope="module")
def server(kind, models):
    models.put("first", 1, "a")
    with serve(kind, models, "poll", *POLL) as running:
        yield running


@pytest.fixture(scope="module")
def wide(variants):
    """A request for the package with other features."""
    return Drawn(load_package(variants["wide"]).manifest.schema).samples(3)


@pytest.fixture
def answer(server, message):
    """The version that answers a model's request, or the status where none does."""

    def ask(model, version=""):
        try:
            return server.predict(asking(message, model, version)).model_version
        except grpc.RpcError as error:
            return error.code().name

    return ask


@pytest.fixture
def becomes(server, answer):
    """Waits until a model's requests are answered by a version, or refused with a status."""

    def wait(model, version, asked=""):
        server.wait_for(lambda: answer(model, asked) == version)

    return wait


def test_new_models_and_versions_are_served_and_old_ones_go(server, models, becomes, answer):
    models.put("grows", 1, "a")
    becomes("grows", "1")
    models.put("grows", 2, "b")
    becomes("grows", "2")
    becomes("grows", "NOT_FOUND", asked="1")
    models.put("grows", 10, "c")
    becomes("grows", "10")
    server.wait_for(lambda: ready(server, "grows") == {10})


def test_a_removed_version_makes_room_for_the_one_before(server, models, becomes):
    models.put("shrinks", 1, "a")
    models.put("shrinks", 2, "b")
    becomes("shrinks", "2")
    models.remove("shrinks", 2)
    becomes("shrinks", "1")
    server.wait_for(lambda: ("shrinks", "2") not in index(server))
    models.remove("shrinks")
    server.wait_for(lambda: not any(model == "shrinks" for model, _ in index(server)))
    becomes("shrinks", "NOT_FOUND")
    families = server.families()
    assert not [
        sample
        for family in families.values()
        for sample in family.samples
        if family.name in {"tessera_model_state", "tessera_model_ready"}
        and sample.labels["model"] == "shrinks"
    ]


def test_labels_and_shares_follow_serving_yaml(server, models, becomes):
    models.put("labels", 1, "a")
    models.put("labels", 2, "b")
    models.settings("labels", labels={"stable": 1})
    becomes("labels", "1")
    becomes("labels", "2", asked="2")
    models.settings("labels", labels={"stable": 2, "old": 1})
    becomes("labels", "2")
    becomes("labels", "1", asked="old")
    models.settings("labels", labels={"stable": 2, "old": 1}, traffic={"stable": 0, "old": 100})
    becomes("labels", "1")
    models.settings("labels", text="versions: all\n")
    becomes("labels", "2")
    becomes("labels", "NOT_FOUND", asked="old")


@pytest.mark.parametrize(
    "text",
    [
        "versions: {latest: 0}\n",
        "labels: {stable: 1, 7: 1}\n",
        "traffic: {stable: 90}\nlabels: {stable: 1}\n",
        "versions: [1\n",
        "verions: all\n",
        "a: &a [1]\nb: *a\n",
        "#" * 70_000,
    ],
)
def test_an_error_in_serving_yaml_leaves_the_settings_before_it(
    server, models, becomes, answer, text
):
    if ("settings", "1") not in index(server):
        models.put("settings", 1, "a")
        models.put("settings", 2, "b")
    models.settings("settings", versions="all", labels={"stable": 1})
    becomes("settings", "1")
    becomes("settings", "2", asked="2")
    before = len(server.log)
    models.settings("settings", text=text)
    server.wait_for(lambda: any("serving.yaml" in str(line) for line in server.log[before:]))
    (line, *_) = [line for line in server.log[before:] if "serving.yaml" in str(line)]
    assert (line["event"], line["level"]) == ("repository", "warning")
    assert "serving.yaml" in line["remark"]
    assert "\n" not in line["remark"]
    assert (answer("settings"), answer("settings", "2")) == ("1", "2")


def damaged(content):
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("half", lambda content: content[: len(content) // 2]),
        ("damaged", damaged),
        ("empty", lambda content: b""),
        ("other", lambda content: b"something else altogether" * 100),
    ],
)
def test_a_version_that_cannot_be_loaded_changes_nothing_until_it_can(
    server, models, becomes, name, spoil
):
    content = models.content("b")
    models.put(name, 1, "a")
    becomes(name, "1")
    models.put(name, 2, "b", spoil=spoil)
    rows = []

    def failed():  # it is tried again now and then, and is LOADING meanwhile
        rows.append(index(server).get((name, "2"), ("", "")))
        return rows[-1][0] == "UNAVAILABLE" and rows[-1][1] != ""

    server.wait_for(failed)
    server.wait_for(
        lambda: server.value("tessera_model_loads_total", model=name, result="failed") > 0
    )
    _, reason = rows[-1]
    assert str(models.path(name, 2)) in reason
    assert "\n" not in reason
    lines = [line for line in server.log if line["event"] == "load_failed"]
    line = next(line for line in lines if line["model"] == name)
    assert (line["level"], line["version"], line["failures"]) == ("error", "2", 1)
    assert str(models.path(name, 2)) in line["error"]
    assert ready(server, name) == {1}
    becomes(name, "1")
    becomes(name, "UNAVAILABLE", asked="2")
    models.replace(name, 2, content)
    becomes(name, "2")
    server.wait_for(lambda: ready(server, name) == {2})


def test_a_caller_is_not_told_which_files_of_the_host_are_damaged(server, models, message):
    models.put("told", 1, "a")
    models.put("told", 2, "b", spoil=damaged)

    def refusal():
        try:
            return server.predict(asking(message, "told", "2")) and None
        except grpc.RpcError as error:
            return error.details()

    why = "could not be loaded; the repository's index says why"
    server.wait_for(lambda: refusal() == f"version '2' of model 'told' {why}")


def test_a_version_that_vanishes_before_it_is_loaded_is_forgotten(server, models, becomes):
    models.put("vanishes", 1, "a")
    becomes("vanishes", "1")
    models.put("vanishes", 2, "b", spoil=damaged)
    server.wait_for(lambda: ("vanishes", "2") in index(server))
    models.remove("vanishes", 2)
    server.wait_for(lambda: ("vanishes", "2") not in index(server))
    becomes("vanishes", "1")
    models.path("vanishes", 1).unlink()  # the folder stays; what is loaded is all there is
    models.put("vanishes", 3, "c")
    becomes("vanishes", "3")


def test_a_replaced_file_is_loaded_again(server, models, answers, message, becomes):
    models.put("replaced", 1, "a")
    becomes("replaced", "1")
    request = asking(message, "replaced")
    assert bits(server.predict(request)) == answers("a", message).tobytes()
    models.replace("replaced", 1, models.content("b"))
    expected = answers("b", message).tobytes()
    server.wait_for(lambda: bits(server.predict(request)) == expected)


def test_each_request_is_checked_against_the_version_it_goes_to(
    server, models, answers, message, wide
):
    models.put("schema", 1, "a")
    models.put("schema", 2, "wide")
    models.settings("schema", versions="all")
    server.wait_for(lambda: ready(server, "schema") == {1, 2})
    for version, right, wrong, name in (("1", message, wide, "a"), ("2", wide, message, "wide")):
        response = server.predict(asking(right, "schema", version))
        assert same_bits(scores_of(response), answers(name, right))
        code, text = server.outcome(asking(wrong, "schema", version).SerializeToString())
        assert code == "INVALID_ARGUMENT"
        assert "features" in text


def test_what_is_too_big_or_unsigned_is_refused_before_it_is_served(
    kind, tmp_path, variants, message
):
    key = tmp_path / "key.pem"
    assert main(["keygen", "--out", str(key)]) == 0
    signed = {}
    for name in ("a", "b", "c"):
        signed[name] = tmp_path / f"{name}.pt"
        signed[name].write_bytes(variants[name].read_bytes())
        assert main(["sign", str(signed[name]), "--key", str(key)]) == 0
    models = Models(tmp_path / "models", {**signed, "unsigned": variants["b"]})
    models.put("signed", 1, "a")
    models.put("bounded", 1, "b")
    size = signed["a"].stat().st_size
    flags = ["--require-signature", "--public-key", tmp_path / "key.pub.pem"]
    limit = 5 * size // 2
    with serve(kind, models, "poll", *POLL, *flags, "--max-model-bytes", limit) as running:

        def reason_of(model, version):
            running.wait_for(lambda: index(running).get((model, version), ("", ""))[1] != "")
            state, reason = index(running)[model, version]
            assert state == "UNAVAILABLE"
            return reason

        assert (ready(running, "signed"), ready(running, "bounded")) == ({1}, {1})
        models.put("bounded", 2, "c")
        reason = reason_of("bounded", "2").replace(",", "")
        assert "--max-model-bytes" in reason
        assert str(limit) in reason
        models.remove("bounded")
        running.wait_for(lambda: not any(model == "bounded" for model, _ in index(running)))
        models.put("signed", 2, "unsigned")
        assert "sign" in reason_of("signed", "2")
        assert running.predict(asking(message, "signed")).model_version == "1"
        models.replace("signed", 2, models.content("b"))
        running.wait_for(lambda: running.predict(asking(message, "signed")).model_version == "2")


def test_sighup_reads_the_folders_without_polling(kind, tmp_path, variants, message):
    models = Models(tmp_path / "models", variants)
    models.put("grows", 1, "a")
    with serve(kind, models, "none") as running:
        models.put("grows", 2, "b")
        models.put("comes", 1, "a")
        assert running.predict(asking(message, "grows")).model_version == "1"
        running.signal(signal.SIGHUP)
        running.wait_for(lambda: running.predict(asking(message, "grows")).model_version == "2")
        running.wait_for(lambda: ready(running, "comes") == {1})
        assert "nothing_to_reload" not in [entry["event"] for entry in running.log]
