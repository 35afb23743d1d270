"""Say where a user's own code failed, and how, in one line."""

from __future__ import annotations

import importlib
import linecache
import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch


def users_place(error: Exception) -> str:
    """`` at FILE:LINE in NAME: `CODE``` of the user's innermost line; empty where there is none."""
    frame = _users_frame(error.__traceback__)
    if frame is None:
        return ""
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f" at {frame.filename}:{frame.lineno} in {frame.name}: `{line}`"


def first_line(error: Exception) -> str:
    """The error's type, and the first line of what it says."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _users_frame(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """The innermost line that is neither ours nor torch's, nor imports something."""
    others = (str(Path(torch.__file__).parent), str(Path(importlib.__file__).parent))
    ours = (*others, *_folders("tessera"))
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
