"""Check a package: every byte, its signatures if asked, the operators it needs, its golden answers.

A package for GPUs gives its golden answers on the CPU where there is no GPU.

What "verified" proves: the file is as its writer left it, down to the last byte; with --public-key or
--model-signing-key, that the owner of that key vouches for it; its graph calls nothing but operators that compute (those of
--allow-op aside), so that loading it neither reads nor writes files; and on this machine it gives
the answers that were recorded when it was packaged.  What it does not prove: who wrote a package
without a signature (whoever changes it can write its hashes anew), that its answers are good ones,
that it answers in time, or that it stays within some memory.

Exit status: 0 all of it holds; 1 it does not (the line says what); 2 there is no such file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.commands.flags import add_package
from tessera.serving.commands.loading_flags import add_allow_op, add_load_timeout
from tessera.serving.package.manifest import GoldenInfo
from tessera.serving.package.records import PackageError
from tessera.serving.package.signed_record import Signature


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_package(parser)
    parser.add_argument(
        "--public-key",
        metavar="FILE",
        type=Path,
        action="append",
        help="refuse a package that is not signed with this key (PEM, as 'tessera keygen' writes "
        "it); may be given several times, one of the keys is enough (default: signatures are not "
        "checked)",
    )
    parser.add_argument(
        "--model-signing-key",
        metavar="FILE",
        type=Path,
        help="refuse a package without a signature of OpenSSF Model Signing, beside it, that was made with this key "
        "(the public one in PEM, as 'tessera keygen --algorithm ecdsa-p256' writes it; default: such signatures are not "
        "looked for)",
    )
    parser.add_argument(
        "--model-signature",
        metavar="FILE",
        type=Path,
        help="with --model-signing-key, that signature's file (default: the package's name and .sig)",
    )
    add_allow_op(parser)
    add_load_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Check and say what was checked."""
    from tessera.serving.package import model_signature as beside  # noqa: PLC0415 - slow to import
    from tessera.serving.package.loading import cpu_instead, load_package  # noqa: PLC0415 - loads torch
    from tessera.serving.package.time_limit import TimeLimit  # noqa: PLC0415 - likewise

    if not args.model.is_file():
        raise UserError(f"{args.model} is not a file; give the MODEL.pt that package-model wrote")
    keys = None
    if args.public_key is not None:
        from tessera.serving.package.signing import read_public_key  # noqa: PLC0415 - slow to import

        keys = [read_public_key(path) for path in args.public_key]
    if args.model_signing_key is None and args.model_signature is not None:
        raise UserError(
            f"--model-signature is '{args.model_signature}'; nothing is checked against it; add --model-signing-key FILE"
        )
    signature = args.model_signature or args.model.with_name(args.model.name + beside.SUFFIX)
    signed = None
    try:
        if args.model_signing_key is not None:
            # Before anything of the package is opened.
            key = beside.read_public_key(args.model_signing_key)
            signed = beside.check_model_signature(args.model, signature, key)
        devices = cpu_instead(args.model)
        package = load_package(
            args.model,
            devices=devices,
            trusted_keys=keys,
            allow_ops=args.allow_ops,
            time_limit=TimeLimit(seconds=args.load_timeout_s, prefix="failed: ", status=1),
        )
        package.records.check_undivided()
        sha256 = package.sha256
        if signed is not None:
            beside.check_signed_file(args.model, signature, signed, sha256)
    except (PackageError, beside.ModelSignatureError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    manifest = package.manifest
    print(f"{args.model}: {manifest.name}, version {manifest.version}")
    print(f"  sha256 {sha256}")
    print(f"  {len(manifest.records)} records have the manifest's SHA-256, and there is no other")
    print(f"  {_signature(manifest.signature, checked=keys is not None)}")
    if signed is not None:
        print(f"  {signature} vouches for the file with the key {args.model_signing_key}")
    print(f"  operators loaded: {', '.join(manifest.operator_libraries)}")
    print(
        f"  {manifest.golden.samples} golden samples answered, each {_bound(manifest.golden)} the "
        f"recorded score{'' if devices is None else ', on the CPU, as there is no GPU here'}"
    )
    print("verified")
    return 0


def _bound(golden: GoldenInfo) -> str:
    relative = f" + {golden.rtol:g} x" if golden.rtol else " of"
    return f"within {golden.atol:g}{relative}"


def _signature(signature: Signature | None, *, checked: bool) -> str:
    if signature is None:
        return "not signed"
    if checked:
        return f"signed with the key {signature.public_key}, and the signature holds"
    return f"says it is signed with the key {signature.public_key}; --public-key FILE checks that"
