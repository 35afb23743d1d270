"""Quantize, trace and script a trained model into one file that servers load.

RUN_OR_CHECKPOINT is a run folder of 'tessera train' (its best checkpoint is taken) or one
checkpoint file. The tables' rows are stored as --dtype, the file is checked by golden answers,
and the trained and the packaged model are compared on the validation set that the model was
trained with. The result of all this is printed and stored in the file; 'tessera inspect' shows
it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.serving.summary import human_bytes, summarize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "run_or_checkpoint",
        metavar="RUN_OR_CHECKPOINT",
        type=Path,
        help="run folder or checkpoint file that 'tessera train' wrote",
    )
    parser.add_argument(
        "--out", metavar="MODEL.pt", type=Path, required=True, help="the file to write or replace"
    )
    parser.add_argument(
        "--dtype",
        choices=["int8", "int4", "fp16", "fp32"],
        default="int8",
        help="how the tables' elements are stored (default int8)",
    )
    parser.add_argument(
        "--backend",
        choices=["tessera", "fbgemm"],
        help="whose operators the model calls (default tessera where its library is built, which "
        "'make build' does, and otherwise fbgemm, which is slower)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu"],
        default="cpu",
        help="the kind of device that the model will run on (default cpu)",
    )
    parser.add_argument(
        "--name", help="the model's name in servers and metrics (default: the file's name)"
    )
    parser.add_argument("--model-version", default="1", help="the model's version (default 1)")
    parser.add_argument(
        "--output-name", default="default", help="the name of the scores (default 'default')"
    )
    measuring = parser.add_mutually_exclusive_group()
    measuring.add_argument(
        "--evaluate-rows",
        type=_positive,
        metavar="N",
        help="compare on about the first N validation rows (default: on all)",
    )
    measuring.add_argument(
        "--no-evaluate",
        action="store_true",
        help="do not compare on the validation set; its data is then not needed",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of rows; give 1 or more")
    return value


def run(args: argparse.Namespace) -> int:
    """Package the model and print what came out."""
    from tessera.serving.packaging.package import (  # noqa: PLC0415 - loads torch
        PackageOptions,
        package_model,
    )

    chosen = {} if args.backend is None else {"backend": args.backend}
    options = PackageOptions(
        name=args.out.stem if args.name is None else args.name,
        version=args.model_version,
        dtype=args.dtype,
        output=args.output_name,
        **chosen,
    )
    manifest = package_model(
        args.run_or_checkpoint,
        args.out,
        options,
        evaluate_rows=args.evaluate_rows,
        skip_evaluation=args.no_evaluate,
    )
    print(summarize(manifest))
    if args.backend is None and manifest.backend != "tessera":
        print("the faster operators are not built here; 'make build' builds them")
    print()
    print(f"wrote {args.out} ({human_bytes(args.out.stat().st_size)})")
    return 0
