"""OpenSSF Model Signing: ours against the tool of that project, and what is told of a signature that does not hold."""

import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tessera.cli import main
from tests.package_factory import make_package


def stock_tool():
    """The command of PyPI's model-signing, which has an environment of its own: it brings some 30 distributions."""
    named = os.environ.get("TESSERA_MODEL_SIGNING") or shutil.which("model_signing")
    if named:
        return [named]
    if importlib.util.find_spec("model_signing"):
        return [sys.executable, "-m", "model_signing"]
    return None


needs_stock_tool = pytest.mark.skipif(
    stock_tool() is None,
    reason="needs PyPI's model-signing, in an environment of its own; TESSERA_MODEL_SIGNING names its command",
)


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A package, its signature, and the private and public keys, in one folder."""
    folder = tmp_path_factory.mktemp("signed")
    package, _ = make_package(folder, name="ranker")
    package = package.rename(folder / "model.pt")
    for name in ("ec.pem", "other.pem"):
        assert main(["keygen", "--algorithm", "ecdsa-p256", "--out", str(folder / name)]) == 0
    assert main(["sign", str(package), "--model-signing-key", str(folder / "ec.pem")]) == 0
    return folder


@pytest.fixture
def copy(signed, tmp_path):
    """The same files, to be changed."""
    for path in signed.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return tmp_path


def verify(folder, *more, key="ec.pub.pem"):
    return main(
        ["verify", str(folder / "model.pt"), "--model-signing-key", str(folder / key), *more]
    )


def stock(*arguments):
    done = subprocess.run(
        [*stock_tool(), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def stock_verify(folder):
    asked = ["--signature", folder / "model.pt.sig", "--public_key", folder / "ec.pub.pem"]
    return stock("verify", "key", folder / "model.pt", *asked)


def payload_of(path):
    return json.loads(base64.b64decode(json.loads(path.read_bytes())["dsseEnvelope"]["payload"]))


def test_a_signature_is_verified(signed, capsys):
    assert verify(signed) == 0
    said = capsys.readouterr().out
    assert f"{signed / 'model.pt.sig'} vouches for the file with the key" in said
    assert said.endswith("verified\n")


@needs_stock_tool
def test_the_stock_tool_verifies_ours(copy):
    status, said = stock_verify(copy)
    assert (status, "Verification succeeded" in said) == (0, True), said
    with (copy / "model.pt").open("r+b") as stream:
        stream.seek(1_000)
        byte = stream.read(1)
        stream.seek(1_000)
        stream.write(bytes([byte[0] ^ 1]))
    status, said = stock_verify(copy)
    assert status != 0
    assert "Hash mismatch" in said


@needs_stock_tool
@pytest.mark.parametrize(
    "curve",
    [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()],
    ids=lambda curve: curve.name,
)
def test_ours_verifies_the_stock_tools(copy, curve, capsys):
    key = ec.generate_private_key(curve)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (copy / "ec.pem").write_bytes(secret)
    public = key.public_key()
    shown = public.public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (copy / "ec.pub.pem").write_bytes(shown)
    (copy / "model.pt.sig").unlink()
    asked = ["--signature", copy / "model.pt.sig", "--private_key", copy / "ec.pem"]
    status, said = stock("sign", "key", copy / "model.pt", *asked)
    assert status == 0, said
    assert verify(copy) == 0
    assert verify(copy, key="other.pub.pem") == 1
    assert "another key" in capsys.readouterr().err


def test_both_signatures_in_one_command(copy, capsys):
    assert main(["keygen", "--out", str(copy / "ed.pem")]) == 0
    keys = ["--key", str(copy / "ed.pem"), "--model-signing-key", str(copy / "ec.pem")]
    assert main(["sign", str(copy / "model.pt"), *keys]) == 0
    assert verify(copy, "--public-key", str(copy / "ed.pub.pem")) == 0
    # What is signed inside afterwards is another file.
    capsys.readouterr()
    assert main(["keygen", "--out", str(copy / "later.pem")]) == 0
    assert main(["sign", str(copy / "model.pt"), "--key", str(copy / "later.pem")]) == 0
    assert verify(copy) == 1
    assert "is not the file that" in capsys.readouterr().err


def resign(folder, edit):
    """Sign a changed statement with the right key: what the key's owner would have to have done."""
    path = folder / "model.pt.sig"
    bundle, payload = json.loads(path.read_bytes()), payload_of(path)
    edit(payload)
    content = json.dumps(payload).encode()
    key = serialization.load_pem_private_key((folder / "ec.pem").read_bytes(), None)
    kind = b"application/vnd.in-toto+json"
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(content), content)
    value = key.sign(message, ec.ECDSA(hashes.SHA256()))
    envelope = bundle["dsseEnvelope"]
    envelope["payload"] = base64.b64encode(content).decode()
    envelope["signatures"][0]["sig"] = base64.b64encode(value).decode()
    path.write_text(json.dumps(bundle))


