"""Signatures: who may vouch for a package, and that nobody else can."""

from __future__ import annotations

import dataclasses
import json
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tessera.cli import main
from tessera.errors import UserError
from tessera.serving.commands.serve import parse_model
from tessera.serving.package.loading import load_package, open_checked
from tessera.serving.package.manifest import MANIFEST_RECORD, Manifest
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.signing import (
    SignatureError,
    check_signature,
    generate_keys,
    read_private_key,
    read_public_key,
    sign_manifest,
    sign_package,
)
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.model.loader import PackageLoader
from tests.package_factory import make_model
from tests.packaging.archives import read_records, with_manifest, write_records


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("keys")
    assert main(["keygen", "--out", str(folder / "key.pem")]) == 0
    return folder / "key.pem", folder / "key.pub.pem"


@pytest.fixture(scope="module")
def signed(
    package: Path, keys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("signed") / "m.pt"
    sign_package(package, read_private_key(keys[0]), path)
    return path


def trusted(keys: tuple[Path, Path]) -> list[Ed25519PublicKey]:
    return [read_public_key(keys[1])]


def other_key() -> Ed25519PublicKey:
    return Ed25519PrivateKey.generate().public_key()


def test_a_signed_package_is_loaded_and_answers_its_golden_request(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    loaded = load_package(signed, trusted_keys=[other_key(), *trusted(keys)])
    assert loaded.manifest.signature is not None
    # Who does not ask is not kept from it.
    assert load_package(signed).manifest == loaded.manifest


def test_signing_changes_nothing_but_the_signature(package: Path, signed: Path) -> None:
    before, after = read_records(package), read_records(signed)
    manifests = [Manifest.from_bytes(records.pop(MANIFEST_RECORD)) for records in (before, after)]
    assert before == after
    assert dataclasses.replace(manifests[1], signature=None) == manifests[0]


def test_signing_is_deterministic_and_replaces_an_older_signature(
    package: Path, signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(package, tmp_path / "m.pt"))
    sign_package(path, Ed25519PrivateKey.generate(), path)
    assert path.read_bytes() != signed.read_bytes()
    sign_package(path, read_private_key(keys[0]), path)
    assert path.read_bytes() == signed.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.pt"]


def test_openssl_agrees_on_what_is_signed(
    package: Path, signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl program to compare with")
    signature = Records(signed).manifest().signature
    assert signature is not None
    # The message is the unsigned package's manifest, byte by byte.
    (tmp_path / "message").write_bytes(Records(package).manifest_bytes())
    (tmp_path / "value").write_bytes(bytes.fromhex(signature.value))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(keys[1]), "-rawin"]
    files = ["-in", str(tmp_path / "message"), "-sigfile", str(tmp_path / "value")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unsigned_package_is_refused_where_a_signature_is_asked_for(
    package: Path, keys: tuple[Path, Path]
) -> None:
    with pytest.raises(
        PackageError, match=r"is not signed, and .* tessera sign MODEL.pt --key KEY.pem"
    ):
        load_package(package, trusted_keys=trusted(keys))


def test_another_signers_package_is_refused(signed: Path, keys: tuple[Path, Path]) -> None:
    signature = Records(signed).manifest().signature
    assert signature is not None
    with pytest.raises(
        PackageError, match=f"signed with the key {signature.public_key}, which is none"
    ):
        load_package(signed, trusted_keys=[other_key()])
    with pytest.raises(PackageError, match="which is none"):
        load_package(signed, trusted_keys=[])


def test_a_manifest_changed_after_signing_is_refused(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    # Its own CRC-32 is right again: only the signature can tell.
    path = with_manifest(signed, tmp_path / "m.pt", lambda data: data.update(version="2"))
    assert open_checked(path).manifest.version == "2"
    with pytest.raises(PackageError, match="does not hold: the package was changed after"):
        open_checked(path, trusted(keys))


def test_every_bit_of_a_signature_counts(signed: Path, keys: tuple[Path, Path]) -> None:
    content = Records(signed).manifest_bytes()
    signature = Records(signed).manifest().signature
    assert signature is not None
    assert check_signature(content, trusted(keys)) == signature.public_key
    value = bytes.fromhex(signature.value)
    for bit in range(512):
        other = bytearray(value)
        other[bit // 8] ^= 1 << bit % 8
        changed = content.replace(signature.value.encode(), other.hex().encode())
        with pytest.raises(SignatureError, match="does not hold"):
            check_signature(changed, trusted(keys))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"ed25519", b"none"),
        lambda text: text.replace(b'"public_key": "', b'"public_key": "A'),
        lambda text: text.replace(b'"value"', b'"value" '),
        lambda text: text + b" ",
        lambda text: text.replace(b' "signature": {', b' "signature":  {'),
    ],
)
def test_a_signature_of_another_shape_is_refused_though_nobody_asks(
    change: object, signed: Path, tmp_path: Path
) -> None:
    assert callable(change)
    records = read_records(signed)
    changed = change(records[MANIFEST_RECORD])
    path = write_records(tmp_path / "m.pt", {**records, MANIFEST_RECORD: changed})
    with pytest.raises(PackageError, match="spelled as it must be"):
        load_package(path)


def test_a_damaged_package_is_not_signed(
    package: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    records = read_records(package)
    path = write_records(tmp_path / "m.pt", {**records, "constants.pkl": b"evil"})
    before = path.read_bytes()
    with pytest.raises(PackageError, match=r"'constants.pkl' was changed"):
        sign_package(path, read_private_key(keys[0]), path)
    assert path.read_bytes() == before


def test_the_private_key_is_the_owners_alone_and_never_replaced(
    keys: tuple[Path, Path], tmp_path: Path
) -> None:
    assert stat.S_IMODE(keys[0].stat().st_mode) == 0o600
    generate_keys(tmp_path / "a", tmp_path / "b")
    assert read_private_key(tmp_path / "a").public_key() == read_public_key(tmp_path / "b")
    with pytest.raises(UserError, match="a is there already; give another name"):
        generate_keys(tmp_path / "a", tmp_path / "c")


def test_what_is_no_key_is_named(keys: tuple[Path, Path], tmp_path: Path) -> None:
    secret, public = keys
    with pytest.raises(UserError, match="nothing cannot be read: No such file"):
        read_public_key(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"key\.pem is not a public Ed25519 key"):
        read_public_key(secret)
    with pytest.raises(UserError, match=r"key\.pub\.pem is not a private Ed25519 key"):
        read_private_key(public)
    elliptic = generate_private_key(SECP256R1())
    path = tmp_path / "other.pem"
    path.write_bytes(
        elliptic.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(UserError, match="it is of another algorithm"):
        read_private_key(path)
    path.write_bytes(
        elliptic.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    with pytest.raises(UserError, match="it is of another algorithm"):
        read_public_key(path)


def test_the_commands_sign_and_verify(
    package: Path, keys: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, secret, public = shutil.copy(package, tmp_path / "m.pt"), str(keys[0]), str(keys[1])
    assert main(["verify", str(path), "--public-key", public]) == 1
    assert "is not signed" in capsys.readouterr().err
    assert main(["verify", str(path)]) == 0
    assert "  not signed\n" in capsys.readouterr().out
    assert main(["sign", str(path), "--key", secret]) == 0
    assert f"signed {path} with the key " in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0
    assert "says it is signed" in capsys.readouterr().out
    assert main(["verify", str(path), "--public-key", public]) == 0
    assert "and the signature holds" in capsys.readouterr().out
    assert main(["verify", str(path), "--public-key", secret]) == 2
    assert "is not a public Ed25519 key" in capsys.readouterr().err
    assert main(["sign", str(tmp_path / "none.pt"), "--key", secret]) == 2
    assert "none.pt" in capsys.readouterr().err
    out = tmp_path / "out.pt"
    assert main(["sign", str(package), "--key", secret, "--out", str(out)]) == 0
    assert out.read_bytes() == path.read_bytes()


def test_the_packager_signs_at_once(keys: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    options = PackageOptions(name="model", sign_key=keys[0])
    write_model(make_model(), path, options)
    assert open_checked(path, trusted(keys)).manifest.name == "model"
    with pytest.raises(UserError, match=r"nothing cannot be read"):
        PackageOptions(name="model", sign_key=tmp_path / "nothing")


def test_a_server_asks_for_both_flags_or_none(keys: tuple[Path, Path]) -> None:
    models = (parse_model("m.pt"),)
    with pytest.raises(UserError, match="--require-signature needs to know whom to trust"):
        ServerConfig(models=models, require_signature=True)
    with pytest.raises(UserError, match="nothing is checked against it; add --require-signature"):
        ServerConfig(models=models, public_keys=(str(keys[1]),))


def test_a_server_loads_only_what_a_given_key_has_signed(
    package: Path, signed: Path, keys: tuple[Path, Path]
) -> None:
    loader = PackageLoader(verify_golden=False, public_keys=[str(keys[1])])
    assert loader.load(parse_model(str(signed))).dtype == "int8"
    with pytest.raises(PackageError, match="is not signed"):
        loader.load(parse_model(str(package)))
    with pytest.raises(UserError, match="is not a public Ed25519 key"):
        PackageLoader(verify_golden=False, public_keys=[str(keys[0])])


def test_the_manifest_keeps_its_spelling(signed: Path, keys: tuple[Path, Path]) -> None:
    manifest = Records(signed).manifest()
    unsigned = dataclasses.replace(manifest, signature=None)
    assert sign_manifest(unsigned, read_private_key(keys[0])) == manifest
    assert list(json.loads(manifest.to_bytes()))[-1] == "signature"
    assert unsigned.to_bytes().endswith(b'\n "signature": null\n}\n')
