"""OpenSSF Model Signing beside our own signature: a file that says who vouches for a package's file, for tools of any kind.

    tessera sign MODEL.pt --model-signing-key release-ec.pem          writes MODEL.pt.sig
    model_signing verify key MODEL.pt --signature MODEL.pt.sig --public_key release-ec.pub.pem

The file is a Sigstore bundle (https://docs.sigstore.dev/about/bundle/) around a DSSE envelope
(https://github.com/secure-systems-lab/dsse), whose payload is an in-toto statement
(https://github.com/in-toto/attestation) of the type that PyPI's ``model-signing`` 1.0 and later writes and verifies: the
SHA-256 of each file of the model, here of one.  It is signed by ECDSA with a key of one of NIST's curves; keys are PEM
files.  Sigstore's own way, by a certificate of its service for a person's account, needs that service and is left to that tool.

The bundle is written and read here instead of by ``model-signing``: the four formats are fixed and take some 100 lines
with ``cryptography``, which Tessera has anyhow, where that library brings some 30 distributions and 90 MB.  A test holds
both against each other.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tessera.errors import UserError
from tessera.serving.package.archive import file_identity
from tessera.serving.package.key_files import read_key_file, write_key_pair
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.replace import replacing
from tessera.serving.package.strict_json import read_strictly

SUFFIX = ".sig"
"""Behind a package's name: its signature's name by default."""

_MAX_BUNDLE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20

_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_ITSELF = "."  # a model of one file

_HASHES: dict[str, Callable[[], hashes.HashAlgorithm]] = {
    "secp256r1": hashes.SHA256,
    "secp384r1": hashes.SHA384,
    "secp521r1": hashes.SHA512,
}
"""What each curve signs with."""


class ModelSignatureError(ValueError):
    """A signature does not hold for a file; the message says why."""


def read_private_key(path: str | Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key: unencrypted PEM, as ``openssl genpkey`` writes.

    Raises:
        UserError: the file is missing or does not hold such a key.
    """
    try:
        key = serialization.load_pem_private_key(read_key_file(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _no_key(path, "private", str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _HASHES:
        raise _no_key(path, "private", "it is of another algorithm or curve")
    return key


def read_public_key(path: str | Path) -> ec.EllipticCurvePublicKey:
    """Read a public key: PEM, as ``openssl pkey -pubout`` writes.

    Raises:
        UserError: the file is missing or does not hold such a key.
    """
    try:
        key = serialization.load_pem_public_key(read_key_file(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _no_key(path, "public", str(error)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise _no_key(path, "public", "it is of another algorithm or curve")
    return key


def generate_keys(private: Path, public: Path) -> None:
    """Write a new pair of keys on the curve P-256; the private one is readable by its owner alone.

    Raises:
        UserError: one of the files exists already or cannot be written.
    """
    write_key_pair(ec.generate_private_key(ec.SECP256R1()), private, public)


def sign_model(path: Path, key: ec.EllipticCurvePrivateKey, out: Path) -> str:
    """Sign the package at ``path`` and write the signature to ``out``.

    Every record is compared with the manifest first: what is signed is what the packager wrote.

    Returns:
        The file's SHA-256 that was signed, lower-case hex.

    Raises:
        PackageError: the package is missing, damaged or changed.
        UserError: ``out`` cannot be written.
    """
    records = Records(path)
    records.check(records.manifest().records)
    records.check_undivided()
    digest = file_sha256(path)
    if file_identity(path) != records.identity:
        raise PackageError(path, "was changed while it was being signed; sign it again")
    payload = json.dumps(_statement(path.name, digest), indent=2).encode()
    algorithm = ec.ECDSA(_HASHES[key.curve.name]())
    signature = key.sign(_signed_bytes(payload), algorithm)
    bundle = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {
            "publicKey": {"hint": _hint(key.public_key())},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    with replacing(out) as target:
        target.write_text(json.dumps(bundle) + "\n")
    return digest


def signed_sha256(signature: Path, key: ec.EllipticCurvePublicKey) -> str:
    """The SHA-256 of the one file that ``signature`` vouches for, lower-case hex.

    Args:
        signature: the path of a bundle, written here or by ``model_signing sign key``.
        key: the one that it has to be made with.

    Raises:
        UserError: there is no such file.
        ModelSignatureError: it is not such a bundle, was made with another key, does not hold, or is of something
            else than one file.
    """
    bundle = _read_bundle(signature)
    try:
        material = bundle["verificationMaterial"]
        hint = material.get("publicKey", {}).get("hint")
        envelope = bundle["dsseEnvelope"]
        (made,) = envelope["signatures"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        value = base64.b64decode(made["sig"], validate=True)
        known = (bundle["mediaType"], envelope["payloadType"]) == (_BUNDLE, _PAYLOAD)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_bundle(signature) from error
    if not known:
        raise _no_bundle(signature)
    if hint and hint != _hint(key):
        raise ModelSignatureError(f"{signature} was made with another key than the one given")
    try:
        key.verify(value, _signed_bytes(payload), ec.ECDSA(_HASHES[key.curve.name]()))
    except InvalidSignature:
        raise ModelSignatureError(
            f"{signature} has a signature that does not hold: it was made with another key, or changed afterwards"
        ) from None
    return _digest_of(signature, payload)


def check_model_signature(path: Path, signature: Path, key: ec.EllipticCurvePublicKey) -> str:
    """Check that ``signature`` vouches for the file at ``path``, before anything of it is opened.

    Returns:
        The file's SHA-256, lower-case hex.

    Raises:
        UserError: there is no such signature.
        PackageError: the file at ``path`` cannot be read.
        ModelSignatureError: see `signed_sha256`, or the file is another than the signed one.
    """
    signed = signed_sha256(signature, key)
    check_signed_file(path, signature, signed, file_sha256(path))
    return signed


def check_signed_file(path: Path, signature: Path, signed: str, there: str) -> None:
    """Compare the SHA-256 that was signed with that of the file which is there.

    Raises:
        ModelSignatureError: they differ.
    """
    if there != signed:
        raise ModelSignatureError(
            f"{path} is not the file that {signature} was made for: its SHA-256 is {there}, and {signed} is signed"
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file, lower-case hex.

    Raises:
        PackageError: it cannot be read, or was changed meanwhile.
    """
    digest = hashlib.sha256()
    try:
        before = file_identity(path)
        with path.open("rb") as stream:
            while piece := stream.read(_CHUNK_BYTES):
                digest.update(piece)
        after = file_identity(path)
    except OSError as error:
        raise PackageError(path, f"cannot be read: {error.strerror}") from error
    if after != before:
        raise PackageError(path, "was changed while it was being read; try again")
    return digest.hexdigest()


def _statement(name: str, digest: str) -> dict[str, Any]:
    return {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": _root(digest)}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [],
            },
            "resources": [{"name": _ITSELF, "algorithm": "sha256", "digest": digest}],
        },
    }


def _root(digest: str) -> str:
    """The digest of a model of one file: that of its files' digests, one after the other."""
    return hashlib.sha256(bytes.fromhex(digest)).hexdigest()


def _digest_of(signature: Path, payload: bytes) -> str:
    try:
        statement = read_strictly(payload)
        kinds = (statement["_type"], statement["predicateType"])
        (subject,) = statement["subject"]
        serialization_ = statement["predicate"]["serialization"]
        hashed = (serialization_["method"], serialization_["hash_type"])
        resources = statement["predicate"]["resources"]
        found = {one["name"]: (one["algorithm"], one["digest"]) for one in resources}
        root = subject["digest"]["sha256"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _no_bundle(signature) from error
    if kinds != (_STATEMENT, _PREDICATE):
        raise _no_bundle(signature)
    if hashed != ("files", "sha256") or len(resources) != 1 or found.keys() != {_ITSELF}:
        raise ModelSignatureError(
            f"{signature} vouches for something else than one file by its SHA-256; sign the package's file itself"
        )
    algorithm, digest = found[_ITSELF]
    try:
        consistent = algorithm == "sha256" and _root(digest) == root
    except (TypeError, ValueError):
        consistent = False
    if not consistent:
        raise _no_bundle(signature)
    return cast("str", digest)


def _read_bundle(signature: Path) -> dict[str, Any]:
    try:
        with signature.open("rb") as stream:
            content = stream.read(_MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise UserError(f"signature {signature} cannot be read: {error.strerror}") from error
    try:
        bundle = read_strictly(content) if len(content) <= _MAX_BUNDLE_BYTES else None
    except (ValueError, RecursionError):
        bundle = None
    if not isinstance(bundle, dict):
        raise _no_bundle(signature)
    return bundle


def _signed_bytes(payload: bytes) -> bytes:
    """What the signature is over: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)


def _hint(key: ec.EllipticCurvePublicKey) -> str:
    """How a bundle names a key: SHA-256 of its PEM, lower-case hex."""
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(pem).hexdigest()


def _no_bundle(signature: Path) -> ModelSignatureError:
    return ModelSignatureError(
        f"{signature} is not a signature of OpenSSF Model Signing made with a key; 'tessera sign' or "
        "'model_signing sign key' writes one"
    )


def _no_key(path: str | Path, kind: str, why: str) -> UserError:
    return UserError(
        f"key {path} is not a {kind} key of the curve P-256, P-384 or P-521 in PEM without a password ({why}); "
        "tessera keygen --algorithm ecdsa-p256 writes a pair"
    )
