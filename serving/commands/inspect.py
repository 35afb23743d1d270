"""Show what a package says of itself: schema, tables, sizes, plan and metrics.

Only the file's manifest is read: nothing of the model is loaded or run, and no hash is compared
('tessera verify' does that).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tessera.serving.records import Records
from tessera.serving.summary import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "model", metavar="MODEL.pt", type=Path, help="the file that package-model wrote"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the manifest as it is stored, in JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Print the manifest."""
    manifest = Records(args.model).manifest()
    if args.json:
        print(json.dumps(manifest.to_json(), indent=1))
    else:
        size = args.model.stat().st_size
        print(describe(manifest, path=str(args.model), file_bytes=size))
    return 0