def change_a_byte(folder):
    with (folder / "model.pt").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")


def change_the_payload(folder):
    path = folder / "model.pt.sig"
    bundle, payload = json.loads(path.read_bytes()), payload_of(path)
    payload["subject"][0]["name"] = "another"
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    path.write_text(json.dumps(bundle))


def without_hint(folder):
    path = folder / "model.pt.sig"
    bundle = json.loads(path.read_bytes())
    bundle["verificationMaterial"] = {"publicKey": {}}
    path.write_text(json.dumps(bundle))
    shutil.copy(folder / "other.pub.pem", folder / "ec.pub.pem")


def set_predicate(name, value):
    return lambda folder: resign(folder, lambda payload: payload["predicate"].update({name: value}))


def two_files(folder):
    other = {"name": "b", "algorithm": "sha256", "digest": "00" * 32}
    resign(folder, lambda payload: payload["predicate"]["resources"].append(other))


TROUBLE = {
    "a changed byte": (change_a_byte, "is not the file that"),
    "another key": (
        lambda folder: shutil.copy(folder / "other.pub.pem", folder / "ec.pub.pem"),
        "was made with another key than the one given",
    ),
    "another key, without a hint": (without_hint, "has a signature that does not hold"),
    "a changed statement": (change_the_payload, "has a signature that does not hold"),
    "not JSON": (
        lambda folder: (folder / "model.pt.sig").write_bytes(b"\x00"),
        "is not a signature of OpenSSF Model Signing",
    ),
    "another JSON": (
        lambda folder: (folder / "model.pt.sig").write_text('{"dsseEnvelope": []}'),
        "is not a signature of OpenSSF Model Signing",
    ),
    "of two files": (two_files, "vouches for something else than one file"),
    "by another hash": (
        set_predicate("serialization", {"method": "files", "hash_type": "blake3"}),
        "vouches for something else than one file",
    ),
    "no list": (set_predicate("resources", 3), "is not a signature of OpenSSF Model Signing"),
    "inconsistent": (
        set_predicate("resources", [{"name": ".", "algorithm": "sha256", "digest": "00" * 32}]),
        "is not a signature of OpenSSF Model Signing",
    ),
    "another statement": (
        lambda folder: resign(folder, lambda payload: payload.update(predicateType="x")),
        "is not a signature of OpenSSF Model Signing",
    ),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_what_does_not_hold_is_told_in_one_line(copy, capsys, case):
    change, expected = TROUBLE[case]
    change(copy)
    assert verify(copy) == 1
    said = capsys.readouterr().err
    assert said.startswith("failed: ")
    assert expected in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["verify", "--model-signing-key", "nowhere.pem"], "key {}/nowhere.pem cannot be read"),
        (["verify", "--model-signing-key", "ec.pem"], "is not a public key of the curve P-256"),
        (["verify", "--model-signature", "model.pt.sig"], "add --model-signing-key FILE"),
        (["sign", "--model-signing-key", "ec.pub.pem"], "is not a private key of the curve P-256"),
        (["sign", "--model-signature", "a.sig"], "there is no key to sign with"),
        (["sign"], "there is no key to sign with"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_a_user_got_wrong(copy, capsys, monkeypatch, command, expected):
    monkeypatch.chdir(copy)
    name, *flags = command
    assert main([name, "model.pt", *flags]) == 2
    said = capsys.readouterr().err
    assert expected.replace("{}/", "") in said
    assert said.count("\n") == 1


def test_a_damaged_package_is_not_signed(copy, capsys):
    (copy / "model.pt.sig").unlink()
    change_a_byte(copy)
    assert main(["sign", str(copy / "model.pt"), "--model-signing-key", str(copy / "ec.pem")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (copy / "model.pt.sig").exists()


def test_a_signature_that_is_missing(copy, capsys):
    (copy / "model.pt.sig").unlink()
    assert verify(copy) == 2
    assert "model.pt.sig cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_key_of_another_curve_is_refused(copy, capsys):
    key = ec.generate_private_key(ec.SECP256K1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (copy / "ec.pem").write_bytes(pem)
    assert main(["sign", str(copy / "model.pt"), "--model-signing-key", str(copy / "ec.pem")]) == 2
    assert "it is of another algorithm or curve" in capsys.readouterr().err


def test_the_private_key_is_its_owners(signed):
    assert (signed / "ec.pem").stat().st_mode & 0o777 == 0o600
    assert Path(signed / "ec.pub.pem").read_text().startswith("-----BEGIN PUBLIC KEY-----")
