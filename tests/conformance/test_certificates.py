"""--tls-cert, --tls-key and --tls-client-ca: who gets a connection, and certificates that change under load."""

import contextlib
import itertools
import signal
import socket
import subprocess
import threading

import pytest

from tessera.cli import run_command
from tessera.serving.client import PredictError, PredictorClient, Unavailable
from tests.conformance.certificates import certify, replace
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer, cpp_program
from tests.conformance.guarded import (
    GUARDED_METHODS,
    GUARDED_PAGES,
    OPEN_METHODS,
    OPEN_PAGES,
    TOKEN,
    Asker,
    Places,
)

LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return Places(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def locked(kind, package, places):
    """A server that takes clients with certificates and tokens alone."""
    places.renew()
    flags = ["--model", package, "--drain-propagation-ms", 0, "--auth-token-file", places.tokens]
    flags += ["--tls-cert", places.cert, "--tls-key", places.key, "--tls-client-ca", places.ca]
    with RunningServer(kind, *flags) as running:
        yield running


def test_who_has_no_certificate_gets_no_connection(locked, places):
    for files in (None, places.without, places.theirs):
        with Asker(locked, files) as asker:
            for method, token in itertools.product(GUARDED_METHODS + OPEN_METHODS, (None, TOKEN)):
                assert asker.call(method, token) == "UNAVAILABLE", (files, method)
            for (method, path), token in itertools.product(
                GUARDED_PAGES + OPEN_PAGES, (None, TOKEN)
            ):
                assert asker.page(method, path, token)[0] == "no TLS", (files, path)


def test_who_has_one_needs_a_token_as_well(locked, places):
    with Asker(locked, places.mine) as asker:
        for method in GUARDED_METHODS:
            assert asker.call(method) == asker.call(method, "wrong") == "UNAUTHENTICATED", method
            assert asker.call(method, TOKEN) not in {"UNAUTHENTICATED", "UNAVAILABLE"}, method
        for method in OPEN_METHODS:
            assert asker.call(method) == "OK", method
        for method, path in GUARDED_PAGES:
            assert asker.page(method, path)[0] == asker.page(method, path, "wrong")[0] == 401, path
            assert asker.page(method, path, TOKEN)[0] not in {401, "no TLS"}, path
        for method, path in OPEN_PAGES:
            assert asker.page(method, path)[0] == 200, path


def test_large_messages_pass_both_ways(locked, places, draw_with):
    """Over many records, some of which come in part."""
    small, large = draw_with().samples(1), draw_with(max_bag=40).samples(5_000)
    large = large.SerializeToString()
    assert len(large) > 1 << 20
    mine = places.credentials(places.mine)
    with PredictorClient(locked.address, credentials=mine, timeout_s=TIMEOUT_S) as client:
        for content in (large, small.SerializeToString(), large):
            assert client.send(content)


def test_clients_with_certificates(locked, places, package, drawn, capsys):
    content = drawn.samples(3).SerializeToString()
    for files in (places.without, places.theirs):
        with (
            PredictorClient(locked.address, credentials=places.credentials(files)) as client,
            pytest.raises(Unavailable),
        ):
            client.send(content)
    mine = places.mine
    shown = ["--tls-ca", mine.ca, "--tls-cert", mine.cert, "--tls-key", mine.key]
    shown = [*map(str, shown), "--token-file", str(places.tokens)]
    ask = ["--address", locked.address, "--model-file", str(package), *shown]
    assert run_command("predict", [*ask, "--random", "1"]) == 0
    assert run_command("repository", ["list", "--address", locked.address, *shown]) == 0
    assert "ranker" in capsys.readouterr().out
    if locked.kind == "cpp" and (load := cpp_program().with_name("tessera-load")).exists():
        short = ["--warm-up-s", "0", "--duration-s", "0.2", "--timeout-ms", "300000"]
        subprocess.run([load, *ask, *short], check=True, capture_output=True)


class Load:
    """Calls over one connection, and calls over connections of their own, until it ends."""

    def __init__(self, server, credentials, content):
        self.failures, self.answered = [], [0, 0]
        self._end = threading.Event()

        def ask(which, client):
            try:
                client.send(content, timeout_s=TIMEOUT_S)
                self.answered[which] += 1
            except PredictError as error:
                self.failures.append(error)

        def over_one():
            with PredictorClient(server.address, credentials=credentials) as client:
                while not self._end.wait(0.002):
                    ask(0, client)

        def over_many():
            alone = [("grpc.use_local_subchannel_pool", 1)]
            while not self._end.wait(0.002):
                with PredictorClient(
                    server.address, credentials=credentials, options=alone
                ) as client:
                    ask(1, client)

        self._threads = [threading.Thread(target=one) for one in (over_one, over_many, over_many)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()


def test_certificates_change_under_load_and_bad_ones_are_not_taken(locked, places, drawn):
    content = drawn.samples(2).SerializeToString()
    told = lambda event: [line for line in locked.log if line["event"] == event]  # noqa: E731 - it is one line
    with Asker(locked, places.mine) as asker:

        def serves(serial):
            return (
                asker.served(locked.address, "h2")
                == asker.served(locked.http_address, "http/1.1")
                == serial
            )

        assert serves(places.serial)
        with Load(locked, places.credentials(places.mine), content) as load:
            locked.wait_for(lambda: min(load.answered) > 3)
            for asked in (False, True):
                serial = places.renew()
                if asked:
                    locked.signal(signal.SIGHUP)
                locked.wait_for(lambda serial=serial: serves(serial))
                before = list(load.answered)
                locked.wait_for(
                    lambda before=before: all(
                        now > then + 3 for now, then in zip(load.answered, before, strict=True)
                    )
                )
            cert, key = places.cert.read_bytes(), places.key.read_bytes()
            over = certify("server", places.authority, days=-1)
            for new_cert, new_key, reason in (
                (b"nothing", key, f"{places.cert}: is not a file of certificates in PEM"),
                (cert, b"nothing", f"{places.key}: is not a private key in PEM that needs no password"),
                (cert, over.key_pem, f"{places.key}: is not the private key of the first certificate in {places.cert}"),
                (over.pem, over.key_pem, f"{places.cert}: the certificate's time is over; make a new one"),
            ):  # fmt: skip
                replace(places.cert, new_cert)
                replace(places.key, new_key)
                locked.signal(signal.SIGHUP)
                locked.wait_for(
                    lambda reason=reason: (
                        reason in [line["error"] for line in told("certificates_not_reloaded")]
                    )
                )
                assert serves(serial)
            replace(places.cert, cert)
            replace(places.key, key)
        assert not load.failures
        page = asker.page("GET", "/metrics", TOKEN)[1]
        assert 'tessera_secret_reloads_total{files="certificates",result="refused"}' in page
        assert "tessera_certificate_end_seconds 1" in page


def test_handshakes_that_stall_keep_nobody_out(locked, places):
    with contextlib.ExitStack() as stack, Asker(locked, places.mine) as asker:
        for address, count in ((locked.http_address, 200), (locked.address, 50)):
            host, _, port = address.rpartition(":")
            for number in range(count):
                silent = stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
                # Some say nothing, some the beginning of a handshake, and some what it is not.
                with contextlib.suppress(ConnectionError):
                    silent.sendall(
                        (b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n")[number % 3]
                    )
        assert asker.page("GET", "/healthz")[0] == 200
        assert asker.call(LIVE, TOKEN) == "OK"
