"""Health, reflection, the HTTP port, the metrics page, flags and packages that are refused."""

import itertools
import re
import shutil
import socket
import subprocess

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tessera.cli import main
from tests.conformance.conformance_harness import (
    REPOSITORY,
    TIMEOUT_S,
    RunningServer,
    commands,
    start_that_ends,
)

STATUS = health_pb2.HealthCheckResponse.ServingStatus

MODEL = {"model", "version"}
LATENCY = (
    ".0001 .0002 .0003 .0006 .001 .002 .003 .004 .005 .006 .008 .01 .013 .016 .02 .025 .03 .04 "
    ".05 .065 .08 .1 .2 .5 1 2 5"
)
LATENCY_BOUNDS = [*map(float, LATENCY.split()), float("inf")]
# Family name (counters without _total), type, labels.
FAMILIES = {
    "tessera_requests": ("counter", MODEL | {"code"}),
    "tessera_request_duration_seconds": ("histogram", MODEL),
    "tessera_stage_duration_seconds": ("histogram", MODEL | {"stage"}),
    "tessera_queue_requests": ("gauge", MODEL),
    "tessera_queue_samples": ("gauge", MODEL),
    "tessera_inflight_batches": ("gauge", MODEL | {"device"}),
    "tessera_batch_requests": ("histogram", MODEL),
    "tessera_batch_samples": ("histogram", MODEL),
    "tessera_batch_ids": ("histogram", MODEL),
    "tessera_batches": ("counter", MODEL | {"reason"}),
    "tessera_rejected": ("counter", MODEL | {"reason"}),
    "tessera_ids": ("counter", MODEL),
    "tessera_out_of_range_ids": ("counter", MODEL),
    "tessera_feature_outside_range": ("counter", MODEL | {"feature"}),
    "tessera_feature_missing": ("counter", MODEL | {"feature"}),
    "tessera_feature_range_position": ("histogram", MODEL | {"feature"}),
    "tessera_score": ("histogram", MODEL | {"output"}),
    "tessera_score_not_finite": ("counter", MODEL | {"output"}),
    "tessera_model_load_duration_seconds": ("gauge", MODEL),
    "tessera_model_ready": ("gauge", MODEL),
    "tessera_model_state": ("gauge", MODEL | {"state"}),
    "tessera_model_loads": ("counter", {"model", "result"}),
    "tessera_model_load_progress": ("gauge", MODEL),
    "tessera_shadow_score_difference": ("histogram", MODEL | {"shadow_version"}),
    "tessera_model_commit": ("gauge", MODEL),
    "tessera_freshness_seconds": ("gauge", MODEL),
    "tessera_commit_rows": ("counter", MODEL),
    "tessera_commit_apply_seconds": ("histogram", MODEL),
    "tessera_commits_refused": ("counter", MODEL | {"reason"}),
    "tessera_shadow_calls": ("counter", MODEL | {"result"}),
    "tessera_model_info": ("gauge", MODEL | {"sha256", "torch", "dtype", "device"}),
    "tessera_device_memory_bytes": ("gauge", MODEL | {"device", "kind"}),
    "tessera_calls_refused": ("counter", {"reason"}),
    "tessera_secret_reloads": ("counter", {"files", "result"}),
    "tessera_certificate_end_seconds": ("gauge", set()),
    "tessera_log_lines_dropped": ("counter", {"log"}),
    "tessera_spans": ("counter", {"result"}),
    "tessera_records": ("counter", {"result"}),
    "tessera_record_bytes": ("counter", set()),
    "tessera_build_info": ("gauge", {"server", "version"}),
    "process_virtual_memory_bytes": ("gauge", set()),
    "process_resident_memory_bytes": ("gauge", set()),
    "process_start_time_seconds": ("gauge", set()),
    "process_cpu_seconds": ("counter", set()),
    "process_open_fds": ("gauge", set()),
    "process_max_fds": ("gauge", set()),
}
OWN_FAMILIES = {
    "cpp": {
        "tessera_connections": ("gauge", set()),
        "tessera_streams": ("gauge", set()),
        "tessera_connections_closed": ("counter", {"reason"}),
    }
}
"""Families that one server alone can fill: the other one's library does not tell it."""

VALUES = {
    ("tessera_requests", "code"): {
        *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"),
        *("CANCELLED", "UNAVAILABLE", "INTERNAL"),
    },
    ("tessera_stage_duration_seconds", "stage"): {
        *("decode", "queue", "assemble", "transfer", "forward", "split", "encode")
    },
    ("tessera_batches", "reason"): {"full", "delay", "idle", "deadline", "drain"},
    ("tessera_rejected", "reason"): {
        *("queue_full", "deadline", "cancelled", "invalid", "draining")
    },
    ("tessera_inflight_batches", "device"): {"cpu"},
    ("tessera_device_memory_bytes", "kind"): {"buffers", "tables"},
}


