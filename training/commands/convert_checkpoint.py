"""Convert a checkpoint of TorchRec for Tessera, or one of Tessera for TorchRec.

  tessera convert-checkpoint torchrec-checkpoint --to tessera --out checkpoint
  tessera convert-checkpoint model.pt --to tessera --out converted.pt --dry-run
  tessera convert-checkpoint runs/first --to torchrec --take arch. --out model.pt

SOURCE is a folder of torch.distributed.checkpoint, a file of torch.save (a state dict, or a dictionary
with the model's and the optimizer's), or a checkpoint or run folder of Tessera.  Nothing in it is run.
Names of cross networks, the order of the columns above a DLRM's pairs, and names and shapes of optimizer
states are converted, and the listing says which.  A whole checkpoint is held in memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the checkpoint to convert")
    parser.add_argument(
        "--to",
        choices=["tessera", "torchrec"],
        required=True,
        help="the library that is to load the result; SOURCE is of the other one",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="what to write: a file of torch.save if it ends in .pt or .pth, otherwise a folder of "
        "torch.distributed.checkpoint (default: none, which needs --dry-run)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list every entry and what it becomes, and write nothing (default: write)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace PATH if it is there (default: refuse to)",
    )
    parser.add_argument(
        "--only-model",
        action="store_true",
        help="leave the states of optimizers out (default: convert them)",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="finished steps, for Adam and LAMB on tables: TorchRec does not save them (default: none)",
    )
    parser.add_argument(
        "--take",
        default="",
        metavar="PREFIX",
        help="convert the entries below this prefix, without it, such as arch. of a run of tessera train "
        "(default: all)",
    )
    parser.add_argument(
        "--put",
        default="",
        metavar="PREFIX",
        help="put this before every entry's name, such as model. for DLRMTrain (default: nothing)",
    )
    parser.add_argument(
        "--keep-columns",
        action="store_true",
        help="take no layer for the one above a DLRM's pairs (default: known by its name and width)",
    )
    parser.add_argument(
        "--model-key",
        default="",
        metavar="KEY",
        help="where SOURCE has the model's state dict (default: model, model_state_dict, state_dict or module)",
    )
    parser.add_argument(
        "--optimizer-key",
        default="",
        metavar="KEY",
        help="where SOURCE has the optimizer's (default: optimizer, optimizer_state_dict, optim or optimizers)",
    )


def run(args: argparse.Namespace) -> int:
    """Read, convert, list and write."""
    from tessera.training.conversion.convert import converted  # noqa: PLC0415 - loads torch
    from tessera.training.conversion.sources import Choice, read_source  # noqa: PLC0415
    from tessera.training.conversion.targets import write_target  # noqa: PLC0415

    if args.out is None and not args.dry_run:
        raise UserError("give --out with what to write, or --dry-run")
    if args.out is not None and args.out.exists() and not args.overwrite and not args.dry_run:
        raise UserError(f"--out {args.out}: is there already; give another name or --overwrite")
    if args.step is not None and args.step < 0:
        raise UserError(f"--step {args.step}: give the number of finished steps, 0 or more")
    if args.step is not None and args.to == "torchrec":
        raise UserError("--step: TorchRec keeps no count of steps for tables; leave it out")
    choice = Choice(
        model_key=args.model_key,
        optimizer_key=args.optimizer_key,
        only_model=args.only_model,
        take=args.take,
        put=args.put,
        only_shapes=args.dry_run,
    )
    content, ours = read_source(args.source, choice)
    if ours and args.to == "tessera":
        raise UserError(f"{args.source} is a checkpoint of Tessera's already; give --to torchrec")
    result, lines = converted(content, args.to, step=args.step, keep_columns=args.keep_columns)
    for line in lines:
        if line.changed or args.dry_run:
            print(line)
    for text in result.left_out:
        print(f"left out: {text}")
    same = sum(not line.changed for line in lines)
    print(f"{len(lines) - same} entries are converted, {same} stay as they are")
    if not args.dry_run:
        write_target(args.out, result, args.to)
        print(f"written: {args.out}")
    return 0
