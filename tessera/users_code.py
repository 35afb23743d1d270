"""A user's own code, which a flag or a config names: how it is called, and where it failed, in one line."""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tessera.errors import UserError


def check_named(what: str, name: str) -> tuple[str, str]:
    """Module and function of ``name``; see `call_named`.

    Raises:
        UserError: it does not have the form ``package.module:function``.
    """
    path, colon, function = name.partition(":")
    if not (colon and path and function.isidentifier()):
        raise UserError(f"{what} is {name!r}; give pkg.module:function")
    return path, function


def call_named(what: str, name: str, /, *arguments: Any, **named: Any) -> Any:
    """What the function ``package.module:function`` returns for these arguments.

    The working directory is searched first.

    Args:
        what: names the flag or field that gives ``name``, for errors.
        name: of the function.
        *arguments: what the function is called with.
        **named: its keyword arguments.

    Raises:
        UserError: there is no such function, it does not take the arguments, or it fails.
    """
    path, function = check_named(what, name)
    folder = str(Path.cwd())
    if folder not in sys.path:  # an installed command does not look there
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} {name}: {error.name} cannot be imported; install it, or run in the folder that "
            "holds it"
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(what, name, error) from error
    found = getattr(module, function, None)
    if not callable(found):
        names = ", ".join(key for key in vars(module) if not key.startswith("_"))
        raise UserError(f"{what} {name}: {path} has no function {function}; it has {names}")
    try:
        inspect.signature(found).bind(*arguments, **named)
    except TypeError as error:
        given = ", ".join([*(f"a {type(one).__name__}" for one in arguments), *named])
        raise UserError(
            f"{what} {name}: {error}; name a function that takes {given or 'no arguments'}"
        ) from error
    except ValueError:
        pass  # some functions written in C do not say what they take
    try:
        return found(*arguments, **named)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(what, name, error) from error


def _failed(what: str, name: str, error: BaseException) -> UserError:
    return UserError(
        f"{what} {name} fails{users_place(error)}: {first_line(error)}; correct it there"
    )


def users_place(error: BaseException) -> str:
    """`` at FILE:LINE in NAME: `CODE``` of the user's innermost line; empty where there is none."""
    frame = _users_frame(error.__traceback__)
    if frame is None:
        return ""
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f" at {frame.filename}:{frame.lineno} in {frame.name}: `{line}`"


def first_line(error: BaseException) -> str:
    """The error's type, and the first line of what it says."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _users_frame(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """The innermost line that is neither ours nor torch's, nor imports something."""
    others = (importlib, *(sys.modules[name] for name in ("torch",) if name in sys.modules))
    folders = [str(Path(str(module.__file__)).parent) for module in others]
    ours = (*folders, *_folders("tessera"))
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(ours) and not frame.filename.startswith("<")
    ]
    return frames[-1] if frames else None


def _folders(package: str) -> list[str]:
    """Where the package's files are, behind links too."""
    root = Path(sys.modules[package].__path__[0])
    parts = [root, *(root / part for part in ("training", "serving", "kernels"))]
    return [f"{path}/" for part in parts for path in {str(part), str(part.resolve())}]