def test_the_metrics_page_has_every_family_and_no_other(server, kind):
    families = server.families()
    (build,) = families["tessera_build_info"].samples
    expected = FAMILIES | OWN_FAMILIES.get(build.labels["server"], {})
    assert families.keys() == expected.keys()
    for name, (type_, labels) in expected.items():
        family = families[name]
        assert family.type == type_, name
        assert family.documentation, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels, sample
    for (name, label), values in VALUES.items():
        assert {sample.labels[label] for sample in families[name].samples} == values, name
    assert build.labels["server"] in ({"python", "cpp"} if kind == "given" else {kind})


def labels_of(server):
    """Every sample's name and labels, but for what tells the servers apart."""
    return {
        (sample.name, *sorted(canonical(*label) for label in sample.labels.items()))
        for family in server.families().values()
        for sample in family.samples
        if not any(family.name in own for own in OWN_FAMILIES.values())
    }


def canonical(name, value):
    if name == "server":
        return name, ""
    return name, float(value) if name == "le" else value


def test_both_servers_have_the_same_samples(both_kinds, package, drawn):
    """Before anything has come, and after an answer and refusals."""
    found = {}
    for kind in both_kinds:
        flags = ["--model", package, "--drain-propagation-ms", 0]
        with RunningServer(kind, *flags) as server:
            server.wait_for(
                lambda server=server: all(
                    sample.labels["sha256"]
                    for sample in server.families()["tessera_model_info"].samples
                )
            )
            before = labels_of(server)
            server.predict(drawn.samples(3))
            assert (
                server.outcome(drawn.samples(1, model="nobody").SerializeToString())[0]
                == "NOT_FOUND"
            )
            for content in (b"", b"\xff" * 7):
                assert server.outcome(content)[0] == "INVALID_ARGUMENT"
            found[kind] = before, labels_of(server)
    python, cpp = found.values()
    assert python == cpp


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("tessera_request_duration_seconds", LATENCY_BOUNDS),
        ("tessera_batch_requests", [*(float(2**n) for n in range(13)), float("inf")]),
        ("tessera_batch_samples", [*(float(2**n) for n in range(17)), float("inf")]),
        ("tessera_batch_ids", [*(float(2**n) for n in range(23)), float("inf")]),
    ],
)
def test_buckets(server, name, bounds):
    found = [
        float(sample.labels["le"])
        for sample in server.families()[name].samples
        if sample.name.endswith("_bucket") and sample.labels["model"] == "ranker"
    ]
    assert found == bounds


def test_what_a_request_counts(server, drawn):
    stages = ("decode", "queue", "assemble", "forward", "split", "encode")
    counts = [
        ("tessera_requests_total", {"code": "OK"}),
        ("tessera_request_duration_seconds_count", {}),
        ("tessera_batches_total", {"reason": "idle"}),
        ("tessera_batch_requests_sum", {}),
        *(("tessera_stage_duration_seconds_count", {"stage": stage}) for stage in stages),
    ]

    def read():
        return [server.value(name, model="second", **labels) for name, labels in counts]

    server.settle()
    before = read()
    samples = server.value("tessera_batch_samples_sum", model="second")
    server.predict(drawn.samples(5, model="second"))
    server.settle()
    assert server.value("tessera_batch_samples_sum", model="second") == samples + 5
    assert read() == [value + 1 for value in before]


def test_facts_of_the_model(server, in_process):
    def facts():
        (info,) = (
            sample.labels
            for sample in server.families()["tessera_model_info"].samples
            if sample.labels["model"] == "ranker"
        )
        return info

    # The hash of the whole file comes behind being ready.
    server.wait_for(lambda: facts().get("sha256"))
    info, manifest = facts(), in_process.manifest
    assert info["sha256"] == in_process.sha256
    assert (info["torch"], info["dtype"]) == (manifest.versions.torch, manifest.dtype)
    tables = sum(table.bytes for table in manifest.tables)
    assert server.value("tessera_device_memory_bytes", model="ranker", kind="tables") == tables


