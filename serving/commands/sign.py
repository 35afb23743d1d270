"""Sign a package, in the file, beside it, or both.

    tessera sign MODEL.pt --key KEY.pem
    tessera sign MODEL.pt --model-signing-key EC.pem

Every record is compared with the manifest first. --key puts an Ed25519 signature into the package, so that servers
started with --require-signature take it. The file is replaced whole or not at all; a signature that it
has is replaced. The same package and key always give the same file.

--model-signing-key writes MODEL.pt.sig, a signature of OpenSSF Model Signing over the whole file as it is then,
for 'tessera verify' and for the tool of that project, which knows nothing of packages:

    model_signing verify key MODEL.pt --signature MODEL.pt.sig --public_key EC.pub.pem
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.commands.flags import add_package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_package(parser)
    parser.add_argument(
        "--key",
        metavar="KEY.pem",
        type=Path,
        help="private Ed25519 key in PEM, as 'tessera keygen' or 'openssl genpkey' writes it (default: the package "
        "itself is not signed)",
    )
    parser.add_argument(
        "--out",
        metavar="MODEL.pt",
        type=Path,
        help="with --key, the file to write or replace (default: the package itself)",
    )
    parser.add_argument(
        "--model-signing-key",
        metavar="EC.pem",
        type=Path,
        help="private key of the curve P-256, P-384 or P-521 in PEM, as 'tessera keygen --algorithm ecdsa-p256' writes "
        "it, that signs the file as OpenSSF Model Signing has it (default: no such signature is written)",
    )
    parser.add_argument(
        "--model-signature",
        metavar="FILE",
        type=Path,
        help="with --model-signing-key, the signature's file (default: the package's name and .sig)",
    )


def run(args: argparse.Namespace) -> int:
    """Sign and say with which key."""
    if args.key is None and args.model_signing_key is None:
        raise UserError(
            "there is no key to sign with; give --key KEY.pem, --model-signing-key EC.pem, or both"
        )
    if args.key is None and args.out is not None:
        raise UserError(
            f"--out is '{args.out}'; a package is written only with --key; leave it out"
        )
    if args.model_signing_key is None and args.model_signature is not None:
        raise UserError(
            f"--model-signature is '{args.model_signature}'; it is written with --model-signing-key EC.pem"
        )
    from tessera.serving.package import model_signature, signing  # noqa: PLC0415 - slow to import

    # Read first: a wrong key leaves everything as it is.
    key = None if args.key is None else signing.read_private_key(args.key)
    beside = args.model_signing_key
    beside_key = None if beside is None else model_signature.read_private_key(beside)
    out = args.model if args.out is None else args.out
    if key is not None:
        signed = signing.sign_package(args.model, key, out)
        assert signed.signature is not None
        print(f"signed {out} with the key {signed.signature.public_key}")
    if beside_key is not None:
        file = args.model_signature or out.with_name(out.name + model_signature.SUFFIX)
        sha256 = model_signature.sign_model(out, beside_key, file)
        print(f"wrote {file}, which vouches for {out} with the SHA-256 {sha256}")
    return 0
