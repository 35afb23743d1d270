"""The time of a step of modules, pipelines and replicas, beside TorchRec's at random shapes.

Managed collisions, pools, metrics and dense modules run in one process, pipelines, `DMPCollection` and sharded pools on ranks
joined by gloo, all on the CPU with one thread each, or with ``--device cuda`` on a GPU each joined by NCCL.  Times are of the
processor in one process on the CPU, so that other work on the machine matters little, and else elapsed times,
on a GPU to the end of what it was given.  Each case is drawn at a few random shapes.  The two libraries take turns in the
same processes, on the same data, and first give the same values where the case has any to compare.  The ratio is
TorchRec's time by Tessera's in each round, its median over the rounds.

    python -m tessera.training.bench.modules_versus_torchrec [--shapes 3] [--only metrics]

``--against-itself`` measures TorchRec's steps twice, in both places: so much ratios differ from 1 where nothing differs.

Run it with the interpreter of an environment where TorchRec is installed.  The last line is the worst ratio.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from tessera.training.bench.harness import (
    arguments,
    in_turns,
    machine,
    medians,
    print_head,
    print_row,
)
from tessera.training.bench.model_steps import MODELS
from tessera.training.bench.module_steps import MODULES, Case, Shape, Step
from tessera.training.bench.parallel_steps import PARALLEL
from tessera.training.bench.pipelines_versus_torchrec import let_cpu_streams_pass
from tessera.training.bench.ranks import in_ranks
from tessera.training.bench.sharded_steps import Library, libraries

WARM = 5
CASES = {**MODULES, **MODELS}
RTOL, ATOL = 1e-4, 1e-5  # float32, sums in another order


def on_slowest(seconds: float, device: torch.device) -> float:
    """The longest of the ranks' times."""
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def mean_seconds(step: Callable[[], Any], calls: int, device: torch.device) -> float:
    """The mean time of some calls: of the processor in one process on the CPU, elapsed and on the slowest rank else."""
    ranks, on_gpu = dist.is_initialized(), device.type == "cuda"
    clock = time.perf_counter if ranks or on_gpu else time.process_time
    if ranks:
        dist.barrier()
    if on_gpu:
        torch.cuda.synchronize(device)
    begin = clock()
    for _ in range(calls):
        step()
    if on_gpu:
        torch.cuda.synchronize(device)
    taken = (clock() - begin) / calls
    return on_slowest(taken, device) if ranks else taken


def begun(
    library: Library, case: Case, shape: Shape, device: torch.device
) -> tuple[Step | None, Any]:
    """A library's step and what its first call gave, or None and what a peer raised."""
    try:
        step = case.make(library, shape, device)
        first = step()
        for _ in range(WARM):  # some steps are taken every few times
            step()
    except Exception as error:
        if library.root != "torchrec":
            raise
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        return step, first


def contenders(*, against_itself: bool) -> list[Library]:
    """Both libraries, or TorchRec in the place of both.

    Raises:
        ValueError: there is no TorchRec to measure against itself.
    """
    found = libraries()
    if not against_itself:
        return found
    if len(found) < 2:
        raise ValueError("--against-itself: TorchRec is not installed here; install it")
    return [replace(found[1], name="tessera"), found[1]]