@pytest.mark.parametrize("name", ["", "ranker", "second"])
def test_health_check(server, name):
    stub = health_pb2_grpc.HealthStub(server.channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
    assert reply.status == STATUS.SERVING


def test_health_of_an_unknown_name(server):
    stub = health_pb2_grpc.HealthStub(server.channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=TIMEOUT_S)
    assert next(watch).status == STATUS.SERVICE_UNKNOWN
    watch.cancel()


def test_a_watch_sees_the_drain_and_does_not_hold_it_up(kind, package):
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
        stub = health_pb2_grpc.HealthStub(server.channel)
        watches = [
            stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            for name in ("", "ranker")
        ]
        assert [next(watch).status for watch in watches] == [STATUS.SERVING] * 2
        server.signal()
        assert [next(watch).status for watch in watches] == [STATUS.NOT_SERVING] * 2
        assert server.exit_status() == 0


def test_reflection_lists_and_describes_the_services(server):
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="predictor.Predictor"),
    ]
    names, described = list(stub.ServerReflectionInfo(iter(asked), timeout=TIMEOUT_S))
    listed = {service.name for service in names.list_services_response.service}
    assert {"predictor.Predictor", "grpc.health.v1.Health"} <= listed
    assert b"SharedFeatures" in described.file_descriptor_response.file_descriptor_proto[0]


def test_http_pages(server):
    assert server.http("/healthz") == (200, "ok\n")
    assert server.http("/readyz") == (200, "ready\n")
    status, page = server.http("/")
    assert status == 200
    assert "ranker" in page
    assert "second" in page
    assert server.http("/nothing")[0] == 404


