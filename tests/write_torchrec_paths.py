"""Generate the modules under TorchRec's paths (``--write``), or check that they are up to date.

``training/torchrec_paths.py`` has the table that they are made from.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "training"
WIDTH = 100

# Read as a file: the package that it is in may be what has to be written.
_TABLE = runpy.run_path(str(FOLDER / "torchrec_paths.py"))
PATHS: dict[str, dict[str, str]] = _TABLE["PATHS"]
LAZY: dict[str, str] = _TABLE["LAZY"]
module_of: Callable[[str], str] = _TABLE["module_of"]


def file_of(path: str) -> Path:
    """The generated file of a module path: the room's own ``__init__.py`` where one has its name."""
    place = FOLDER.joinpath(*path.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _imports(path: str, indent: str) -> list[str]:
    lines = []
    for home, names in PATHS[path].items():
        in_one = ", ".join(f"{name} as {name}" for name in names.split())
        if len(line := f"{indent}from {module_of(home)} import {in_one}") <= WIDTH:
            lines.append(line)
            continue
        # A name and its "as" stay on one line.
        imported = " ".join(f"{name}~as~{name}," for name in names.split())
        more = indent + "    "
        wrapped = textwrap.wrap(
            imported, WIDTH, initial_indent=more, subsequent_indent=more, break_long_words=False
        )
        lines += [
            f"{indent}from {module_of(home)} import (",
            *(line.replace("~", " ") for line in wrapped),
            f"{indent})",
        ]
    return lines


def text_of(path: str) -> str:
    """The source of the generated file of ``path``."""
    what = LAZY.get(path, f"The names of ``torchrec.{path}``.")
    lines = [
        f'"""{what}"""',
        "",
        "# Generated from the table in training/torchrec_paths.py; change it there.",
        "# isort: skip_file",
        "# fmt: off",
    ]
    if path not in LAZY:
        if file_of(path).name != "__init__.py":
            # In an ``__init__.py`` ruff knows why a name is imported as itself.
            reason = "type checkers offer a name that is imported as itself"
            lines.append(f"# ruff: noqa: PLC0414 - {reason}")
        return "\n".join([*lines, *_imports(path, "")]) + "\n"
    lines += [
        "from typing import TYPE_CHECKING",
        "from tessera.training.torchrec_paths import lazy_names",
        "",
        "if TYPE_CHECKING:",
        *_imports(path, "    "),
        "",
        "__all__, __getattr__, __dir__ = lazy_names(__name__)",
    ]
    return "\n".join(lines) + "\n"


def stale() -> list[Path]:
    """The generated files that are missing or differ from the table."""
    return [
        file_of(path)
        for path in PATHS
        if not file_of(path).exists() or file_of(path).read_text() != text_of(path)
    ]


def main() -> int:
    """Write the files, or name those that are not as the table says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the files (default: compare)")
    if parser.parse_args().write:
        for path in PATHS:
            file_of(path).write_text(text_of(path))
        return 0
    wrong = stale()
    for file in wrong:
        sys.stderr.write(
            f"{file} is not what training/torchrec_paths.py says; run "
            "python -m tests.write_torchrec_paths --write\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