def measure(
    case: Case,
    shape: Shape,
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    against_itself: bool = False,
) -> dict[str, Any]:
    """Seconds of each library's step and their ratio; in place of a library that raises, its error.

    Raises:
        AssertionError: the libraries do not compute the same.
    """
    steps, errors, first = {}, {}, {}
    for library in contenders(against_itself=against_itself):
        step, outcome = begun(library, case, shape, device)
        if step is None:
            errors[library.name] = outcome
        else:
            steps[library.name], first[library.name] = step, outcome
    if case.equal and len(first) == 2:
        ours, theirs = first["tessera"], first["torchrec"]
        torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=ATOL, check_dtype=False)
    if not steps:  # TorchRec's against itself
        return {"errors": errors}
    once = max(mean_seconds(step, 2, device) for step in steps.values())
    calls = max(1, round(seconds / rounds / len(steps) / once))
    measures = {name: partial(mean_seconds, step, calls, device) for name, step in steps.items()}
    times = in_turns(measures, rounds)
    found: dict[str, Any] = {**medians(times), "errors": errors}
    if "torchrec" in times:
        pairs = zip(times["torchrec"], times["tessera"], strict=True)
        found["ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return found


def tell(name: str, shape: Shape, found: dict[str, Any]) -> None:
    """Prints one row of the table."""
    words = ", ".join(f"{key} {value}" for key, value in shape.items())
    ours, theirs = (
        f"{found[library] * 1e6:.0f}" if library in found else "-"
        for library in ("tessera", "torchrec")
    )
    ratio = (
        f"{found['ratio']:.2f}" if "ratio" in found else "; ".join({*found["errors"].values()})[:80]
    )
    print_row(name, words, ours, theirs, ratio)


def work(  # noqa: PLR0917 - the ranks get them by place
    cases: dict[str, Case],
    device: str,
    names: list[str],
    shapes: int,
    rounds: int,
    seconds: float,
    seed: int,
    against_itself: bool,  # noqa: FBT001 - as above
) -> list[tuple[float, str]]:
    """The ratios of cases at random shapes, each with its name; rank 0 prints them."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = torch.device("cuda", rank) if device == "cuda" else torch.device(device)
    ratios = []
    for name in names:
        generator = torch.Generator().manual_seed(seed)
        seen: list[Shape] = []
        for _ in range(20 * shapes):
            shape = cases[name].draw(generator)
            if len(seen) < shapes and shape not in seen:
                seen.append(shape)
        for shape in seen:
            found = measure(
                cases[name],
                shape,
                place,
                rounds=rounds,
                seconds=seconds,
                against_itself=against_itself,
            )
            if rank == 0:
                tell(name, shape, found)
            if "ratio" in found:
                ratios.append((found["ratio"], name))
    return ratios


def parallel(device: str, *given: Any) -> list[tuple[float, str]]:
    """What a rank runs."""
    warnings.simplefilter("ignore")
    if device == "cpu":
        let_cpu_streams_pass()
    return work(PARALLEL, device, *given)


def worst(ratios: Iterable[tuple[float, str]]) -> str:
    """The last line: how many steps are not slower than TorchRec's, and the slowest of them."""
    found = list(ratios)
    if not found:
        return "no ratio: TorchRec is not installed here, or has no step of these"
    ratio, name = min(found)
    fast = sum(each >= 1 for each, _ in found)
    middle = math.exp(statistics.fmean(math.log(each) for each, _ in found))
    return (
        f"{fast} of {len(found)} steps take no longer than TorchRec's; the geometric mean of the ratios is "
        f"{middle:.2f}, the worst {ratio:.2f} ({name})"
    )


def main() -> int:
    """Runs the command line."""
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--only", default="", help="part of the names of cases; default all")
    parser.add_argument("--shapes", type=int, default=3, help="random shapes of each case (3)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (7)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for a shape, about (2)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of cases over ranks (2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes (0)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--one-process", action="store_true", help="no cases over ranks")
    which.add_argument("--over-ranks", action="store_true", help="cases over ranks alone")
    parser.add_argument("--against-itself", action="store_true", help="TorchRec in both places")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    given = (args.shapes, args.rounds, args.seconds, args.seed, args.against_itself)
    here = [name for name in CASES if args.only in name and not args.over_ranks]
    over_ranks = [name for name in PARALLEL if args.only in name and not args.one_process]
    if not here and not over_ranks:
        names = ", ".join([*CASES, *PARALLEL])
        parser.error(
            f"--only {args.only!r}: no case has it in its name; give a part of one of {names}"
        )
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{machine()}, {args.ranks} ranks, on {where}")
    print_head("step", "shape", "Tessera, us", "TorchRec, us", "ratio")
    ratios = work(CASES, args.device, here, *given)
    if over_ranks:
        backend = "nccl" if args.device == "cuda" else "gloo"
        found = in_ranks(parallel, args.ranks, backend, args.device, over_ranks, *given)
        ratios += [(ratio, name) for ratio, name in found]
    print(worst(ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