def reachable(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_health_says_serving_no_sooner_than_the_model_answers(kind, package, drawn):
    if kind == "given":
        pytest.skip("watches a server start")
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    flags = ["--model", package, "--drain-propagation-ms", 0]
    server = RunningServer(kind, *flags, port=port)
    server.address = f"127.0.0.1:{port}"
    # The port opens before the model is loaded: asked from the first moment on.
    while not reachable(port):
        assert server.process.poll() is None, "".join(server.noise)
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        raw = channel.unary_unary("/predictor.Predictor/Predict")
        content = drawn.samples(1).SerializeToString()
        seen = STATUS.NOT_SERVING
        for name in itertools.cycle(("ranker", "")):
            ask = health_pb2.HealthCheckRequest(service=name)
            seen = stub.Check(ask, timeout=TIMEOUT_S, wait_for_ready=True).status
            if seen == STATUS.SERVING:
                break
            assert seen == STATUS.NOT_SERVING
        assert raw(content, timeout=TIMEOUT_S)
    with server:
        pass


def run(kind, *flags, anew=False):
    """A server that must not start: its exit status and what it says besides log lines.

    ``anew``: by the command that users give, which imports everything itself.
    """
    if kind == "given":
        pytest.skip("starts servers of its own")
    done = start_that_ends(kind, *flags, anew=anew)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    return done.returncode, lines


def free(*flags):
    return ["--host", "127.0.0.1", "--port", 0, "--http-port", 0, *flags]


def damaged(package, folder, change):
    path = folder / "damaged.pt"
    content = bytearray(package.read_bytes())
    path.write_bytes(change(content))
    return path


def flip(content):
    content[len(content) // 3] ^= 1
    return content


@pytest.mark.parametrize(
    "change",
    [flip, lambda content: content[:-100], lambda _: b"", lambda _: b"no package at all"],
    ids=["flipped", "cut_short", "empty", "foreign"],
)
def test_a_bad_package_ends_with_2_and_one_line(kind, package, tmp_path, change):
    path = damaged(package, tmp_path, change)
    status, lines = run(kind, *free("--model", path))
    assert status == 2
    assert len(lines) == 1, lines
    assert f"error: package {path}: " in lines[0]


def test_a_package_that_is_not_there(kind, tmp_path):
    status, lines = run(kind, *free("--model", tmp_path / "none.pt"), anew=True)
    assert status == 2
    assert len(lines) == 1, lines
    assert "none.pt" in lines[0]


def test_two_models_of_one_name(kind, package):
    status, lines = run(kind, *free("--model", package, "--model", package))
    assert status == 2
    assert f"are both named 'ranker'; give one another name with --model NAME={package}" in lines[0]


@pytest.mark.parametrize(("flag", "other"), [("--port", "--http-port"), ("--http-port", "--port")])
def test_a_port_that_is_taken(kind, package, flag, other):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--host", "127.0.0.1", "--model", package, flag, port, other, 0]
        status, lines = run(kind, *flags)
    assert status == 2
    # gRPC for Python may say something of its own before.
    assert f"127.0.0.1:{port} cannot be listened on" in lines[-1]
    assert flag in lines[-1]


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "0"],
        ["--port", "70000"],
        ["--port", "x"],
        ["--max-queue-samples", "5"],
        ["--max-inflight-bytes", "67108863"],
        ["--port", "7000", "--http-port", "7000"],
        ["--drain-limit-s", "0.5"],
        ["--max-delay-us", "-1"],
        ["--log-level", "loud"],
        ["--gpus", "x"],
        ["--gpus", "1,1"],
        ["--nonsense"],
        ["--model", "=x"],
    ],
    ids=" ".join,
)
def test_a_wrong_flag_ends_with_2(kind, package, flags):
    status, lines = run(kind, "--model", package, *flags)
    assert status == 2
    assert flags[0].strip("-").replace("-", "_") in lines[-1].replace("-", "_")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """PEM files of two key pairs: ours and a stranger's."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "strange"):
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pem").write_bytes(private)
        (folder / f"{name}.pub").write_bytes(public)
    return folder


@pytest.fixture(scope="module")
def signed(package, keys, tmp_path_factory):
    path = tmp_path_factory.mktemp("signed") / "signed.pt"
    path.write_bytes(package.read_bytes())
    assert main(["sign", str(path), "--key", str(keys / "ours.pem")]) == 0
    return path


def requiring(*public_keys):
    flags = [word for key in public_keys for word in ("--public-key", key)]
    return ["--require-signature", *flags]


def test_a_signed_package_is_served_where_its_key_is_trusted(kind, signed, keys, drawn):
    flags = requiring(keys / "strange.pub", keys / "ours.pub")
    with RunningServer(kind, "--model", signed, *flags, "--drain-propagation-ms", 0) as server:
        assert server.predict(drawn.samples(1)).model_name == "ranker"


def test_a_signature_is_not_asked_for_by_default(kind, signed, drawn):
    with RunningServer(kind, "--model", signed, "--drain-propagation-ms", 0) as server:
        assert server.predict(drawn.samples(1)).model_name == "ranker"


def refusal(kind, path, *flags):
    status, lines = run(kind, *free("--model", path, *flags))
    assert status == 2
    assert len(lines) == 1, lines
    return lines[0].partition(f"error: package {path}: ")[2]


def test_packages_that_nobody_trusted_signed(kind, package, signed, keys):
    assert refusal(kind, package, *requiring(keys / "ours.pub")) == (
        "is not signed, and --require-signature is set; sign it with: tessera sign MODEL.pt --key "
        "KEY.pem"
    )
    ours = load_pem_public_key((keys / "ours.pub").read_bytes())
    digits = ours.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    assert refusal(kind, signed, *requiring(keys / "strange.pub")) == (
        f"was signed with the key {digits}, which is none of those given by --public-key"
    )


@pytest.mark.parametrize("flags", [["--require-signature"], ["--public-key", "FILE"]], ids=" ".join)
def test_signature_flags_need_each_other(kind, package, keys, flags):
    flags = [keys / "ours.pub" if word == "FILE" else word for word in flags]
    status, lines = run(kind, *free("--model", package, *flags))
    assert status == 2
    assert "public-key" in lines[-1].replace("_", "-")


def test_a_public_key_that_is_none(kind, package, keys, tmp_path):
    (tmp_path / "none.pub").write_text("no key")
    for path in (tmp_path / "none.pub", tmp_path / "missing.pub", keys / "ours.pem"):
        status, lines = run(kind, *free("--model", package, *requiring(path)))
        assert status == 2
        assert str(path) in lines[-1]


def test_a_path_may_hold_an_equals_sign(kind, package, tmp_path):
    """A name holds no slash, so what stands before this path's ``=`` is not one."""
    folder = tmp_path / "date=2026-11-22"
    folder.mkdir()
    path = shutil.copy(package, folder / "model.pt")
    flags = ["--model", path, "--model", f"second={path}", "--drain-propagation-ms", 0]
    with RunningServer(kind, *flags) as server:
        loaded = [entry for entry in server.log if entry["event"] == "load"]
    assert [entry["model"] for entry in loaded] == ["ranker", "second"]
    assert [entry["path"] for entry in loaded] == [str(path)] * 2


def help_flags(kind):
    done = subprocess.run(
        [*commands()[kind], "--help"], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    return set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", done.stdout, re.MULTILINE))


CONNECTION_FLAGS = {
    *("--max-connection-streams", "--max-streams", "--max-header-bytes"),
    *("--max-control-frames-per-s", "--max-pings-per-s", "--max-resets-per-s"),
    *("--handshake-timeout-s", "--message-timeout-s", "--write-timeout-s"),
}
"""Limits of the C++ server's own HTTP/2 layer; Python's library has its own, which cannot be set."""


def test_both_servers_have_the_same_flags(both_kinds):
    python, cpp = map(help_flags, both_kinds)
    # Python finds operator libraries as packages, and prints its version as `tessera --version`.
    # gRPC's library names all connections of a Unix socket alike, so that Python could not share memory among them.
    assert cpp - python == {"--grpc-socket", "--ops-dir", "--version"} | CONNECTION_FLAGS
    # One process of the C++ server uses every CPU.
    assert python - cpp == {"--processes"}
