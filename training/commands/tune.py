r"""Search for settings: many trainings, each with other values of the keys that you name.

Optuna's TPE sampler chooses the values by the validation rows; the test rows are never looked at.
VALUES is a list of choices, or uniform(LOW, HIGH), log_uniform(LOW, HIGH), int(LOW, HIGH) or
log_int(LOW, HIGH).

  tessera tune --config data.yaml --over 'train.dense_optimizer.learning_rate=log_uniform(1e-4, 1e-2)' \
      --over 'model.over_layers=[[64], [128, 64]]' --trials 30 --processes 2 --out runs/search
  tessera tune --resume --out runs/search --trials 60
  tessera train --config runs/search/best.yaml --out runs/best

Each trial is a tessera train of its own, with its share of the CPU threads. One that fails or diverges is
written down and the search goes on. Ctrl-C ends the trials with a checkpoint each; --resume takes them up
there, also after the machine went down. The folder holds best.yaml (a whole config), trials.csv,
report.html and the trials' run folders.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tessera.errors import UserError
from tessera.training.commands.train import stop_on_signals
from tessera.training.config import find_config
from tessera.training.config_source import apply_overrides, read_yaml

if TYPE_CHECKING:
    from tessera.training.tuning.settings import Search, SearchFolder
    from tessera.training.tuning.study import Study

EXIT_INTERRUPTED = 130
STOPPING = b"\nending the trials with a checkpoint each; once more ends them at once\n"
OF_A_NEW_SEARCH = ("config", "overrides", "space", "over", "metric", "seed", "prune")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the config that every trial begins with, or the name of one that comes with Tessera"
        " (default with --resume: the search's own)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="change one key of that config, as in tessera train",
    )
    parser.add_argument(
        "--space",
        type=Path,
        metavar="FILE",
        help="YAML file of KEY: VALUES, the keys to search (default: those of --over alone)",
    )
    parser.add_argument(
        "--over",
        action="append",
        metavar="KEY=VALUES",
        help="one more key to search, e.g. 'model.dropout=uniform(0, 0.5)'; may be given several"
        " times (default: those of --space alone)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--trials",
        type=int,
        default=20,
        metavar="N",
        help="trials in all, those of earlier calls, failed and pruned ones included (default: 20)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="P",
        help="trials at a time; the CPU threads, or the GPUs, are dealt out among them (default: 1)",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="what to look for on the validation rows: auc, log_loss, loss, normalised_entropy,"
        " mean_squared_error, ..., with several labels also LABEL.auc (default: the config's"
        " train.metric)",
    )
    parser.add_argument(
        "--prune",
        choices=("none", "median", "halving"),
        help="end trials early: those below the median of the others at the same evaluation, or all"
        " but the best third (successive halving); needs several evaluations, see"
        " train.eval_every_steps (default: none)",
    )
    parser.add_argument("--seed", type=int, help="of the sampler (default: 0)")
    parser.add_argument(
        "--keep",
        choices=("best", "all"),
        default="best",
        help="whose checkpoints stay (default: best, the best trial's alone)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the search in --out (default: refuse to touch it)",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="show no progress (default: a bar on a terminal, and a line for each trial)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 finished, 130 interrupted."""
    from tessera.training.tuning.settings import SearchFolder  # noqa: PLC0415 - loads torch
    from tessera.training.tuning.study import Study, require_optuna  # noqa: PLC0415

    for name in ("trials", "processes"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: give at least 1")
    require_optuna()
    folder = SearchFolder(args.out)
    _require_fit(folder.root, folder.search, resume=args.resume)
    with stop_on_signals(STOPPING) as stop, folder.locked():
        search = _search(args, folder)
        study = Study(folder.database, search)
        return _run(args, folder, search, study, stop)


def _require_fit(root: Path, search: Path, *, resume: bool) -> None:
    if resume and not search.exists():
        raise UserError(f"--resume: there is no search in {root}; leave --resume out")
    if not resume and search.exists():
        raise UserError(
            f"{root} holds a search; add --resume to go on with it, or give another --out"
        )
    if not resume and root.exists() and any(path.name != ".lock" for path in root.iterdir()):
        raise UserError(f"{root} is not empty and holds no search; give another --out")


def _search(args: argparse.Namespace, folder: SearchFolder) -> Search:
    """The search of the folder, which a new one is written into."""
    from tessera.training.tuning.metric import parse_metric  # noqa: PLC0415 - loads torch
    from tessera.training.tuning.settings import Search  # noqa: PLC0415
    from tessera.training.tuning.space import read_space  # noqa: PLC0415

    if args.resume:
        given = [name for name in OF_A_NEW_SEARCH if getattr(args, name) not in (None, [])]
        if given:
            names = ", ".join("KEY=VALUE" if name == "overrides" else f"--{name}" for name in given)
            raise UserError(f"--resume takes {names} from {folder.root}; leave that out")
        return Search.from_json(folder.search)
    if args.config is None:
        raise UserError("--config is missing; give a YAML file, e.g. --config demo")
    space = tuple(read_space(args.space, args.over or ()))
    fixed = {item.partition("=")[0].strip() for item in args.overrides}
    twice = [own.key for own in space if own.key in fixed]
    if twice:
        raise UserError(f"{twice[0]} is searched and set to one value; leave one of the two out")
    base = apply_overrides(read_yaml(find_config(args.config)), args.overrides)
    text = yaml.safe_dump(base.values, sort_keys=False, allow_unicode=True)
    folder.write(folder.base, text)
    try:
        search = Search(
            space=space,
            metric=parse_metric(args.metric or "auc"),
            seed=args.seed or 0,
            prune=args.prune or "none",
            folder=str(Path.cwd()),
        )
        if args.metric is None:
            metric = parse_metric(search.config(folder.base).train.metric)
            search = dataclasses.replace(search, metric=metric)
        search.check(folder.base)
    except BaseException:
        folder.base.unlink()
        raise
    folder.write(folder.search, search.to_json())
    return search


def _run(
    args: argparse.Namespace,
    folder: SearchFolder,
    search: Search,
    study: Study,
    stop: threading.Event,
) -> int:
    from tessera.training.tuning.result import terminal_table, write_result  # noqa: PLC0415
    from tessera.training.tuning.tuner import Tuner  # noqa: PLC0415 - loads torch

    tuner = Tuner(
        folder=folder,
        search=search,
        study=study,
        trials=args.trials,
        processes=args.processes,
        keep_all=args.keep == "all",
        progress=not args.quiet,
        should_stop=stop.is_set,
        on_trial=lambda: write_result(folder, search, study, report=False),
    )
    enough = tuner.run()
    write_result(folder, search, study, report=True)
    print(terminal_table(study.records(), search))
    if not enough:
        hint = f"tessera tune --resume --out {shlex.quote(str(args.out))} --trials {args.trials}"
        print(f"stopped; go on with: {hint}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if study.best() is None:
        last = study.records()[-1]
        raise UserError(
            f"no trial is complete; the last one: {last.reason} ({folder.log(last.number)})"
        )
    print(f"best: {folder.best}; train it: tessera train --config {shlex.quote(str(folder.best))}")
    print(f"report: {folder.report}")
    return 0
