"""The ``tessera`` program: one sub-command per step on the way of the data.

A sub-command is a module with two functions:

* ``add_arguments(parser)`` declares its flags (every one with help, unit and default);
* ``run(args) -> int`` does the work and returns the exit status.

The module is imported only when its command is asked for, and may import torch only
inside ``run``, so that ``tessera --help`` answers at once.

Exit status: 0 done; 2 the user has something to change (one line on stderr says what);
130 interrupted; 141 nobody read the output to its end; 143 told to end by SIGTERM; 1 where a
command's help says so.  Anything else is a bug and comes with a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import NoReturn

import tessera
from tessera.errors import UserError, nearest

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_UNREAD = 128 + signal.SIGPIPE
EXIT_TERMINATED = 128 + signal.SIGTERM

# What a path or a disk can be wrong in; any other operating-system error is a bug of ours.
_USERS_ERRNOS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST,
    errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.EMFILE, errno.ENFILE,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Command:
    """Where a sub-command lives and the line that ``tessera --help`` shows for it.

    ``more`` are modules of other folders that add flags of their own (``add_arguments``) and put what they
    mean into the arguments (``prepare(args)``) before the command runs.
    """

    module: str
    help: str
    handles_sigterm: bool = False
    more: tuple[str, ...] = ()


COMMANDS: dict[str, Command] = {
    "datagen": Command(
        module="tessera.training.commands.datagen",
        help="write synthetic data in Criteo's format with a known best AUC",
    ),
    "schema": Command(
        module="tessera.training.commands.schema",
        help="look at a table and write a config that trains on it",
    ),
    "train": Command(
        module="tessera.training.commands.train",
        help="train a model from a YAML config into a run folder",
        handles_sigterm=True,
        more=("tessera.serving.commands.publish_while_training",),
    ),
    "tune": Command(
        module="tessera.training.commands.tune",
        help="search for settings: many trainings, the next ones chosen by the last ones",
        handles_sigterm=True,
    ),
    "compare": Command(
        module="tessera.training.commands.compare",
        help="show runs side by side: configs, metrics, size, speed and curves",
    ),
    "convert-checkpoint": Command(
        module="tessera.training.commands.convert_checkpoint",
        help="convert a checkpoint of TorchRec for Tessera, or the other way",
    ),
    "package-model": Command(
        module="tessera.serving.commands.package_model",
        help="quantize, trace and script a trained model into one servable file",
    ),
    "publish": Command(
        module="tessera.serving.commands.publish",
        help="write what a checkpoint changes as the next commit of a served version",
    ),
    "compact": Command(
        module="tessera.serving.commands.compact",
        help="make a full new version of a version and its commits",
    ),
    "inspect": Command(
        module="tessera.serving.commands.inspect",
        help="show a package's schema, tables, sizes, plan and metrics, or its graph",
    ),
    "verify": Command(
        module="tessera.serving.commands.verify",
        help="check a package's hashes and replay its golden answers",
    ),
    "evaluate": Command(
        module="tessera.serving.commands.evaluate",
        help="say how good packages and runs are on rows with labels",
    ),
    "diff": Command(
        module="tessera.serving.commands.diff",
        help="compare two packages: schema, tables, sizes and answers",
    ),
    "export-embeddings": Command(
        module="tessera.serving.commands.export_embeddings",
        help="write vectors of users or items, or a table's rows, to a Parquet file",
    ),
    "search": Command(
        module="tessera.serving.commands.search",
        help="find each user's best items by their vectors, with FAISS",
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
        handles_sigterm=True,
    ),
    "repository": Command(
        module="tessera.serving.commands.repository",
        help="look at a server's models and change their versions while it answers",
    ),
    "rollback": Command(
        module="tessera.serving.commands.rollback",
        help="go back to an earlier commit of a version, for good",
    ),
    "predict": Command(
        module="tessera.serving.commands.predict",
        help="send requests to a server and print the answers",
    ),
    "capacity": Command(
        module="tessera.serving.commands.capacity",
        help="say how many hosts and cores a load needs, by costs that were measured",
    ),
    "doctor": Command(
        module="tessera.serving.commands.doctor",
        help="look at what is installed and at this machine, and say what to mend",
    ),
    "completion": Command(
        module="tessera.completion",
        help="print a script that completes commands and flags in bash",
    ),
    "score": Command(
        module="tessera.serving.commands.score",
        help="score files of raw rows with a package, without a server",
    ),
}


def _load(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name].module)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the flags."""

    given: Sequence[str] = ()
    """The words that are parsed: an unknown one is often the reason why a required flag is missing."""

    def error(self, message: str) -> NoReturn:
        if message.endswith(" required") or " are required: " in message:
            message = next(self._misspelt(), message)
        remedy = self._near_miss(message) or f"see {self.prog} --help"
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message}; {remedy}\n")

    def _misspelt(self) -> Iterator[str]:
        """What argparse says of each unknown flag of `given` that is near to a known one."""
        for word in self.given:
            flag, flags = word.partition("=")[0], self._flags()
            begins_one = any(known.startswith(flag) for known in flags)
            if flag.startswith("--") and not begins_one and nearest(flag, flags):
                yield f"unrecognized arguments: {word}"

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def _near_miss(self, message: str) -> str:
        """What argparse's ``message`` leaves out: the flag or choice that an unknown one is nearest to."""
        near = ""
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            near = nearest(unknown[1], self._flags())
        elif choice := re.match(r"argument \S+: invalid choice: '([^']*)'", message):
            known = [str(each) for action in self._actions for each in action.choices or ()]
            near = nearest(choice[1], known)
        return f"did you mean {near}?" if near else ""


