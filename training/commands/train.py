r"""Train a model from a YAML config into a run folder.

The run folder holds the resolved config, checkpoints, metrics.csv, TensorBoard events, and at the
end final.json and report.html.  Ctrl-C or SIGTERM finishes the step, writes a checkpoint and ends
with status 130; --resume then goes on exactly where it stopped.

  tessera train --config demo data.path=clicks.tsv train.epochs=2 --out runs/first
  tessera train --resume --out runs/first

--continue RUN begins a new run that goes on from another one with new data: with its weights, optimizer
states, vocabularies and count of steps.  Its config is that run's own unless --config is given:

  tessera train --continue runs/monday data.path=tuesday.parquet --out runs/tuesday

Under torchrun the ranks share every batch and spread the tables (train.sharding).  A worker that
fails is started again up to --max-restarts times, all ranks then go on from the last checkpoint:

  torchrun --nproc-per-node 4 --max-restarts 3 -m tessera train --config demo \
      train.checkpoint_every_steps=500 --out runs/first
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from tessera.engines import add_engine_flags, open_engine
from tessera.errors import UserError
from tessera.training.config import ExperimentConfig, find_config, load_config
from tessera.training.trainer.files import run_of
from tessera.training.trainer.run_folder import RunFolder, default_run_folder

EXIT_INTERRUPTED = 130
STOPPING = b"\nstopping after this step; once more stops at once\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML config, or the name of one that comes with Tessera (default with --resume and"
        " --continue: the run's own)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="change one key of the config, e.g. train.epochs=3; the value is YAML, a list stands in"
        " quotes, as 'model.over_layers=[128, 64]', and a relative path is taken from the working"
        " directory",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="run folder to write (default: runs/<config name>-<timestamp>)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the unfinished run in --out (default: refuse to touch it)",
    )
    parser.add_argument(
        "--continue",
        metavar="RUN",
        type=Path,
        dest="continues",
        help="begin with what this finished or stopped run has learned: a run folder, for its latest checkpoint, or"
        " a checkpoint in one (default: with fresh weights)",
    )
    add_engine_flags(parser, "rows that transforms learn from")
    parser.add_argument(
        "--help-config",
        nargs="?",
        const="",
        metavar="KEY",
        help="describe every key of a config, or KEY (a key, a section, or e.g. model.arch=din), and"
        " end (default: train)",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="show no progress (default: a bar on a terminal, else a line every 10 s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 finished, 130 interrupted."""
    return _train(args) if args.help_config is None else _help_config(args.help_config)


def _help_config(asked: str) -> int:
    """Print what the keys of a config mean."""
    from tessera.training.config_reference.collect import collect  # noqa: PLC0415
    from tessera.training.config_reference.render import terminal  # noqa: PLC0415

    print(terminal(collect(ExperimentConfig), asked))
    return 0


def _train(args: argparse.Namespace) -> int:
    # Read when torch loads its OpenMP.  Threads that spin while they wait made a two-thread run
    # take ten times the CPU time of a one-thread run where other processes wanted the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # --help must not wait for torch.
    from tessera.training.distributed.comm.environment import (  # noqa: PLC0415
        world_size_of_environment,
    )
    from tessera.training.trainer.ranks import is_restart, when_parent_dies  # noqa: PLC0415
    from tessera.training.trainer.run import train  # noqa: PLC0415

    many_ranks = world_size_of_environment() > 1
    if many_ranks and args.out is None:
        raise UserError("--out is missing; several ranks must be told the same run folder")
    speaks = os.environ.get("RANK", "0") == "0"
    if is_restart() and args.out is not None and RunFolder(args.out).is_run:
        args.resume, args.continues = True, None
    if args.resume and args.continues is not None:
        raise UserError(
            "--continue begins a new run in --out, and --resume goes on with the one that is there; give one"
        )
    if args.resume and args.out is None:
        raise UserError("--resume: say which run with --out DIR")
    path, name = _config_of(args)
    config = load_config(path, args.overrides)
    out = args.out or default_run_folder(
        config.run.name or name, datetime.now(tz=timezone.utc).astimezone()
    )
    engine = open_engine(args.engine, processes=args.processes, ray_address=args.ray_address)
    with stop_on_signals(STOPPING) as stop, when_parent_dies(lambda: _orphaned(stop)):
        result = train(
            config,
            out,
            resume=args.resume,
            continues=args.continues,
            progress=not args.quiet,
            should_stop=stop.is_set,
            engine=engine,
            publish=getattr(args, "publish_options", None),
        )
    if not speaks:
        return EXIT_INTERRUPTED if result.status == "interrupted" else 0
    if result.status == "interrupted":
        hint = f"tessera train --resume --out {shlex.quote(str(out))}"
        print(f"stopped after step {result.step}; go on with: {hint}", file=sys.stderr)
        return EXIT_INTERRUPTED
    folder = RunFolder(out)
    print(f"finished: {folder.summary()}; run folder: {out}")
    if folder.report.exists():
        print(f"report: {folder.report}")
    return 0


def _config_of(args: argparse.Namespace) -> tuple[Path, str]:
    """The config file that the flags mean, and what a run of it is called."""
    if args.config is not None:
        path = find_config(args.config)
        return path, path.stem
    if args.resume:
        path = RunFolder(args.out).config
        if not path.exists():
            raise UserError(f"--resume: there is no run in {args.out}; begin one with --config")
        return path, path.stem
    if args.continues is not None:
        folder = run_of(args.continues)
        path = RunFolder(folder).config
        if not path.exists():
            raise UserError(f"--continue: there is no run in {folder}; give a run folder")
        return path, folder.absolute().name
    raise UserError("--config is missing; give a YAML file, e.g. --config demo")


def _orphaned(stop: threading.Event) -> None:
    stop.set()
    with contextlib.suppress(OSError):  # where it goes may have died too
        os.write(2, b"\ntorchrun is gone, or what else started this; stopping after this step\n")


@contextlib.contextmanager
def stop_on_signals(message: bytes) -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one acts as it always does.

    The first one writes ``message`` on stderr.
    """
    stop = threading.Event()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        stop.set()
        # os.write: a print here could fall into another print.
        os.write(2, message)
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
