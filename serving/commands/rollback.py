"""Go back to an earlier commit of a version, and keep every server from taking the later ones again.

    tessera rollback --model MODEL --to V.N --address HOST:PORT
    tessera rollback --model MODEL --to V.N --repository DIR

With --address the server does it, and the command returns when it answers with this state: it must have been
started with --follow and --model-control explicit. With --repository the later commits are fenced off in the
version's folder alone: each server that follows it goes back at its next look. V.0 is the package itself. A
publisher goes on from the state that is left, with the next number.

Exit status: 0 done; 1 the server could not do it, and what answered before still does; 2 a flag, the
address, the model or the state has to be changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.client.errors import PredictError
from tessera.serving.client.repository import LOAD_TIMEOUT_S, RepositoryClient
from tessera.serving.commands.credential_flags import add_credentials, credentials_of
from tessera.serving.commands.repository import refused_call, seconds
from tessera.serving.commits.chain import LOG_FOLDER
from tessera.serving.commits.fence import fence_off_after, read_fence
from tessera.serving.repository.names import is_model_name, parse_state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="the model's name")
    parser.add_argument(
        "--to",
        required=True,
        type=_state,
        metavar="V.N",
        help="the version and the last of its commits that stays, such as 3.40",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--address", metavar="HOST:PORT", help="the gRPC address of the server that is to do it"
    )
    where.add_argument(
        "--repository", type=Path, metavar="DIR", help="the folder of models; no server is asked"
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=LOAD_TIMEOUT_S,
        metavar="S",
        help="with --address, time limit of the call, in seconds; going back further than the server's "
        "--rollback-bytes reach takes as long as loading the version (default %(default)g)",
    )
    add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    version, commit = args.to
    if args.repository is not None:
        _fence_off(args.repository, args.model, version, commit)
        return 0
    with RepositoryClient(
        args.address, timeout_s=args.timeout_s, credentials=credentials_of(args)
    ) as repository:
        try:
            repository.rollback(args.model, to=f"{version}.{commit}")
        except PredictError as error:
            return refused_call(error, args, repository, "rollback")
    print(f"{args.model} answers with {version}.{commit}")
    return 0


def _fence_off(repository: Path, model: str, version: int, commit: int) -> None:
    folder = repository / model / str(version)
    if not is_model_name(model) or not folder.is_dir():
        raise UserError(f"{repository} has no version {version} of a model {model!r}")
    log = folder / LOG_FOLDER
    before = len(read_fence(log).commits)
    fenced = len(fence_off_after(log, commit).commits) - before
    print(
        f"{log}: {fenced} commits fenced off; servers that follow it go back to {version}.{commit}"
    )


def _state(text: str) -> tuple[int, int]:
    state = parse_state(text)
    if state is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give a version and a commit, such as 3.40")
    return state