def _top_parser() -> argparse.ArgumentParser:
    width = max(len(name) for name in COMMANDS)
    listing = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = _Parser(
        prog="tessera",
        description="Recommendation models from training to answers over the network.",
        epilog=f"commands:\n{listing}\n\n'tessera COMMAND --help' shows a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tessera {tessera.__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="what to do")
    return parser


def command_parser(name: str, *, prog: str = "") -> tuple[list[ModuleType], _Parser]:
    """The modules of sub-command ``name``, its own first, and the parser with the flags of all of them."""
    modules = [_load(name), *map(importlib.import_module, COMMANDS[name].more)]
    parser = _Parser(
        prog=prog or f"tessera {name}",
        description=modules[0].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for module in modules:
        module.add_arguments(parser)
    return modules, parser


def run_command(name: str, arguments: Sequence[str], *, prog: str | None = None) -> int:
    """Run sub-command ``name`` with ``arguments`` (without the program's name).

    Returns the exit status.  ``SystemExit`` of argparse (``--help``, a wrong flag) passes
    through; a wrong flag exits with 2.
    """
    prog = prog or f"tessera {name}"
    try:
        (module, *more), parser = command_parser(name, prog=prog)
        parser.given = arguments
        # Intermixed: positional words may stand before, between and after the flags.
        args = parser.parse_intermixed_args(arguments)
        with contextlib.nullcontext() if COMMANDS[name].handles_sigterm else _tidy_end():
            for one in more:
                one.prepare(args)
            status = int(module.run(args))
        sys.stdout.flush()
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        # The reader (head, say) has seen enough.  What is still buffered has no reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except OSError as error:
        if error.errno not in _USERS_ERRNOS:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"{prog}: error: {where}{error.strerror}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status


@contextlib.contextmanager
def _tidy_end() -> Iterator[None]:
    """SIGTERM ends the program in such a way that unfinished files are removed."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.exit(EXIT_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield  # the signals belong to whoever called
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``tessera`` and ``python -m tessera``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed = _top_parser().parse_args(arguments[:1])
    return run_command(parsed.command, arguments[1:])


def package_model_main() -> int:
    """Entry point of the bare ``package-model`` program."""
    return run_command("package-model", sys.argv[1:], prog="package-model")
