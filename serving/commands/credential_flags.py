"""The flags of commands that call a server: certificates and a token."""

from __future__ import annotations

import argparse

from tessera.serving.client.credentials import Credentials


def add_credentials(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the flags that `Credentials` has a field for each of."""
    for name, text in (
        (
            "ca",
            "the authorities that the server's certificate is held against, in PEM (default: no TLS)",
        ),
        (
            "cert",
            "this client's certificate, in PEM, where the server asks for one (default: none)",
        ),
        ("key", "the private key of --tls-cert, in PEM (default: none)"),
    ):
        parser.add_argument(f"--tls-{name}", metavar="FILE", help=text)
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file whose first word is the token that each call shows (default: none)",
    )


def credentials_of(args: argparse.Namespace) -> Credentials:
    """What the flags of `add_credentials` were given.

    Raises:
        UserError: they cannot go together.
    """
    return Credentials(
        tls_ca=args.tls_ca,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        token_file=args.token_file,
    )
