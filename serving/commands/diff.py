"""Compare two packages: schema, tables, sizes, and the answers to the same requests.

The requests are the golden ones of both packages and random ones. Names, times, versions and
signatures are shown where they differ, and do not count.  A package for GPUs answers on the CPU where
there is no GPU.

Exit status: 0 schema and tables are alike and no answer is more than --atol apart; 1 they
differ; 2 a package cannot be loaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.serving.commands.flags import distance, not_negative
from tessera.serving.commands.loading_flags import add_allow_op, add_load_timeout
from tessera.serving.inspect.summary import table_of

if TYPE_CHECKING:
    from tessera.serving.inspect.compare import Change, Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("a", metavar="A.pt", type=Path, help="one package")
    parser.add_argument("b", metavar="B.pt", type=Path, help="the other package")
    parser.add_argument(
        "--samples",
        type=not_negative,
        default=1000,
        metavar="N",
        help="random requests beside the golden ones (default 1000)",
    )
    parser.add_argument(
        "--seed", type=not_negative, default=0, help="of the random requests (default 0)"
    )
    parser.add_argument(
        "--atol",
        type=distance,
        default=0.0,
        metavar="X",
        help="how far two answers may be apart and still count as the same (default 0)",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    add_allow_op(parser)
    add_load_timeout(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    from tessera.serving.inspect.compare import compare  # noqa: PLC0415 - loads torch
    from tessera.serving.package.time_limit import TimeLimit  # noqa: PLC0415 - only where it runs

    limit = TimeLimit(seconds=args.load_timeout_s, prefix="tessera diff: error: ", status=2)
    found = compare(
        args.a,
        args.b,
        samples=args.samples,
        seed=args.seed,
        allow_ops=args.allow_ops,
        time_limit=limit,
    )
    same = found.same(atol=args.atol)
    if args.json:
        print(json.dumps({"same": same, **found.to_json()}, indent=1))
    else:
        print(_text(found, same=same))
    return 0 if same else 1


def _text(found: Comparison, *, same: bool) -> str:
    parts = [
        *(
            s
            for t in ("schema", "tables", "sizes", "about")
            for s in _changes(t, getattr(found, t))
        ),
        *_answers(found),
        "the same" if same else "they differ",
    ]
    return "\n".join(parts)


def _changes(title: str, changes: tuple[Change, ...]) -> list[str]:
    if not changes:
        return [] if title == "about" else [f"{title}: the same", ""]
    lines = [f"  {change.what}: {change.a} -> {change.b}" for change in changes]
    return [f"{title}:", *lines, ""]


def _answers(found: Comparison) -> list[str]:
    if found.not_compared:
        return [f"answers: not compared, since {found.not_compared}", ""]
    rows = [
        (a.output, str(a.samples), str(a.differing), f"{a.max_abs:.3g}", f"{a.mean_abs:.3g}")
        for a in found.answers
    ]
    head = ("output", "samples", "differing", "max abs", "mean abs")
    return ["answers:", *table_of(head, rows), ""]
