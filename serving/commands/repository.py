"""Look at a server's models and change their versions while it answers.

    tessera repository list --address HOST:PORT [MODEL]
    tessera repository load MODEL [--version N] --address HOST:PORT
    tessera repository unload MODEL [--version N] --address HOST:PORT
    tessera repository label MODEL --label NAME --version N --address HOST:PORT
    tessera repository rollback MODEL [--version N] --address HOST:PORT

list shows every version and its state, and why one does not answer. The others need a server that was
started with --model-control explicit; each returns when what it asked for is done and recorded
beside the versions, so that it outlives the server.

load     loads a version, too; without --version it reads the model's folder again and loads what is wanted
unload   takes a version, or without --version the whole model, out of service
label    loads a version and lets a label such as stable or canary name it
rollback answers with an earlier version under the label stable and unloads the one that answered; the
         earlier one is --version, by default the highest one below

Exit status: 0 done; 1 the server could not do it, and what answered before still does; 2 a flag, the
address, the model or the version has to be changed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from tessera.errors import UserError, refuse_unknown
from tessera.serving.client.errors import (
    DeadlineExceeded,
    ModelNotFound,
    PredictError,
    Unavailable,
)
from tessera.serving.client.repository import LOAD_TIMEOUT_S, ModelVersion, RepositoryClient
from tessera.serving.commands.credential_flags import add_credentials, credentials_of
from tessera.serving.commands.flags import positive
from tessera.serving.inspect.summary import table_of

EXIT_NOT_DONE = 1

_USERS_CODES = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNIMPLEMENTED", "UNAUTHENTICATED")
_LONGEST_TIMEOUT_S = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "action", metavar="ACTION", type=_action, help=f"what to do: {', '.join(_ACTIONS)}"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="the model's name; list shows that model alone (default there: all)",
    )
    parser.add_argument(
        "--address", required=True, metavar="HOST:PORT", help="the server's gRPC address"
    )
    parser.add_argument(
        "--version",
        type=positive,
        metavar="N",
        help="the version, for load, unload, label and rollback (default: see above)",
    )
    parser.add_argument(
        "--label", metavar="NAME", help="for label: the name that the version gets (no default)"
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=LOAD_TIMEOUT_S,
        metavar="S",
        help="time limit of the call, in seconds; a load takes as long as reading the package "
        "(default %(default)g)",
    )
    add_credentials(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the versions as JSON, for programs"
    )


def run(args: argparse.Namespace) -> int:
    """Do it, and print the versions as they then are; returns the exit status."""
    act = _ACTIONS[args.action]
    _check(args)
    with RepositoryClient(
        args.address, timeout_s=args.timeout_s, credentials=credentials_of(args)
    ) as repository:
        try:
            act(repository, args)
            rows = repository.index()
        except PredictError as error:
            return refused_call(error, args, repository, "repository")
    if args.model is not None:
        if args.action == "list":
            refuse_unknown("MODEL", args.model, sorted({row.name for row in rows}))
        rows = [row for row in rows if row.name == args.model]
    _show(rows, as_json=args.json)
    return 0


def _list(repository: RepositoryClient, args: argparse.Namespace) -> None:
    """Nothing to do before the versions are shown."""


def _load(repository: RepositoryClient, args: argparse.Namespace) -> None:
    repository.load(args.model, version=args.version)


def _unload(repository: RepositoryClient, args: argparse.Namespace) -> None:
    repository.unload(args.model, version=args.version)


def _label(repository: RepositoryClient, args: argparse.Namespace) -> None:
    repository.load(args.model, version=args.version, label=args.label)


def _rollback(repository: RepositoryClient, args: argparse.Namespace) -> None:
    repository.rollback(args.model, to=args.version)


_ACTIONS: dict[str, Callable[[RepositoryClient, argparse.Namespace], None]] = {
    "list": _list,
    "load": _load,
    "unload": _unload,
    "label": _label,
    "rollback": _rollback,
}


def _action(text: str) -> str:
    try:
        refuse_unknown("ACTION", text, _ACTIONS)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def seconds(text: str) -> float:
    """A time limit, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= _LONGEST_TIMEOUT_S:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give seconds, above 0 and at most {_LONGEST_TIMEOUT_S}"
        )
    return value


def _check(args: argparse.Namespace) -> None:
    action = args.action
    if action != "list" and args.model is None:
        raise UserError(f"{action} needs a MODEL; 'tessera repository list' shows which there are")
    if action == "list" and args.version is not None:
        raise UserError("list shows every version; leave --version out")
    if action != "label" and args.label is not None:
        raise UserError(f"--label is for label; {action} does not take it")
    if action == "label" and (args.label is None or args.version is None):
        raise UserError("label needs --label NAME and --version N, the version that it is to name")


def _show(rows: Sequence[ModelVersion], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif not rows:
        print("the server has no model")
    else:
        cells = [(row.name, row.version, _state(row)) for row in rows]
        labels = ["labels", *map(_labels, rows)]
        width = max(map(len, labels))
        reasons = ["reason", *(row.reason for row in rows)]
        lines = table_of(("model", "version", "state"), cells)
        for line, label, reason in zip(lines, labels, reasons, strict=True):
            print(f"{line}  {label:<{width}}  {reason}".rstrip())


def _state(row: ModelVersion) -> str:
    return f"{row.state} {row.load_progress:.0%}" if row.load_progress else row.state


def _labels(row: ModelVersion) -> str:
    """What names a version, and its share of the calls: ``stable, canary 5% (shadow)``."""
    words = [", ".join(row.labels)]
    if row.traffic_percent:
        words.append(f"{row.traffic_percent:g}%")
    if row.shadow:
        words.append("(shadow)")
    return " ".join(filter(None, words))


def refused_call(
    error: PredictError, args: argparse.Namespace, repository: RepositoryClient, command: str
) -> int:
    """The exit status where the server failed.

    Raises:
        UserError: the user has something to change.
    """
    if isinstance(error, Unavailable):
        raise UserError(
            f"no answer from a server at {error.address} ({error.message}); is the address right and "
            "the server running and ready?"
        ) from error
    if isinstance(error, ModelNotFound):
        with contextlib.suppress(PredictError):
            refuse_unknown("MODEL", args.model, sorted({row.name for row in repository.index()}))
        raise UserError(error.message) from error
    if error.code.name in _USERS_CODES:
        raise UserError(str(error)) from error
    if isinstance(error, DeadlineExceeded):
        print(
            f"tessera {command}: no answer within --timeout-s {args.timeout_s:g}; the server may go on: "
            "see tessera repository list",
            file=sys.stderr,
        )
    else:
        print(f"tessera {command}: {error}", file=sys.stderr)
    return EXIT_NOT_DONE
