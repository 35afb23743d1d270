"""Look at this machine as Tessera would use it, and say what to mend.

    tessera doctor
    tessera doctor --json

A line for each thing that is looked at: what is installed (Python, tessera, torch, the lookup operators and
the instruction set that they take here, FBGEMM, tessera-server, CUDA devices), the CPUs and the memory that
control groups leave, huge pages, limits, default ports, and settings in TESSERA_ variables.  Nothing is changed.

    ok       as it should be
    warning  works, but slower or less than it could; the line says what to do
    problem  something does not work; the line says what to do

--json prints a list of objects with "name", "status", "found" and "remedy" (empty where there is none).

Exit status: 0 no problem; 1 at least one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``tessera doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON (default: lines of text)")


def run(args: argparse.Namespace) -> int:
    """Look and print; see the module's docstring."""
    # torch comes with it, and --help must answer at once.
    from tessera.serving.commands.doctor_checks import PROBLEM, examine  # noqa: PLC0415

    findings = examine()
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            indent = " " * (len("warning") + width + 4)
            text = finding.found + (f": {finding.remedy}" if finding.remedy else "")
            lines = textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
            print(f"{finding.status:<7}  {finding.name:<{width}}  {lines.lstrip()}")
    return int(any(finding.status == PROBLEM for finding in findings))
