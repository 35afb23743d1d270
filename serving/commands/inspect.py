"""Show what a package says of itself: schema, tables, sizes, plan and metrics; or its graph.

Without --graph and --svg only the file's manifest is read, and whether the model's code can share
features among samples: nothing of the model is loaded or run, and no hash is compared ('tessera
verify' does that).  For the graph the whole file is checked first, and then torch opens it without
its large tables.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.errors import UserError
from tessera.serving.commands.flags import add_package
from tessera.serving.commands.loading_flags import add_allow_op
from tessera.serving.inspect.summary import describe
from tessera.serving.package.records import Records

if TYPE_CHECKING:
    from tessera.serving.inspect.graph import Graph
    from tessera.serving.package.manifest import Manifest


_MAX_CODE_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_package(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--json", action="store_true", help="print the manifest as it is stored, in JSON"
    )
    what.add_argument(
        "--graph",
        action="store_true",
        help="print the operators of the model's graph, what they take and their weights",
    )
    parser.add_argument(
        "--svg",
        metavar="FILE",
        type=Path,
        help="draw the graph into this file, for any browser (default: not drawn)",
    )
    add_allow_op(parser)


def run(args: argparse.Namespace) -> int:
    """Print the manifest or the graph."""
    records = Records(args.model)
    manifest = records.manifest()
    if args.graph or args.svg is not None:
        from tessera.serving.inspect.graph import graph_text  # noqa: PLC0415 - loads torch

        graph = _graph(records, manifest, args.allow_ops)
        if args.svg is not None:
            _draw(graph, manifest, args.svg)
        if args.graph:
            print(graph_text(graph))
            return 0
    if args.json:
        print(json.dumps(manifest.to_json(), indent=1))
    else:
        size = args.model.stat().st_size
        shares = _shares_rows(records)
        print(describe(manifest, path=str(args.model), file_bytes=size, shares_rows=shares))
    return 0


def _shares_rows(records: Records) -> bool:
    """Whether the module's source has the method that takes shared rows; nothing of it is run."""
    method = b"def forward_shared("
    return any(
        method in records.read(name, max_bytes=_MAX_CODE_BYTES)
        for name in records.names
        if name.startswith("code/") and name.endswith(".py")
    )


def _graph(records: Records, manifest: Manifest, allow_ops: list[str]) -> Graph:
    from tessera.kernels.libraries import load_libraries  # noqa: PLC0415 - loads torch
    from tessera.serving.inspect.graph import read_graph  # noqa: PLC0415 - likewise
    from tessera.serving.package.opening import Opening  # noqa: PLC0415 - likewise

    opening = Opening(records, on_host=False, allow_ops=allow_ops)
    records.check(manifest.records, into=opening.into)
    load_libraries(manifest.operator_libraries)
    return read_graph(*opening.without_tables())


def _draw(graph: Graph, manifest: Manifest, path: Path) -> None:
    from tessera.serving.inspect.graph_svg import graph_svg  # noqa: PLC0415 - loads torch

    title = f"{manifest.name}, version {manifest.version}"
    try:
        path.write_text(graph_svg(graph, title=title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {path} cannot be written: {error.strerror}") from error
    print(f"drew {path}")
