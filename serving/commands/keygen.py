"""Make a pair of keys for signing packages.

    tessera keygen --out release.pem
    tessera keygen --algorithm ecdsa-p256 --out release-ec.pem

The first is for the signature inside a package, which servers check; the second for one of OpenSSF Model
Signing beside it, which other tools check ('tessera sign --help').  Each writes the private key, readable by its owner
alone, and the public one, as release.pub.pem, which those are given who check. Files that exist are not
replaced. The same with OpenSSL:

    openssl genpkey -algorithm ed25519 -out release.pem
    openssl genpkey -algorithm ec -pkeyopt ec_paramgen_curve:P-256 -out release-ec.pem
    openssl pkey -in release.pem -pubout -out release.pub.pem
"""

from __future__ import annotations

import argparse
from pathlib import Path

_ED25519, _ECDSA = "ed25519", "ecdsa-p256"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--out", metavar="KEY.pem", type=Path, required=True, help="the private key's new file"
    )
    parser.add_argument(
        "--algorithm",
        choices=(_ED25519, _ECDSA),
        default=_ED25519,
        help="ed25519: for signatures inside packages; ecdsa-p256: for those of OpenSSF Model Signing beside them "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Write both files."""
    if args.algorithm == _ECDSA:
        from tessera.serving.package.model_signature import generate_keys  # noqa: PLC0415 - slow to import
    else:
        from tessera.serving.package.signing import generate_keys  # noqa: PLC0415 - likewise

    public = args.out.with_name(f"{args.out.stem}.pub.pem")
    generate_keys(args.out, public)
    print(f"wrote the private key {args.out} (keep it secret) and the public key {public}")
    return 0
