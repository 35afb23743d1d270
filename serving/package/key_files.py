"""Files of keys: PEM, as OpenSSL writes it, without a password."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tessera.errors import UserError

_MAX_KEY_BYTES = 1 << 16


def read_key_file(path: str | Path) -> bytes:
    """The content of a key's file, as far as one can be long.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with Path(path).open("rb") as stream:
            return stream.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise UserError(f"key {path} cannot be read: {error.strerror}") from error


def write_key_pair(
    key: Ed25519PrivateKey | EllipticCurvePrivateKey, private: Path, public: Path
) -> None:
    """Write ``key`` and its public key to new files; the private one is readable by its owner alone.

    Raises:
        UserError: one of the files exists already or cannot be written.
    """
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    shown = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    _write_new(private, secret, 0o600)
    _write_new(public, shown, 0o644)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
    except FileExistsError as error:
        raise UserError(f"{path} is there already; give another name or remove it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
