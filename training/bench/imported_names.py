"""Which public names of TorchRec code bases import, and which of those are here.

    python -m tessera.training.bench.imported_names --torchrec ~/torchrec --code ~/dlrm --code ~/TorchEasyRec

``--torchrec`` is a checkout of TorchRec; each ``--code`` is a folder with Python files and notebooks.
All are parsed, not run.  Counted is what import statements take from ``torchrec`` and attributes of its
imported modules (``torchrec.distributed.X``), if TorchRec has the name at that path and no part of the
path begins with an underscore: classes, functions, constants, names that one module takes from another.
A name that only one file of TorchRec's own tests or test tools has is not public.

A name is here if the module of the same path under ``tessera.training`` has it.  The shares are of the
names, of names weighed by the code bases that import them, and of names weighed by the files.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tessera.training.bench.program_rewrite import LIBRARY, cells_as_source
from tessera.training.bench.torchrec_names import offered_at

_NOT_PUBLIC = re.compile(r"(^|\.)(_\w*|tests?|test_utils|benchmarks?)(\.|$)")


@dataclass
class Uses:
    """How often a name of TorchRec is imported."""

    files: Counter[str] = field(default_factory=Counter)  # code base -> its files that import it


def imported_paths(source: str) -> set[str]:
    """The dotted paths of TorchRec that a program imports, or takes as attributes of its modules.

    Of ``import torchrec.a as t`` with ``t.B.c`` these are ``torchrec.a`` and ``torchrec.a.B.c``.

    Raises:
        SyntaxError: The source is not Python.
    """
    tree = ast.parse(source)
    found: set[str] = set()
    bound: dict[str, str] = {}  # local name -> path
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == LIBRARY:
                    found.add(alias.name)
                    bound[alias.asname or LIBRARY] = alias.name if alias.asname else LIBRARY
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] == LIBRARY:
                for alias in node.names:
                    found.add(f"{module}.{alias.name}")
                    bound[alias.asname or alias.name] = f"{module}.{alias.name}"
    for node in ast.walk(tree):
        chain = _chain(node)
        if len(chain) > 1 and chain[0] in bound:
            found.add(".".join([bound[chain[0]], *chain[1:]]))
    return found


def _chain(node: ast.AST) -> list[str]:
    """``["a", "b", "c"]`` of the expression ``a.b.c``; of others an empty list."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*reversed([*names, node.id])] if isinstance(node, ast.Name) else []


class Library:
    """The modules of a checkout of TorchRec and the names that each of them has."""

    def __init__(self, checkout: Path) -> None:
        self._root = checkout / LIBRARY
        if not self._root.is_dir():
            raise ValueError(f"{checkout} has no folder {LIBRARY}; give a checkout of TorchRec")

    def _file_of(self, module: str) -> Path | None:
        place = self._root.joinpath(*module.split(".")[1:])
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
        return None

    @cache  # noqa: B019 - one library lives as long as the program
    def names(self, module: str) -> frozenset[str]:
        """What the top-level statements of a module bind; nothing of a module that there is not."""
        file = self._file_of(module)
        if file is None:
            return frozenset()
        names: set[str] = set()
        for node in _top_level(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom) and LIBRARY in (node.module or ""):
                names.update(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(target.id for target in targets if isinstance(target, ast.Name))
        return frozenset(names)

    def public(self, path: str) -> tuple[str, str] | None:
        """The module and name of a path, or of the longest beginning of it that is a public name."""
        if _NOT_PUBLIC.search(path):
            return None
        module, *rest = path.split(".")
        for name in rest:
            if self._file_of(f"{module}.{name}") is not None:
                module = f"{module}.{name}"
                continue
            return (module, name) if name in self.names(module) else None
        return None


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, also those within ``if`` and ``try``."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If | ast.Try):
            waiting += [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                waiting += [each for handler in node.handlers for each in handler.body]


def sources(folder: Path) -> Iterator[str]:
    """The Python files and the notebooks of a code base, notebooks as programs."""
    for file in sorted(folder.rglob("*")):
        if file.suffix not in {".py", ".ipynb"} or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if LIBRARY in text:
            try:
                yield cells_as_source(text) if file.suffix == ".ipynb" else text
            except (ValueError, KeyError):
                continue


def uses(library: Library, folders: dict[str, Path]) -> dict[tuple[str, str], Uses]:
    """Public name (module, name) -> which code bases import it, in how many files."""
    found: dict[tuple[str, str], Uses] = defaultdict(Uses)
    for base, folder in folders.items():
        for source in sources(folder):
            try:
                paths = imported_paths(source)
            except SyntaxError:
                continue
            for name in {library.public(path) for path in paths} - {None}:
                assert name is not None
                found[name].files[base] += 1
    return dict(found)


def is_here(module: str, name: str) -> bool:
    """Whether ``tessera.training`` has the name at the same path."""
    inside = module.removeprefix(LIBRARY).removeprefix(".")
    return name in offered_at(inside)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torchrec", type=Path, required=True, help="a checkout of TorchRec")
    parser.add_argument(
        "--code", type=Path, required=True, action="append", help="a code base (repeatable)"
    )
    options = parser.parse_args()
    found = uses(Library(options.torchrec), {folder.name: folder for folder in options.code})
    here = {name for name in found if is_here(*name)}
    weights = {
        "names": dict.fromkeys(found, 1),
        "names, each once for a code base": {n: len(u.files) for n, u in found.items()},
        "names, each once for a file": {n: u.files.total() for n, u in found.items()},
    }
    print("| code base | names | here |\n| --- | --- | --- |")
    for base in (folder.name for folder in options.code):
        own = {name for name, used in found.items() if base in used.files}
        print(f"| {base} | {len(own)} | {len(own & here)} |")
    for what, weight in weights.items():
        total, ours = sum(weight.values()), sum(weight[name] for name in here)
        print(f"{ours} of {total} {what} ({ours / max(total, 1):.1%})")
    missing = sorted(
        (name for name in found if name not in here),
        key=lambda n: (-len(found[n].files), -found[n].files.total(), n),
    )
    for name in missing:
        files = ", ".join(f"{base} {count}" for base, count in sorted(found[name].files.items()))
        print(f"not here: {'.'.join(name)} ({files})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
