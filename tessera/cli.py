"""The ``tessera`` program: one sub-command per step on the way of the data.

A sub-command is a module with two functions:

* ``add_arguments(parser)`` declares its flags (every one with help, unit and default);
* ``run(args) -> int`` does the work and returns the exit status.

The module is imported only when its command is asked for, and may import torch only
inside ``run``, so that ``tessera --help`` answers at once.

Exit status: 0 done; 2 the user has something to change (one line on stderr says what);
130 interrupted; anything else is a bug and comes with a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import tessera
from tessera.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Command:
    """Where a sub-command lives and the line that ``tessera --help`` shows for it."""

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "datagen": Command(
        module="tessera.training.commands.datagen",
        help="write synthetic data in Criteo's format with a known best AUC",
    ),
    "train": Command(
        module="tessera.training.commands.train",
        help="train a model from a YAML config into a run folder",
    ),
    "package-model": Command(
        module="tessera.serving.commands.package_model",
        help="quantize, trace and script a trained model into one servable file",
    ),
    "inspect": Command(
        module="tessera.serving.commands.inspect",
        help="show a package's schema, tables, sizes, plan and metrics, or its graph",
    ),
    "verify": Command(
        module="tessera.serving.commands.verify",
        help="check a package's hashes and replay its golden answers",
    ),
    "diff": Command(
        module="tessera.serving.commands.diff",
        help="compare two packages: schema, tables, sizes and answers",
    ),
    "keygen": Command(
        module="tessera.serving.commands.keygen",
        help="make a pair of keys for signing packages",
    ),
    "sign": Command(
        module="tessera.serving.commands.sign",
        help="sign a package, for servers that require it",
    ),
    "serve": Command(
        module="tessera.serving.commands.serve",
        help="answer Predict calls over gRPC for one or more packages",
    ),
    "predict": Command(
        module="tessera.serving.commands.predict",
        help="send requests to a server and print the answers",
    ),
}


def _load(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name].module)


def _top_parser() -> argparse.ArgumentParser:
    width = max(len(name) for name in COMMANDS)
    listing = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tessera",
        description="Recommendation models from training to answers over the network.",
        epilog=f"commands:\n{listing}\n\n'tessera COMMAND --help' shows a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tessera {tessera.__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="what to do")
    return parser


def run_command(name: str, arguments: Sequence[str], *, prog: str | None = None) -> int:
    """Run sub-command ``name`` with ``arguments`` (without the program's name).

    Returns the exit status.  ``SystemExit`` of argparse (``--help``, a wrong flag) passes
    through; a wrong flag exits with 2.
    """
    module = _load(name)
    prog = prog or f"tessera {name}"
    parser = argparse.ArgumentParser(
        prog=prog,
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    # Intermixed: positional words may stand before, between and after the flags.
    args = parser.parse_intermixed_args(arguments)
    try:
        return int(module.run(args))
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        print(f"{prog}: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``tessera`` and ``python -m tessera``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed = _top_parser().parse_args(arguments[:1])
    return run_command(parsed.command, arguments[1:])


def package_model_main() -> int:
    """Entry point of the bare ``package-model`` program."""
    return run_command("package-model", sys.argv[1:], prog="package-model")
