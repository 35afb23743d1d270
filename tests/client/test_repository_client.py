"""`RepositoryClient` and ``tessera repository`` against a servicer that writes down what it is asked."""

import json
from concurrent import futures

import grpc
import pytest

from tessera.cli import main
from tessera.errors import UserError
from tessera.serving.client import ModelVersion, RepositoryClient
from tessera.serving.client.errors import DeadlineExceeded, ModelNotFound, PredictError, Unavailable
from tessera.serving.protocol import inference_pb2 as pb
from tessera.serving.protocol import inference_pb2_grpc


def plain(parameters):
    return {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in parameters.items()}


class Servicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Two models; ``failure`` is a status and a text for loads and unloads, ``hang`` lets them wait."""

    def __init__(self):
        self.asked = []
        self.failure = None
        self.rows = [
            ("ranker", "4", "READY", "", ["stable", "old"], 95.0, True),
            ("ranker", "5", "UNAVAILABLE", "/models/ranker/5/model.pt: not a package"),
            ("tower", "1", "LOADING", "", [], 0.0, False, 0.5),
        ]

    def RepositoryIndex(self, request, context):  # noqa: N802 - gRPC's name
        names = ("name", "version", "state", "reason")
        names += ("labels", "traffic_percent", "shadow", "load_progress")
        rows = [dict(zip(names, row, strict=False)) for row in self.rows]
        rows = [row for row in rows if row["state"] == "READY" or not request.ready]
        return pb.RepositoryIndexResponse(
            models=[pb.RepositoryIndexResponse.ModelIndex(**row) for row in rows]
        )

    def RepositoryModelLoad(self, request, context):  # noqa: N802 - gRPC's name
        self._note("load", request, context)
        return pb.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request, context):  # noqa: N802 - gRPC's name
        self._note("unload", request, context)
        return pb.RepositoryModelUnloadResponse()

    def _note(self, what, request, context):
        self.asked.append((what, request.model_name, plain(request.parameters)))
        if self.failure is not None:
            context.abort(*self.failure)


@pytest.fixture
def servicer():
    servicer = Servicer()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(None).wait()


@pytest.fixture
def client(servicer):
    with RepositoryClient(servicer.address) as client:
        yield client


@pytest.fixture
def repository(servicer, capsys):
    """Runs the command; gives the status, what it printed and what it said on stderr."""

    def run(*words):
        status = main(["repository", *map(str, words), "--address", servicer.address])
        return status, *capsys.readouterr()

    return run


def test_the_index_has_a_row_for_each_version(client):
    rows = client.index()
    assert [(row.name, row.version, row.state) for row in rows] == [
        ("ranker", "4", "READY"),
        ("ranker", "5", "UNAVAILABLE"),
        ("tower", "1", "LOADING"),
    ]
    assert rows[1].reason == "/models/ranker/5/model.pt: not a package"
    ready = ModelVersion(
        name="ranker",
        version="4",
        state="READY",
        reason="",
        labels=("stable", "old"),
        traffic_percent=95.0,
        shadow=True,
    )
    assert client.index(ready=True) == [ready]


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (lambda c: c.load("m"), ("load", "m", {})),
        (lambda c: c.load("m", version=5), ("load", "m", {"version": 5})),
        (
            lambda c: c.load("m", version=5, label="canary"),
            ("load", "m", {"version": 5, "label": "canary"}),
        ),
        (lambda c: c.rollback("m"), ("load", "m", {"rollback": "previous"})),
        (lambda c: c.rollback("m", to=3), ("load", "m", {"rollback": 3})),
        (lambda c: c.unload("m"), ("unload", "m", {})),
        (lambda c: c.unload("m", version=2**62), ("unload", "m", {"version": 2**62})),
    ],
)
def test_calls_carry_what_they_ask_for(client, servicer, call, asked):
    call(client)
    assert servicer.asked == [asked]


def test_a_label_needs_a_version(client, servicer):
    with pytest.raises(UserError, match="label 'canary' needs the version that it is to name"):
        client.load("m", label="canary")
    assert servicer.asked == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, ModelNotFound),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.FAILED_PRECONDITION, PredictError),
    ],
)
def test_refusals_are_exceptions_with_the_servers_words(client, servicer, code, kind):
    servicer.failure = (code, "the server's words")
    for call in (client.load, client.unload, client.rollback):
        with pytest.raises(kind, match="the server's words") as caught:
            call("m")
        assert (type(caught.value), caught.value.code) == (kind, code)


def test_a_call_ends_with_its_time_limit(servicer):
    # Nothing accepts connections at this address, and gRPC is told to wait for somebody who does.
    with (
        RepositoryClient("127.0.0.1:1", timeout_s=0.2) as client,
        pytest.raises((DeadlineExceeded, Unavailable)),
    ):
        client.index()
    with pytest.raises(UserError, match="timeout_s is 0; it must be a positive number"):
        RepositoryClient(servicer.address, timeout_s=0)


def test_list_prints_a_table_for_people(repository):
    status, out, err = repository("list")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "  model   version        state  labels                    reason",
        "  ranker        4        READY  stable, old 95% (shadow)",
        "  ranker        5  UNAVAILABLE                            /models/ranker/5/model.pt: not a package",
        "  tower         1  LOADING 50%",
    ]
    shown = repository("list", "tower")[1].splitlines()[1:]
    assert [line.split() for line in shown] == [["tower", "1", "LOADING", "50%"]]


def test_a_server_without_models_says_so(repository, servicer):
    servicer.rows = []
    assert repository("list") == (0, "the server has no model\n", "")
    assert repository("list", "--json") == (0, "[]\n", "")


def test_json_is_for_programs(repository):
    status, out, _ = repository("list", "ranker", "--json")
    assert status == 0
    reason = "/models/ranker/5/model.pt: not a package"
    four, five = json.loads(out)
    assert (four["labels"], four["traffic_percent"], four["shadow"]) == (
        ["stable", "old"],
        95.0,
        True,
    )
    assert five == {
        "name": "ranker",
        "version": "5",
        "state": "UNAVAILABLE",
        "reason": reason,
        "labels": [],
        "traffic_percent": 0.0,
        "shadow": False,
        "load_progress": 0.0,
    }


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["load", "ranker"], ("load", {})),
        (["load", "ranker", "--version", "5"], ("load", {"version": 5})),
        (["unload", "ranker"], ("unload", {})),
        (["unload", "ranker", "--version", "5"], ("unload", {"version": 5})),
        (
            ["label", "ranker", "--label", "canary", "--version", "5"],
            ("load", {"version": 5, "label": "canary"}),
        ),
        (["rollback", "ranker"], ("load", {"rollback": "previous"})),
        (["rollback", "ranker", "--version", "4"], ("load", {"rollback": 4})),
    ],
)
def test_changes_are_asked_for_and_the_outcome_is_shown(repository, servicer, words, asked):
    status, out, err = repository(*words)
    assert (status, err) == (0, "")
    what, parameters = asked
    assert servicer.asked == [(what, "ranker", parameters)]
    assert [line.split()[0] for line in out.splitlines()] == ["model", "ranker", "ranker"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["load"], "load needs a MODEL; 'tessera repository list' shows which there are"),
        (["list", "--version", "3"], "list shows every version; leave --version out"),
        (["load", "ranker", "--label", "x"], "--label is for label; load does not take it"),
        (["label", "ranker", "--version", "3"], "label needs --label NAME and --version N"),
        (["label", "ranker", "--label", "x"], "label needs --label NAME and --version N"),
        (["list", "rankr"], "MODEL is 'rankr'; give one of ranker, tower; did you mean ranker?"),
    ],
)
def test_what_the_user_has_to_change_ends_with_2_and_one_line(repository, servicer, words, message):
    status, out, err = repository(*words)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert servicer.asked == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "ACTION is 'lst'; give one of list, load, unload, label, rollback; did you mean"),
        (["load", "ranker", "--version", "0"], "'0': give a whole number of at least 1"),
        (["list", "--timeout-s", "nan"], "'nan': give seconds, above 0 and at most 86400"),
        (["list", "--timeout-s", "0"], "'0': give seconds, above 0"),
    ],
)
def test_a_wrong_flag_ends_with_2_and_one_line(servicer, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(["repository", *words, "--address", servicer.address])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (("NOT_FOUND", "no such version"), 2, "error: no such version"),
        (("FAILED_PRECONDITION", "not explicit"), 2, "answered FAILED_PRECONDITION: not explicit"),
        (("INVALID_ARGUMENT", "label is '7'"), 2, "answered INVALID_ARGUMENT: label is '7'"),
        (("UNAVAILABLE", "draining"), 2, "(draining); is the address right and the server running"),
        (("INTERNAL", "bug 7"), 1, "tessera repository: "),
        (("DEADLINE_EXCEEDED", ""), 1, "no answer within --timeout-s 300; the server may go on"),
    ],
)
def test_what_the_server_refuses_is_one_line_and_a_status(
    repository, servicer, failure, status, message
):
    code, words = failure
    servicer.failure = (grpc.StatusCode[code], words)
    ended, out, err = repository("load", "ranker")
    assert (ended, out) == (status, "")
    assert len(err.splitlines()) == 1
    assert message in err


def test_an_unknown_model_is_answered_with_the_nearest(repository, servicer):
    servicer.failure = (grpc.StatusCode.NOT_FOUND, "model 'rankr' is unknown")
    status, _, err = repository("unload", "rankr")
    assert status == 2
    assert "MODEL is 'rankr'; give one of ranker, tower; did you mean ranker?" in err


def test_an_address_where_nobody_listens_ends_with_2(capsys):
    assert main(["repository", "list", "--address", "127.0.0.1:1"]) == 2
    assert "is the address right and the server running and ready?" in capsys.readouterr().err
    assert main(["repository", "list", "--address", "nowhere"]) == 2
    assert "'nowhere' is not HOST:PORT" in capsys.readouterr().err
