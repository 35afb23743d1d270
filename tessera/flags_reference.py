"""The page docs/flags.md: every flag of every program, read from the programs themselves.

    python -m tessera.flags_reference --write

The flags of ``tessera`` and ``package-model`` come from their parsers, those of ``tessera-server`` and ``tessera-load``
from what ``--help`` of the built programs prints.  Where these are not built, their part of the page stays as it is and
is not compared.  It runs in the checkout.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tessera.cli import COMMANDS, command_parser

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flags.md"
PROGRAMS = ROOT / "build" / "cpp" / "release"
CPP_PROGRAMS = ("tessera-server", "tessera-load")
WRITE_COMMAND = "make flags-page"

HEAD = f"""# Flags

<!-- Written by `{WRITE_COMMAND}` from the programs' own parsers; do not edit. -->

Every program says the same with `--help`. An unknown flag, and a value that has to be changed, end a program with status 2 and one
line that names it. Every flag of `tessera serve` and `tessera-server` can also stand in a file or in the environment:
[settings.md](settings.md). The keys of a training config are in [config.md](config.md).
"""


@dataclass(frozen=True, kw_only=True)
class FlagRow:
    """A flag, or a word without dashes.

    Attributes:
        shown: as it is written, with its value: ``--port N``.
        text: what it does, its unit and its default, as ``--help`` tells it.
    """

    shown: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """What ``--help`` of one program or sub-command tells.

    Attributes:
        name: as it is called: ``tessera train``.
        text: what it does; lines that are indented are shown as they are.
        groups: the title of each group of flags, empty for the first, with its rows.
    """

    name: str
    text: str
    groups: tuple[tuple[str, tuple[FlagRow, ...]], ...]


def of_parser(name: str, parser: argparse.ArgumentParser) -> Program:
    """What ``parser`` tells, without ``--help`` itself."""
    groups: dict[str, list[FlagRow]] = {}
    for group in parser._action_groups:  # noqa: SLF001 - argparse shows its flags nowhere else
        title = "" if group.title in ("positional arguments", "options") else group.title or ""
        rows = [_row(parser, action) for action in group._group_actions]  # noqa: SLF001
        groups.setdefault(title, []).extend(row for row in rows if row)
    return Program(
        name=name,
        text=parser.description or "",
        groups=tuple((title, tuple(rows)) for title, rows in groups.items() if rows),
    )


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> FlagRow | None:
    if isinstance(action, argparse._HelpAction):  # noqa: SLF001
        return None
    formatter = parser._get_formatter()  # noqa: SLF001 - it knows what a metavar defaults to
    plain = action.dest.upper() if action.option_strings else action.dest
    value = formatter._format_args(action, plain) if action.nargs != 0 else ""  # noqa: SLF001
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    names = ", ".join(action.option_strings)
    text = formatter._expand_help(action)  # noqa: SLF001
    required = "; required" if action.option_strings and action.required else ""
    return FlagRow(shown=f"{names} {value}".strip(), text=_anywhere(text) + required)


def of_help(name: str, told: str) -> Program:
    """What the C++ program ``name`` tells by ``--help``.

    Raises:
        ValueError: the text is not laid out as ``cpp_server/src/common/flags.cc`` does it.
    """
    head, found, flags = told.partition("\nflags:\n")
    usage, _, text = head.partition("\n\n")
    rows = re.findall(r"^  (--.+)\n      (.+)$", flags, re.MULTILINE)
    if not found or not usage.startswith("usage: ") or 2 * len(rows) != flags.count("\n"):
        raise ValueError(f"{name} --help is not laid out as this module expects it")
    shown = [FlagRow(shown=flag, text=_anywhere(words)) for flag, words in rows if flag != "--help"]
    return Program(name=name, text=text.strip(), groups=(("", tuple(shown)),))


def _anywhere(text: str) -> str:
    """``text`` without the numbers that it has on this machine alone."""
    return re.sub(r"; here \d+", "", text)


def markdown(program: Program) -> str:
    """The program's section of the page."""
    lines = [f"## {program.name}", "", *_paragraphs(program.text)]
    for title, rows in program.groups:
        if title:
            lines += ["", _cell(f"{title[0].upper()}{title[1:]}:")]
        lines += ["", "| flag | meaning |", "| --- | --- |"]
        lines += [f"| `{_code(row.shown)}` | {_cell(row.text)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> list[str]:
    """``text`` as Markdown: paragraphs with an indented line are shown as they are."""
    made: list[str] = []
    for paragraph in re.split(r"\n{2,}", text.strip()):
        lines = paragraph.split("\n")
        aligned = any(re.search(r"\S {2,}(?<![.:] {2})\S", line) for line in lines)
        if aligned or any(line.startswith(" ") for line in lines):
            indent = min(len(line) - len(line.lstrip()) for line in lines)
            made += ["", "```text", *(line[indent:] for line in lines), "```"]
        else:
            made += ["", *(_cell(line) for line in lines)]
    return made[1:]


def _code(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(text: str) -> str:
    """``text`` so that Markdown shows its signs; pages of docs/ that it names become links."""
    text = re.sub(r"([|*<>])", r"\\\1", text)
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", text)


def of_commands() -> list[Program]:
    """Every sub-command of ``tessera``, and ``package-model``, which is one of them by a name of its own."""
    programs = [of_parser(f"tessera {name}", command_parser(name)[1]) for name in COMMANDS]
    also = "The program package-model is the same."
    return [
        replace(one, text=f"{one.text.strip()}\n\n{also}")
        if one.name == "tessera package-model"
        else one
        for one in programs
    ]


def of_cpp_programs() -> list[Program]:
    """The C++ programs that are built.

    Raises:
        ValueError: what one of them tells is not laid out as expected.
    """
    made = []
    for name in CPP_PROGRAMS:
        if (PROGRAMS / name).exists():
            told = subprocess.run(
                [PROGRAMS / name, "--help"], capture_output=True, text=True, check=True
            )
            made.append(of_help(name, told.stdout))
    return made


def sections(page: str) -> dict[str, str]:
    """The sections of a page by their titles, each from its title to the next one."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0].removeprefix("## "): part.rstrip() + "\n" for part in parts}


def whole_page(programs: Iterable[Program], before: Mapping[str, str]) -> str:
    """The page with a section for each program; those of C++ programs that are not given come from ``before``."""
    made = {program.name: markdown(program) for program in programs}
    for name in CPP_PROGRAMS:
        if name not in made and name in before:
            made[name] = before[name]
    order = sorted(made, key=lambda name: not name.startswith("tessera-"))
    contents = ", ".join(f"[{name}](#{name.replace(' ', '-')})" for name in order)
    return "\n".join([HEAD, contents + ".", "", *(made[name] for name in order)])


def main() -> int:
    """0: the page is current, or was written; 1: it is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the page (default: compare)")
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    built = of_cpp_programs()
    text = whole_page([*of_commands(), *built], sections(before))
    for name in CPP_PROGRAMS:
        if name not in {program.name for program in built}:
            print(f"{name} is not built; its flags in docs/flags.md were left as they are")
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if before != text:
        print(f"docs/flags.md does not fit the programs: run {WRITE_COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
