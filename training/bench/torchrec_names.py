"""Which of TorchRec's public names are here: the table at the end of docs/torchrec.md.

    python -m tessera.training.bench.torchrec_names                      compare the table with the code
    python -m tessera.training.bench.torchrec_names --write              write it anew
    python -m tessera.training.bench.torchrec_names --torchrec FOLDER    take the names from there, and write

FOLDER is a checkout of TorchRec or an installed ``torchrec`` package; its files are parsed, not run.
A public name is a class or function without a leading underscore that a module outside of tests, test
tools, scripts and benchmarks defines.  The names are kept in torchrec_names.json, so that the table can
be compared without TorchRec.  A name is

* here: the module of the same path under ``tessera.training`` has it;
* elsewhere: another module of ``tessera.training`` defines a name like it, or `ELSEWHERE` says what serves;
* left out, for the reason that `REASONS` gives; a name without a reason stops the script.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tessera.training.bench.torchrec_reasons import ELSEWHERE, REASONS

NAMES = Path(__file__).with_name("torchrec_names.json")
TRAINING = Path(__file__).resolve().parents[1]
PAGE = TRAINING.parent / "docs" / "torchrec.md"
HEADING = "## Every public name"
COMMAND = "python -m tessera.training.bench.torchrec_names"

_NOT_PUBLIC = re.compile(
    r"(^|/)(tests?|test_utils|scripts|benchmarks?|examples|github)(/|$)|(^|/)(test|benchmark)_"
)


def public_names(source: str) -> list[str]:
    """The classes and functions that a module's own statements define, without those that begin with _."""
    kinds = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    names = {node.name for node in ast.parse(source).body if isinstance(node, kinds)}
    return sorted(name for name in names if not name.startswith("_"))


def modules_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Dotted path below ``folder`` and file of each Python module that is not a test or a tool."""
    for file in sorted(folder.rglob("*.py")):
        inside = file.relative_to(folder).with_suffix("")
        if not _NOT_PUBLIC.search(inside.as_posix()):
            yield ".".join(inside.parts).removesuffix("__init__").rstrip("."), file


def read_torchrec(folder: Path) -> dict[str, list[str]]:
    """Module path without ``torchrec.`` -> its public names, of a checkout or an installation."""
    package = folder / "torchrec" if (folder / "torchrec").is_dir() else folder
    found = {
        module: public_names(file.read_text(encoding="utf-8"))
        for module, file in modules_below(package)
    }
    return {module: names for module, names in found.items() if names}


def ours_by_name() -> dict[str, str]:
    """Public name -> the module of ``tessera.training`` that defines it, the first one where several do."""
    homes: dict[str, str] = {}
    for module, file in modules_below(TRAINING):
        if not module.startswith(("bench", "commands", "config_reference")):
            for name in public_names(file.read_text(encoding="utf-8")):
                homes.setdefault(name, module)
    return homes


def offered_at(module: str) -> set[str]:
    """The names that ``tessera.training`` has under a module path of TorchRec; none without the module."""
    full = f"tessera.training.{module}".rstrip(".")
    try:
        if importlib.util.find_spec(full) is None:
            return set()
    except ModuleNotFoundError:  # not even the package that the module would be in
        return set()
    return set(dir(importlib.import_module(full)))


def sorted_out(
    names: dict[str, list[str]],
) -> Iterator[tuple[str, list[str], dict[str, list[str]]]]:
    """Sort the names of each module: its path, those that are here, and what is said of others -> those.

    Raises:
        ValueError: a name has no reason for being left out.
    """
    homes = ours_by_name()
    for module, own in sorted(names.items()):
        offered = offered_at(module)
        said: dict[str, list[str]] = {}
        for name in (name for name in own if name not in offered):
            said.setdefault(_said_of(module, name, homes), []).append(name)
        yield module, [name for name in own if name in offered], said


def _said_of(module: str, name: str, homes: dict[str, str]) -> str:
    full = f"{module}.{name}".lstrip(".")
    if full in ELSEWHERE:
        return f"elsewhere: {ELSEWHERE[full]}"
    for pattern, reason in REASONS:
        if re.fullmatch(pattern, full):
            return f"left out: {reason}"
    if name in homes:
        return f"elsewhere: `{homes[name]}`"
    raise ValueError(f"{full} is not here and has no reason; give it one in torchrec_reasons.py")


def table(names: dict[str, list[str]], version: str) -> str:
    """The section of docs/torchrec.md."""
    rows, here, elsewhere, left_out = [], 0, 0, 0
    for module, own, said in sorted_out(names):
        cells = []
        for reason, others in sorted(said.items()):
            cells.append(f"{', '.join(f'`{name}`' for name in others)}: {reason}")
            elsewhere += len(others) * reason.startswith("elsewhere")
            left_out += len(others) * reason.startswith("left out")
        here += len(own)
        shown = ", ".join(f"`{name}`" for name in own)
        rows.append(f"| `{module or 'torchrec'}` | {shown} | {'<br>'.join(cells)} |")
    total = here + elsewhere + left_out
    return "\n".join(
        [
            HEADING,
            "",
            f"TorchRec {version} has {total} public classes and functions, beside tests and tools. Here under the",
            f"same path are {here}, {elsewhere} more have another place, and {left_out} are left out. Modules are without",
            f"`torchrec.` and `tessera.training.`. `{COMMAND}` makes this",
            "table from the code and the names, which it takes from a checkout or an installation of TorchRec.",
            "",
            "| module | here | elsewhere or left out |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def page_with_table() -> str:
    """docs/torchrec.md as it should be."""
    content = json.loads(NAMES.read_text(encoding="utf-8"))
    before = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip("\n")
    return f"{before}\n\n{table(content['names'], content['version'])}"


def main() -> int:
    """0: the page is current, or was written; 1: it is not current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--torchrec", type=Path, help="a folder with TorchRec (default: kept names)"
    )
    parser.add_argument(
        "--version", default="1.9.2", help="which TorchRec that is (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="write the page (default: compare)")
    options = parser.parse_args()
    if options.torchrec is not None:
        content = {"version": options.version, "names": read_torchrec(options.torchrec)}
        text = json.dumps(content, indent=0, sort_keys=True).replace('",\n"', '", "')
        NAMES.write_text(f"{text}\n", encoding="utf-8")
    expected = page_with_table()
    if options.write or options.torchrec is not None:
        PAGE.write_text(expected, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != expected:
        print(f"docs/torchrec.md does not fit the code: run {COMMAND} --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
