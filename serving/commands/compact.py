"""Make a full new version of a version and its log of commits.

The package is, byte for byte, the one that 'package-model' makes of the checkpoint of the last commit: of the
last one that was made of a checkpoint, as every commit of 'tessera publish' is. It appears as a whole as
DIR/NAME/N/model.pt. The old version and its log stay where they are, unless --prune is given.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.commands.flags import positive
from tessera.serving.commands.publish import add_version
from tessera.serving.inspect.summary import human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_version(parser)
    parser.add_argument(
        "--version",
        type=positive,
        metavar="N",
        help="the new version's number (default: the highest that there is + 1)",
    )
    parser.add_argument(
        "--to",
        type=positive,
        metavar="COMMIT",
        help="the number of the commit to end with, which was made of a checkpoint (default: the last one "
        "that was)",
    )
    parser.add_argument(
        "--sign",
        dest="sign_key",
        metavar="KEY.pem",
        type=Path,
        help="sign the package with this private Ed25519 key (default: not signed)",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="delete the old version and its log afterwards; refused where serving.yaml or a label names it, "
        "or commits came after the last one that the new version has",
    )


def run(args: argparse.Namespace) -> int:
    """Compact and say what was made."""
    from tessera.serving.commits.writer import publishing_lock  # noqa: PLC0415 - loads torch
    from tessera.serving.package.signing import read_private_key  # noqa: PLC0415 - likewise
    from tessera.serving.packaging.commits.compact import Compaction  # noqa: PLC0415 - likewise
    from tessera.serving.packaging.commits.publish import version_folder  # noqa: PLC0415 - likewise
    from tessera.serving.packaging.write.publish import publishing  # noqa: PLC0415 - likewise

    folder = version_folder(args.repository, args.model, args.base)
    key = None if args.sign_key is None else read_private_key(args.sign_key)
    compaction = Compaction(folder, args.to)
    described = compaction.described
    if args.prune:
        _check_prunable(folder, described.behind)
    with publishing(args.repository, args.model, args.version) as new:
        compaction.write(new.draft, new.number, key)
    size = human_bytes(new.path.stat().st_size)
    print(f"wrote {new.path} ({size}): the state {folder.name}.{described.number}")
    if described.broken is not None:
        print(f"the log cannot be followed further: {described.broken.words}")
    elif described.behind:
        print(
            f"{described.behind} later commits were not made of a checkpoint and are not in it; they stay in the log"
        )
    if args.prune:
        with publishing_lock(folder):  # nobody publishes to it
            gone = folder.with_name(f".{folder.name}.gone")
            folder.rename(gone)
        shutil.rmtree(gone)
        print(f"deleted {folder}")
    return 0


def _check_prunable(folder: Path, behind: int) -> None:
    """Whether anybody still needs the version once a higher one is there.

    Raises:
        UserError: somebody does.
    """
    from tessera.serving.repository.control import read_control  # noqa: PLC0415 - only for --prune
    from tessera.serving.repository.settings import read_settings  # noqa: PLC0415 - likewise

    model, version = folder.parent, int(folder.name)
    settings, control = read_settings(model), read_control(model)
    labels = {**settings.labels, **control.labels}
    shadow = settings.shadow is not None and settings.shadow.version == version
    listed = settings.versions.choose(frozenset({version, version + 1}))
    if version in labels.values() or version in control.add or shadow or version in listed:
        raise UserError(
            f"--prune: serving.yaml or control.json of {model} still wants version {version}; change that "
            "first, or leave --prune out"
        )
    if behind:
        raise UserError(
            f"--prune: {behind} commits came after the last one that was made of a checkpoint; publish a "
            "checkpoint first, or leave --prune out"
        )
