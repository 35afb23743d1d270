"""Certificates and keys in PEM files, and the TLS that both ports, and connections to a collector, make of them.

The two libraries that encrypt, gRPC's own and Python's ``ssl``, say little of a file that they cannot use, or say it
when a client connects.  So files are checked here, with the words that the C++ server has, before either gets them.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from tessera.errors import UserError
from tessera.serving.repository.small_file import read_small_file

_MAX_FILE_BYTES = 1 << 20
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; those of 1.3 are all good


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files.

    Attributes:
        cert: the server's certificate, and those between it and an authority that clients know.
        key: its private key, not encrypted.
        client_ca: authorities of clients' certificates; empty: clients need none.
    """

    cert: str
    key: str
    client_ca: str = ""

    @property
    def paths(self) -> list[str]:
        """The paths of those files that are named."""
        return [path for path in (self.cert, self.key, self.client_ca) if path]


@dataclass(frozen=True)
class _Loaded:
    grpc: grpc.ServerCertificateConfiguration
    http: ssl.SSLContext
    ends: datetime


class Certificates:
    """What new connections encrypt with; those that are there keep what they have.

    Args:
        files: read at once.

    Raises:
        UserError: a file has to be changed.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._loaded = _load(files)
        self._grpc_has = self._loaded

    @property
    def ends(self) -> datetime:
        """When the certificate ends."""
        return self._loaded.ends

    @property
    def http(self) -> ssl.SSLContext:
        """What a new connection of the HTTP port encrypts with."""
        return self._loaded.http

    def read(self) -> None:
        """Read the files again.

        Raises:
            UserError: one has to be changed; new connections encrypt with what there was before.
        """
        self._loaded = _load(self._files)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """What the gRPC port encrypts with, now and after the files were read again."""
        return grpc.dynamic_ssl_server_credentials(
            self._loaded.grpc,
            self._news_for_grpc,  # type: ignore[arg-type] # None: nothing is new; grpc.dynamic_ssl_server_credentials says so
            require_client_authentication=bool(self._files.client_ca),
        )

    def _news_for_grpc(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC, which asks before each handshake, does not have yet."""
        loaded = self._loaded
        if loaded is self._grpc_has:
            return None
        self._grpc_has = loaded
        return loaded.grpc


def _load(files: TlsFiles) -> _Loaded:
    chain = _content(files.cert)
    own = _certificates(files.cert, chain)[0]
    key = _content(files.key)
    _check_key(files, own, key)
    if own.not_valid_after_utc <= datetime.now(timezone.utc):
        raise UserError(f"{files.cert}: the certificate's time is over; make a new one")
    authorities = None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password it would ask for one at a terminal.
        context.load_cert_chain(files.cert, files.key, password="")
        if files.client_ca:
            authorities = _content(files.client_ca)
            _certificates(files.client_ca, authorities)
            context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise UserError(
            f"{files.cert}: OpenSSL does not take the certificate or its key ({error})"
        ) from error
    configuration = grpc.ssl_server_certificate_configuration([(key, chain)], authorities)
    return _Loaded(configuration, context, own.not_valid_after_utc)


def client_context(ca: str) -> ssl.SSLContext:
    """What connections to another server encrypt with: TLS 1.2 or 1.3, which has to show a certificate of its name.

    Args:
        ca: PEM file with the authorities that it is held against; empty: those of the system, as OpenSSL finds them
            (``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` of the environment name others).

    Raises:
        UserError: the file has to be changed.
    """
    if not ca:
        context = ssl.create_default_context()
    else:
        authorities = _content(ca)
        _certificates(ca, authorities)
        context = ssl.create_default_context(cadata=authorities.decode("ascii", "replace"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # As OpenSSL has it by itself, and the C++ server with it; Python 3.13 asks for more.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _content(path: str) -> bytes:
    content = read_small_file(Path(path), _MAX_FILE_BYTES)
    if content is None:
        raise UserError(f"{path}: there is no such file")
    return content


def _certificates(path: str, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise UserError(f"{path}: is not a file of certificates in PEM") from None


def _check_key(files: TlsFiles, own: x509.Certificate, content: bytes) -> None:
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UserError(
            f"{files.key}: is not a private key in PEM that needs no password"
        ) from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
        raise UserError(
            f"{files.key}: is not the private key of the first certificate in {files.cert}"
        )
