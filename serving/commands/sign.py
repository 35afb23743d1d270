"""Sign a package, so that servers started with --require-signature take it.

    tessera sign MODEL.pt --key KEY.pem

Every record is compared with the manifest first. The file is replaced whole or not at all; a
signature that it has is replaced. The same package and key always give the same file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.serving.commands.flags import add_package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_package(parser)
    parser.add_argument(
        "--key",
        metavar="KEY.pem",
        type=Path,
        required=True,
        help="private Ed25519 key in PEM, as 'tessera keygen' or 'openssl genpkey' writes it",
    )
    parser.add_argument(
        "--out",
        metavar="MODEL.pt",
        type=Path,
        help="the file to write or replace (default: the package itself)",
    )


def run(args: argparse.Namespace) -> int:
    """Sign and say with which key."""
    from tessera.serving.package.signing import read_private_key, sign_package  # noqa: PLC0415 - slow

    out = args.model if args.out is None else args.out
    signed = sign_package(args.model, read_private_key(args.key), out)
    assert signed.signature is not None
    print(f"signed {out} with the key {signed.signature.public_key}")
    return 0
