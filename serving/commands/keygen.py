"""Make a pair of Ed25519 keys for signing packages.

    tessera keygen --out release.pem

writes the private key release.pem, readable by its owner alone, and the public one
release.pub.pem, which servers are given. Files that exist are not replaced. The same with OpenSSL:

    openssl genpkey -algorithm ed25519 -out release.pem
    openssl pkey -in release.pem -pubout -out release.pub.pem
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--out", metavar="KEY.pem", type=Path, required=True, help="the private key's new file"
    )


def run(args: argparse.Namespace) -> int:
    """Write both files."""
    from tessera.serving.package.signing import generate_keys  # noqa: PLC0415 - slow to import

    public = args.out.with_name(f"{args.out.stem}.pub.pem")
    generate_keys(args.out, public)
    print(f"wrote the private key {args.out} (keep it secret) and the public key {public}")
    return 0
