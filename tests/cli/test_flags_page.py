"""docs/flags.md holds what the programs' parsers say: every flag of every program, none besides."""

import argparse
import re
import subprocess

import pytest

from tessera import flags_reference as reference
from tessera.cli import COMMANDS, command_parser
from tests import REPOSITORY

SECTIONS = reference.sections(reference.PAGE.read_text(encoding="utf-8"))
FLAG_TABLES = {"tessera-server": "server/config.cc", "tessera-load": "load/main.cc"}


def built(name):
    """Whether the program is there and was built of the present table of its flags; `make build` does that."""
    program, table = reference.PROGRAMS / name, REPOSITORY / "cpp_server/src" / FLAG_TABLES[name]
    return program.exists() and program.stat().st_mtime >= table.stat().st_mtime


BUILT = [name for name in reference.CPP_PROGRAMS if built(name)]


def flags_of(section):
    """The flags that the tables of a section have a row for."""
    rows = re.findall(r"^\| `([^`]+)` \| .+ \|$", section, re.MULTILINE)
    return sorted(word.rstrip(",") for row in rows for word in row.split() if word.startswith("-"))


def test_the_page_is_current():
    before = reference.PAGE.read_text(encoding="utf-8")
    programs = [*reference.of_commands()]
    programs += [one for one in reference.of_cpp_programs() if one.name in BUILT]
    assert before == reference.whole_page(programs, reference.sections(before)), (
        f"docs/flags.md is not what the programs say: run {reference.WRITE_COMMAND}"
    )
    target = reference.WRITE_COMMAND.removeprefix("make ")
    assert f"\n{target}:" in (REPOSITORY / "Makefile").read_text()


def test_there_is_a_section_for_each_program_and_a_link_to_it():
    commands = {f"tessera {name}" for name in COMMANDS}
    assert SECTIONS.keys() == commands | set(reference.CPP_PROGRAMS)
    links = re.findall(r"\]\(#([\w-]+)\)", reference.PAGE.read_text(encoding="utf-8"))
    assert set(links) == {name.replace(" ", "-") for name in SECTIONS}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_command_has_its_row(name):
    parser = command_parser(name)[1]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert flags_of(SECTIONS[f"tessera {name}"]) == sorted(flags - {"-h", "--help"})


@pytest.mark.parametrize("name", BUILT)
def test_every_flag_of_a_cpp_program_has_its_row(name):
    told = subprocess.run(
        [reference.PROGRAMS / name, "--help"], capture_output=True, text=True, check=True
    ).stdout
    flags = set(re.findall(r"^ +(--[\w-]+)", told, re.MULTILINE)) - {"--help"}
    assert len(flags) > 15
    assert flags_of(SECTIONS[name]) == sorted(flags)


def test_a_flag_that_is_missing_makes_the_page_differ():
    parser = argparse.ArgumentParser(description="Sort rows.")
    parser.add_argument("--rows", required=True, help="how many | all")
    before = reference.markdown(reference.of_parser("sort", parser))
    assert before == (
        "## sort\n\nSort rows.\n\n| flag | meaning |\n| --- | --- |\n"
        "| `--rows ROWS` | how many \\| all; required |\n"
    )
    parser.add_argument("words", nargs="*", choices=("up", "down"), help="see docs/flags.md")
    parser.add_argument("--fast", action="store_true", help="by 4 threads; here 4")
    after = reference.markdown(reference.of_parser("sort", parser)).split("\n")
    assert "| `words` | see [flags.md](flags.md) |" not in after
    assert "| `{up,down}` | see [flags.md](flags.md) |" in after
    assert "| `--fast` | by 4 threads |" in after


def test_lines_that_are_laid_out_are_shown_as_they_are():
    text = "One.  Two.\n\n    a --b *\n      c\n\nok     good\nwrong  bad\n"
    program = reference.Program(name="p", text=text, groups=())
    assert reference.markdown(program) == (
        "## p\n\nOne.  Two.\n\n```text\na --b *\n  c\n```\n\n```text\nok     good\nwrong  bad\n```\n"
    )


@pytest.mark.parametrize("told", ["", "usage: p\n\nIt.\n\nflags:\n  --a N\n", "flags:\n"])
def test_help_of_another_layout_is_refused(told):
    with pytest.raises(ValueError, match="not laid out"):
        reference.of_help("p", told)


def test_a_program_that_is_not_built_keeps_its_section():
    before = {
        "tessera-load": "## tessera-load\n\nAs it was.\n",
        "tessera gone": "## tessera gone\n",
    }
    page = reference.whole_page([reference.of_commands()[0]], before)
    assert list(reference.sections(page)) == ["tessera-load", "tessera datagen"]
    assert "As it was." in page
