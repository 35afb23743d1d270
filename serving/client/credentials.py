"""What a client shows a server, and how it knows the server: certificates and a token (docs/security.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tessera.errors import UserError

_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Files, each of which is read when a client is made.

    Attributes:
        tls_ca: PEM file with the certificates of the authorities that the server's certificate is held against;
            None: the connection is not encrypted.
        tls_cert: PEM file with this client's certificate, and those between it and the server's authority; None: it
            shows none.
        tls_key: PEM file with its private key.
        token_file: file whose first line begins with the token that each call shows; None: none.
    """

    tls_ca: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    token_file: str | Path | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot go together.

        Raises:
            UserError: a file is missing beside another.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            lacking, there = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise UserError(f"{_flag(there)} is given without {_flag(lacking)}; give both")
        if self.tls_cert is not None and self.tls_ca is None:
            raise UserError(
                "--tls-cert is given without --tls-ca; name the authority of the server's certificate"
            )

    def channel(
        self,
        address: str,
        options: list[tuple[str, Any]],
        plain: Callable[..., Any] = grpc.insecure_channel,
        secure: Callable[..., Any] = grpc.secure_channel,
    ) -> Any:
        """A channel to ``address``.

        Args:
            address: a target of gRPC's.
            options: of gRPC's channels.
            plain: makes a channel without TLS.
            secure: makes one with it.

        Raises:
            UserError: a file cannot be read.
        """
        if self.tls_ca is None:
            return plain(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read("tls_ca", self.tls_ca),
            private_key=None if self.tls_key is None else _read("tls_key", self.tls_key),
            certificate_chain=None if self.tls_cert is None else _read("tls_cert", self.tls_cert),
        )
        return secure(address, credentials, options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries.

        Raises:
            UserError: the token's file cannot be read.
        """
        if self.token_file is None:
            return ()
        words = _read("token_file", self.token_file).decode("ascii", "replace").split()
        if not words or not words[0].isprintable() or not words[0].isascii():
            raise UserError(f"{_flag('token_file')} is '{self.token_file}'; it holds no token")
        return (("authorization", f"Bearer {words[0]}"),)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _read(field: str, path: str | Path) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"{_flag(field)} is '{path}'; it cannot be read ({error.strerror})"
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise UserError(f"{_flag(field)} is '{path}'; it has more than {_MAX_FILE_BYTES} bytes")
    return content
