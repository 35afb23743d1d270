"""Quantize, trace and script a trained model into one file that servers load.

RUN_OR_CHECKPOINT is a run folder of 'tessera train' (its best checkpoint is taken) or one
checkpoint file. Several of them become an ensemble in one file, whose scores are the sigmoid of the
mean of their logits. Instead of runs, --factory names a function of your own that returns a module,
a ModelInputs (or None) and a sample batch. The tables' rows are stored as --dtype, and the file is
checked by golden answers; a trained model and its package are also compared on the validation
set that the model was trained with. The result of all this is printed and stored in the file;
'tessera inspect' shows it again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.errors import UserError
from tessera.kernels.row_type_names import ROW_TYPE_NEEDS
from tessera.serving.commands.flags import add_measuring, fields_of, positive
from tessera.serving.commands.loading_flags import add_allow_op
from tessera.serving.inspect.summary import human_bytes, summarize

if TYPE_CHECKING:
    from tessera.serving.package.manifest import Manifest
    from tessera.serving.packaging.options import PackageOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "runs_or_checkpoints",
        metavar="RUN_OR_CHECKPOINT",
        nargs="*",
        type=Path,
        help="run folder or checkpoint file that 'tessera train' wrote; several, trained on the same "
        "columns, become an ensemble",
    )
    parser.add_argument(
        "--weights",
        metavar="W,W,...",
        type=_numbers,
        help="what each of several runs counts in the mean of their logits (default: all the same)",
    )
    parser.add_argument(
        "--factory",
        metavar="PKG.MODULE:FUNCTION",
        help="package what this function returns instead of a run (module, ModelInputs or None, "
        "sample batch); the working directory is searched first (default: none)",
    )
    _add_destination(parser)
    parser.add_argument(
        "--output-name",
        dest="output",
        metavar="OUTPUT_NAME",
        default="default",
        help="the name of the scores, where the model gives one output (default 'default')",
    )
    parser.add_argument(
        "--tower",
        choices=["user", "item"],
        help="package one tower of a run with model.arch=two_tower: its side's features in, the vector "
        "out; nothing is compared on the validation set (default: the whole model, which scores pairs)",
    )
    _add_storage(parser)
    _add_places(parser)
    parser.add_argument(
        "--leaf-module",
        dest="leaf_modules",
        metavar="NAME",
        action="append",
        default=[],
        help="qualified name or class name of a submodule of the --factory's module that cannot be "
        "traced and is compiled whole; may be given again (default: none)",
    )
    add_allow_op(parser)
    parser.add_argument(
        "--sign",
        dest="sign_key",
        metavar="KEY.pem",
        type=Path,
        help="sign the package with this private Ed25519 key, as 'tessera keygen' writes it "
        "(default: not signed; 'tessera sign' can do it later)",
    )
    add_measuring(parser)


def _add_destination(parser: argparse.ArgumentParser) -> None:
    destination = parser.add_mutually_exclusive_group(required=True)
    destination.add_argument(
        "--out", metavar="MODEL.pt", type=Path, help="the file to write or replace"
    )
    destination.add_argument(
        "--repository",
        metavar="DIR",
        type=Path,
        help="instead of --out: add a version to this repository of models, as DIR/NAME/N/model.pt; "
        "it appears there as a whole, for servers with --model-repository DIR",
    )
    parser.add_argument(
        "--version",
        dest="repository_version",
        metavar="N",
        type=positive,
        help="the version's number in the --repository, which must be new there (default: the highest "
        "that there is + 1)",
    )
    parser.add_argument(
        "--name",
        help="the model's name in servers and metrics (default with --out: the file's name; with "
        "--repository it is the model's folder and must be given)",
    )
    parser.add_argument(
        "--model-version",
        dest="version",
        metavar="MODEL_VERSION",
        help="the version that the package of --out calls itself (default 1); in a --repository it is "
        "the folder's number",
    )


def _add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=list(ROW_TYPE_NEEDS),
        default="int8",
        help="how the tables' elements are stored (default int8; int8b keeps a scale per 16 columns "
        "inside the row, for the fastest GPU lookups; "
        + "; ".join(f"{name} needs {needs}" for name, needs in ROW_TYPE_NEEDS.items() if needs)
        + ")",
    )
    parser.add_argument(
        "--table-dtype",
        dest="table_dtypes",
        metavar="PATTERN=DTYPE",
        action="append",
        default=[],
        type=_pair,
        help="another type for the tables whose names fit the pattern (* and ?), such as "
        "'user_*=int4'; may be given again, the first that fits counts (default: none)",
    )
    parser.add_argument(
        "--max-table-error",
        type=float,
        metavar="SHARE",
        help="a table whose RMSE is more than this share of its elements' root mean square keeps "
        "the next wider of int2, int4, int8, fp16, fp32 that loses less (default: no bound)",
    )
    parser.add_argument(
        "--dense-dtype",
        choices=["fp32", "bf16", "fp8"],
        default="fp32",
        help="how the dense layers' weights are stored (default fp32); bf16 and fp8 round their inputs "
        "too and need the tessera backend; bf16 is for GPUs and for CPUs with AMX (on other CPUs it is "
        "no faster), fp8 (e4m3) for GPUs",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="also write what each weight type would cost and save (bytes, errors, AUC, normalised "
        "entropy), as HTML where FILE ends in .html, else as text (default: no report; it takes "
        "as long as packaging once per type)",
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=["tessera", "fbgemm"],
        help="whose operators the model calls (default tessera where its library is built, which "
        "'make build' does, and otherwise fbgemm, which is slower)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="the kind of device that the model will run on (default cpu); needs no GPU here",
    )
    parser.add_argument(
        "--shards",
        type=positive,
        default=1,
        metavar="N",
        help="over how many devices of one process the tables are spread (default 1)",
    )
    parser.add_argument(
        "--sharding",
        choices=["auto", "table_wise", "row_wise", "column_wise"],
        default="auto",
        help="how: whole tables, runs of rows or runs of columns; auto (the default) cuts the rows "
        "of tables that are larger than a device's equal part and leaves the others whole",
    )
    parser.add_argument(
        "--table-sharding",
        metavar="PATTERN=SHARDING",
        action="append",
        default=[],
        type=_pair,
        help="another way for the tables whose names fit the pattern (* and ?); may be given "
        "again, the first that fits counts (default: none)",
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN.json",
        type=Path,
        help="a file with the shards of each table, as the plan in 'tessera inspect --json', "
        "instead of the three flags above (default: none)",
    )


def _pair(text: str) -> tuple[str, str]:
    pattern, equals, value = text.rpartition("=")
    if not equals or not pattern or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=VALUE, such as 'user_*=int4'")
    return pattern, value


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not W,W,..., such as 2,1") from None


def run(args: argparse.Namespace) -> int:
    """Package the model and print what came out."""
    if bool(args.runs_or_checkpoints) == (args.factory is not None):
        raise UserError("give either RUN_OR_CHECKPOINT or --factory PKG.MODULE:FUNCTION")
    if args.factory is None and args.leaf_modules:
        raise UserError("--leaf-module is for a --factory's module; leave it out for a run")
    if args.factory is not None and (args.no_evaluate or args.evaluate_rows is not None):
        raise UserError(
            "--evaluate-rows and --no-evaluate are for a run, which has validation data; leave them "
            "out with --factory"
        )
    if args.weights is not None and len(args.runs_or_checkpoints) < 2:
        raise UserError("--weights is for several runs; give two or more, or leave it out")
    if args.tower is not None and (args.factory is not None or args.evaluate_rows is not None):
        other = "--factory" if args.factory is not None else "--evaluate-rows"
        raise UserError(f"{other} does not go with --tower; leave one of them out")
    if args.tower is not None and len(args.runs_or_checkpoints) > 1:
        raise UserError("--tower is for one run; give one")
    _check_destination(args)
    manifest, path = _write(args, _options(args))
    print(summarize(manifest))
    if args.backend is None and manifest.backend != "tessera":
        print("the faster operators are not built here; 'make build' builds them")
    print()
    print(f"wrote {path} ({human_bytes(path.stat().st_size)})")
    return 0


def _check_destination(args: argparse.Namespace) -> None:
    if args.repository is None:
        if args.repository_version is not None:
            raise UserError("--version is for --repository; with --out give --model-version")
    elif args.version is not None:
        raise UserError(
            f"--model-version {args.version} does not go with --repository, where the version is its "
            "folder's number; give --version N, or neither for the next number"
        )
    elif args.name is None:
        raise UserError("--repository needs --name NAME, the model's folder in it")


def _write(args: argparse.Namespace, options: PackageOptions) -> tuple[Manifest, Path]:
    """Package to the place that the flags name; the manifest, and the file that there now is."""
    from tessera.serving.packaging.write.publish import publishing  # noqa: PLC0415 - as _package

    if args.repository is None:
        return _package(args, args.out, options), args.out
    with publishing(args.repository, options.name, args.repository_version) as new:
        numbered = replace(options, version=str(new.number))
        manifest = _package(args, new.draft, numbered)
    return manifest, new.path


def _options(args: argparse.Namespace) -> PackageOptions:
    from tessera.serving.packaging.options import PackageOptions  # noqa: PLC0415 - loads torch
    from tessera.serving.packaging.tables.shard import read_plan  # noqa: PLC0415 - likewise

    chosen = fields_of(PackageOptions, args) | {
        "name": args.out.stem if args.name is None else args.name,
        "version": "1" if args.version is None else args.version,
        "table_dtypes": dict(args.table_dtypes),
        "table_sharding": dict(args.table_sharding),
        "plan": None if args.plan is None else read_plan(args.plan),
    }
    if args.backend is None:
        del chosen["backend"]
    return PackageOptions(**chosen)


def _package(args: argparse.Namespace, out: Path, options: PackageOptions) -> Manifest:
    from tessera.serving.packaging import package  # noqa: PLC0415 - loads torch
    from tessera.serving.packaging.source import load_source  # noqa: PLC0415 - likewise

    if args.factory is not None:
        source = load_source(args.factory)
        return package.package_source(
            source,
            out,
            options,
            origin=package.module_origin(source[0]),
            report=args.report,
            progress=True,
        )
    return package.package_runs(
        args.runs_or_checkpoints,
        out,
        options,
        weights=args.weights,
        evaluate_rows=args.evaluate_rows,
        skip_evaluation=args.no_evaluate,
        tower=args.tower,
        report=args.report,
    )
