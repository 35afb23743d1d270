"""The flags of 'tessera train' that publish the model while it is trained."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from tessera.errors import UserError

_EVERY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|steps)")
_DEFAULT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--publish",
        metavar="DIR/MODEL",
        type=Path,
        help="write what is trained as commits into the log of the model's highest version in this repository, "
        "for servers with --follow; one more with each checkpoint (default: nothing is published)",
    )
    parser.add_argument(
        "--publish-every",
        metavar="30s|1000steps",
        type=_every,
        help="how often, in seconds or steps (default 30s)",
    )
    parser.add_argument(
        "--publish-sign",
        metavar="KEY.pem",
        type=Path,
        help="sign the commits with this private Ed25519 key (default: not signed)",
    )


def _every(text: str) -> tuple[float | None, int | None]:
    found = _EVERY.fullmatch(text)
    number = 0.0 if found is None else float(found[1])
    if found is None or number <= 0 or (found[2] == "steps" and number != int(number)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time or a count; give 30s or 1000steps"
        )
    return (number, None) if found[2] == "s" else (None, int(number))


def prepare(args: argparse.Namespace) -> None:
    """Put what the flags mean into ``args.publish_options``, as `tessera.training.trainer.run.train` takes it."""
    args.publish_options = None
    if args.publish is None:
        for flag in ("publish_every", "publish_sign"):
            if getattr(args, flag) is not None:
                name = flag.replace("_", "-")
                raise UserError(f"--{name} is for --publish DIR/MODEL; give both, or neither")
        return
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # as 'tessera train', before torch is loaded
    from tessera.serving.package.signing import read_private_key  # noqa: PLC0415 - loads torch
    from tessera.serving.packaging.commits.live import live_options  # noqa: PLC0415 - likewise

    key = None if args.publish_sign is None else read_private_key(args.publish_sign)
    every_s, every_steps = args.publish_every or (_DEFAULT_S, None)
    args.publish_options = live_options(args.publish, key, every_s=every_s, every_steps=every_steps)
