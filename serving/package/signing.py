"""Ed25519 signatures of packages and commits (RFC 8032): who vouches for a file, and checking it.

What is signed is the manifest's record, or a commit's last one, with ``"signature": null`` as its end; `FORMAT.md` says why
that covers the whole file.  Keys are PEM files as OpenSSL writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tessera.errors import UserError
from tessera.serving.package.archive import file_identity
from tessera.serving.package.key_files import read_key_file, write_key_pair
from tessera.serving.package.layout import ArchiveWriter
from tessera.serving.package.manifest import MANIFEST_RECORD, Manifest
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.replace import replacing
from tessera.serving.package.signed_record import Signature, signed_message

_CHUNK_BYTES = 1 << 20


class SignatureError(ValueError):
    """A manifest has no signature of a trusted key that holds; the message says which of it."""


def read_private_key(path: str | Path) -> Ed25519PrivateKey:
    """Read a private key: unencrypted PEM, as ``openssl genpkey -algorithm ed25519`` writes.

    Raises:
        UserError: the file is missing or does not hold such a key.
    """
    try:
        key = serialization.load_pem_private_key(read_key_file(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _no_key(path, "private", str(error)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(path, "private", "it is of another algorithm")
    return key


def read_public_key(path: str | Path) -> Ed25519PublicKey:
    """Read a public key: PEM, as ``openssl pkey -pubout`` writes.

    Raises:
        UserError: the file is missing or does not hold such a key.
    """
    try:
        key = serialization.load_pem_public_key(read_key_file(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _no_key(path, "public", str(error)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key(path, "public", "it is of another algorithm")
    return key


def generate_keys(private: Path, public: Path) -> None:
    """Write a new pair of keys; the private one is readable by its owner alone.

    Raises:
        UserError: one of the files exists already or cannot be written.
    """
    write_key_pair(Ed25519PrivateKey.generate(), private, public)


def key_id(key: Ed25519PublicKey) -> str:
    """The 32 bytes of a public key as hex digits."""
    return key.public_bytes_raw().hex()


def sign_manifest(manifest: Manifest, key: Ed25519PrivateKey) -> Manifest:
    """``manifest`` with a signature of ``key``; one that it has is replaced."""
    return replace(
        manifest, signature=signature_of(replace(manifest, signature=None).to_bytes(), key)
    )


def signature_of(message: bytes, key: Ed25519PrivateKey) -> Signature:
    """The signature of a record's bytes, which end in ``"signature": null``."""
    return Signature(
        algorithm="ed25519", public_key=key_id(key.public_key()), value=key.sign(message).hex()
    )


def check_signature(manifest: bytes, trusted: Sequence[Ed25519PublicKey]) -> str:
    """Check that one of ``trusted`` signed a manifest.

    Args:
        manifest: the content of the manifest's record.
        trusted: the keys whose signature is enough.

    Returns:
        The `key_id` of the one that signed.

    Raises:
        ValueError: `Manifest.from_bytes` refuses it.
        SignatureError: there is no signature, it is another key's, or it does not hold.
    """
    return check_record_signature(
        manifest,
        Manifest.from_bytes(manifest).signature,
        trusted,
        what="package",
        remedy="sign it with: tessera sign MODEL.pt --key KEY.pem",
    )


def check_record_signature(
    content: bytes,
    signature: Signature | None,
    trusted: Sequence[Ed25519PublicKey],
    *,
    what: str,
    remedy: str,
) -> str:
    """Check that one of ``trusted`` signed a record.

    Args:
        content: the record's, which is spelled as it must be.
        signature: the one in it.
        trusted: the keys whose signature is enough.
        what: the kind of file, for errors.
        remedy: for a file without a signature.

    Returns:
        The `key_id` of the one that signed.

    Raises:
        SignatureError: there is no signature, it is another key's, or it does not hold.
    """
    if signature is None:
        raise SignatureError(f"is not signed, and --require-signature is set; {remedy}")
    signer = signature.public_key
    key = next((key for key in trusted if key_id(key) == signer), None)
    if key is None:
        raise SignatureError(
            f"was signed with the key {signer}, which is none of those given by --public-key"
        )
    try:
        key.verify(bytes.fromhex(signature.value), signed_message(content))
    except InvalidSignature as error:
        raise SignatureError(
            f"has a signature of the key {signer} that does not hold: the {what} was changed "
            "after it was signed"
        ) from error
    return signer


def sign_package(path: Path, key: Ed25519PrivateKey, out: Path) -> Manifest:
    """Sign the package at ``path`` and write it to ``out``, which may be the same.

    Every record is compared with the manifest first: what is signed is what lies there.

    Returns:
        The signed manifest.

    Raises:
        PackageError: the package is missing, damaged or changed.
        UserError: ``out`` cannot be written.
    """
    records = Records(path)
    manifest = records.manifest()
    records.check(manifest.records)
    records.check_undivided()
    signed = sign_manifest(manifest, key)
    content = signed.to_bytes()
    *others, last = records.entries
    assert last.name == MANIFEST_RECORD, last.name
    with replacing(out) as target, path.open("rb") as source, target.open("w+b") as stream:
        left = last.header_offset
        while piece := source.read(min(left, _CHUNK_BYTES)):
            stream.write(piece)
            left -= len(piece)
        writer = ArchiveWriter(stream, others)
        writer.add(MANIFEST_RECORD, [content], len(content))
        writer.finish()
        if file_identity(path) != records.identity:
            raise PackageError(path, "was changed while it was being signed; sign it again")
    return signed


def _no_key(path: str | Path, kind: str, why: str) -> UserError:
    return UserError(
        f"key {path} is not a {kind} Ed25519 key in PEM without a password ({why}); "
        "tessera keygen writes a pair"
    )
