"""Every way to ask a server, with or without a token, and what it answers in one word."""

import http.client
import json
import socket
import ssl
from dataclasses import dataclass

import grpc
from cryptography import x509

from tessera.serving.client import Credentials
from tests.conformance.certificates import certify, replace
from tests.conformance.conformance_harness import TIMEOUT_S

TOKEN = "right-token-0123"

GUARDED_METHODS = (
    "/predictor.Predictor/Predict",
    *(
        f"/inference.GRPCInferenceService/{name}"
        for name in (
            "ModelInfer",
            "ServerLive",
            "ServerReady",
            "ModelReady",
            "ServerMetadata",
            "ModelMetadata",
            "ModelConfig",
            "ModelStatistics",
            "RepositoryIndex",
            "RepositoryModelLoad",
            "RepositoryModelUnload",
            "SystemSharedMemoryStatus",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
        )
    ),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/no.Service/Method",
)
OPEN_METHODS = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
GUARDED_PAGES = (
    ("GET", "/"),
    ("GET", "/metrics"),
    ("HEAD", "/metrics"),
    ("GET", "/metrics?x=/healthz"),
    ("GET", "/nothing"),
    ("GET", "/v2"),
    ("GET", "/v2/models/ranker"),
    ("GET", "/v2/models/ranker/ready"),
    ("GET", "/v2/models/ranker/stats"),
    ("POST", "/v2/models/ranker/infer"),
    ("POST", "/v2/models/ranker/versions/3/infer"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/ranker/load"),
    ("POST", "/v2/repository/models/ranker/unload"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/systemsharedmemory/region/r/unregister"),
    ("GET", "/v2/health/live/"),
)
OPEN_PAGES = tuple(
    ("GET", path) for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
)


@dataclass(frozen=True)
class Files:
    """A client's own: PEM files of the authority that it trusts, of its certificate and of its key."""

    ca: object = None
    cert: object = None
    key: object = None


class Places:
    """Files of a server and of its clients."""

    def __init__(self, folder):
        self.folder = folder
        self.authority = certify("ours")
        self.tokens = self.write("tokens", f"{TOKEN}\n".encode())
        self.ca = self.write("ca.pem", self.authority.pem)
        self.cert, self.key = folder / "server.pem", folder / "server.key"
        self.serial = self.renew()
        other = certify("theirs")
        self.mine = self.client("mine", self.authority)
        self.theirs = self.client("theirs", other)
        self.without = Files(ca=self.ca)

    def write(self, name, content):
        replace(self.folder / name, content)
        return self.folder / name

    def client(self, name, signer):
        pair = certify(name, signer)
        cert = self.write(f"{name}.pem", pair.pem)
        return Files(ca=self.ca, cert=cert, key=self.write(f"{name}.key", pair.key_pem))

    def renew(self):
        """Give the server another certificate and key; returns its serial number."""
        pair = certify("server", self.authority)
        replace(self.cert, pair.pem)
        replace(self.key, pair.key_pem)
        self.serial = pair.certificate.serial_number
        return self.serial

    def credentials(self, files):
        return Credentials(
            tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key, token_file=self.tokens
        )


class Asker:
    """Asks one server.

    ``token`` of its methods is the header's token, None for none; a word such as UNAUTHENTICATED or 401 comes back,
    ``no TLS`` where no connection could be made.
    """

    def __init__(self, server, files=None):
        self._server = server
        self._files = files
        self._context = None
        options = [("grpc.use_local_subchannel_pool", 1)]
        if files is None:
            self._channel = grpc.insecure_channel(server.address, options)
            return
        self._context = ssl.create_default_context(cafile=files.ca)
        if files.cert is not None:
            self._context.load_cert_chain(files.cert, files.key)
        read = lambda path: None if path is None else path.read_bytes()  # noqa: E731 - it is one line
        self._channel = grpc.secure_channel(
            server.address,
            grpc.ssl_channel_credentials(read(files.ca), read(files.key), read(files.cert)),
            options,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._channel.close()

    def call(self, method, token=None, content=b"", timeout_s=TIMEOUT_S):
        """The status that a call of one message ends with, or OK once an answer has come."""
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        call = self._channel.stream_stream(method)(
            iter([content]), metadata=metadata, timeout=timeout_s
        )
        try:
            for _ in call:
                call.cancel()
                return "OK"
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    def served(self, address, protocol):
        """The serial number of the certificate that a new connection to ``address`` is shown."""
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cafile=self._files.ca)
        context.load_cert_chain(self._files.cert, self._files.key)
        context.set_alpn_protocols([protocol])
        with (
            socket.create_connection((host, int(port)), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as shaken,
        ):
            assert shaken.selected_alpn_protocol() == protocol
            content = shaken.getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(content).serial_number

    def connection(self):
        host, _, port = self._server.http_address.rpartition(":")
        if self._context is None:
            return http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
        return http.client.HTTPSConnection(
            host, int(port), timeout=TIMEOUT_S, context=self._context
        )

    def page(self, method, path, token=None):
        """Status and text of a page."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        body = b"{}" if method == "POST" else None
        connection = self.connection()
        try:
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            text = reply.read().decode()
        except (ssl.SSLError, ConnectionError, http.client.BadStatusLine):
            return "no TLS", ""
        finally:
            connection.close()
        if reply.status == 401:
            assert reply.getheader("WWW-Authenticate") == "Bearer"
            assert method == "HEAD" or "token" in json.loads(text)["error"]
        return reply.status, text
