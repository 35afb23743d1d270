"""The time of a step of modules, pipelines and replicas, beside TorchRec's at random shapes.

Managed collisions, pools, metrics and dense modules run in one process, pipelines, `DMPCollection` and sharded pools on ranks
joined by gloo, all on the CPU with one thread each, or with ``--device cuda`` on a GPU each joined by NCCL.  Each step has
two times: of the processor, of all ranks together, which other work on the machine changes little; and elapsed, of the
slowest rank, on a GPU to the end of what it was given.  The two libraries take turns in the same processes, on the same
data, and first give the same values where the case has any to compare.  A ratio is TorchRec's time by Tessera's in each
round, its median over the rounds.

    python -m tessera.training.bench.modules_versus_torchrec [--shapes 3] [--only metrics]
    python -m tessera.training.bench.modules_versus_torchrec --random 10 --seed 5

Each case is drawn at a few random shapes: with ``--shapes`` of the numbers that it names, with ``--random`` of all numbers
from half the least of those to twice the largest.  ``--against-itself`` measures TorchRec's steps twice, in both places: so
much ratios differ from 1 where nothing differs.

Run it with the interpreter of an environment where TorchRec is installed.  The last lines are how many steps take no
longer than TorchRec's by either time, and the worst of them.
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
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from tessera.training.bench.harness import (
    arguments,
    in_turns,
    machine,
    print_head,
    print_row,
)
from tessera.training.bench.model_steps import MODELS
from tessera.training.bench.module_steps import MODULES, Case, Draws, Shape, Step
from tessera.training.bench.parallel_steps import PARALLEL
from tessera.training.bench.pipelines_versus_torchrec import let_cpu_streams_pass
from tessera.training.bench.ranks import in_ranks
from tessera.training.bench.sharded_steps import Library, libraries

WARM = 5
CASES = {**MODULES, **MODELS}
RTOL, ATOL = 1e-4, 1e-5  # float32, sums in another order


class Times(NamedTuple):
    """Seconds of a step, or ratios of such.

    Attributes:
        cpu: of the processor, of all ranks together.
        elapsed: of the slowest rank.
    """

    cpu: float
    elapsed: float


def over_ranks(times: Times, device: torch.device) -> Times:
    """The ranks' times as one."""
    cpu, elapsed = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(cpu)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return Times(float(cpu), float(elapsed))


def mean_times(step: Callable[[], Any], calls: int, device: torch.device) -> Times:
    """The mean times of some calls."""
    ranks, on_gpu = dist.is_initialized(), device.type == "cuda"
    if ranks:
        dist.barrier()
    if on_gpu:
        torch.cuda.synchronize(device)
    cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(calls):
        step()
    if on_gpu:
        torch.cuda.synchronize(device)
    elapsed = (time.perf_counter() - begin) / calls
    found = Times((time.process_time() - cpu) / calls, elapsed)
    return over_ranks(found, device) if ranks else found


def middle(times: Iterable[Times]) -> Times:
    """The median of each kind of time."""
    cpu, elapsed = zip(*times, strict=True)
    return Times(statistics.median(cpu), statistics.median(elapsed))


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
    """The `Times` of each library's step and their ratio; in place of a library that raises, its error.

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
    once = max(mean_times(step, 2, device).elapsed for step in steps.values())
    calls = max(1, round(seconds / rounds / len(steps) / once))
    measures = {name: partial(mean_times, step, calls, device) for name, step in steps.items()}
    times = in_turns(measures, rounds)
    found: dict[str, Any] = {name: middle(of) for name, of in times.items()}
    found["errors"] = errors
    if "torchrec" in times:
        pairs = zip(times["torchrec"], times["tessera"], strict=True)
        found["ratio"] = middle(
            Times(theirs.cpu / ours.cpu, theirs.elapsed / ours.elapsed) for theirs, ours in pairs
        )
    return found


def words(shape: Shape) -> str:
    """A shape as the table tells it."""
    return ", ".join(f"{key} {value}" for key, value in shape.items())


def tell(name: str, shape: Shape, found: dict[str, Any]) -> None:
    """Prints one row of the table."""
    cells: list[str] = []
    for kind in Times._fields:
        cells += [
            f"{getattr(found[library], kind) * 1e6:.0f}" if library in found else "-"
            for library in ("tessera", "torchrec")
        ]
        if "ratio" in found:
            cells.append(f"{getattr(found['ratio'], kind):.2f}")
        else:
            cells.append("; ".join({*found["errors"].values()})[:80])
    print_row(name, words(shape), *cells)


Ratio = tuple[str, str, float, float]
"""A case, its shape, and the ratios of its times by the processor and elapsed."""


def work(  # noqa: PLR0917 - as below
    cases: dict[str, Case],
    device: str,
    names: list[str],
    shapes: int,
    anywhere: bool,  # noqa: FBT001 - the ranks get them by place
    rounds: int,
    seconds: float,
    seed: int,
    against_itself: bool,  # noqa: FBT001 - as above
) -> list[Ratio]:
    """The ratios of cases at random shapes; rank 0 prints them."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = torch.device("cuda", rank) if device == "cuda" else torch.device(device)
    ratios = []
    for name in names:
        draws = Draws(torch.Generator().manual_seed(seed), anywhere)
        seen: list[Shape] = []
        for _ in range(20 * shapes):
            shape = cases[name].draw(draws)
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
                ratios.append((name, words(shape), *found["ratio"]))
    return ratios


def parallel(device: str, *given: Any) -> list[Ratio]:
    """What a rank runs."""
    warnings.simplefilter("ignore")
    if device == "cpu":
        let_cpu_streams_pass()
    return work(PARALLEL, device, *given)


def summary(ratios: Iterable[Ratio]) -> list[str]:
    """The last lines: how many steps are not slower than TorchRec's by either time, and the slowest of them."""
    found = list(ratios)
    if not found:
        return ["no ratio: TorchRec is not installed here, or has no step of these"]
    lines = []
    for place, kind in enumerate(("time of the processor", "elapsed time"), start=2):
        of = [float(ratio[place]) for ratio in found]
        mean = math.exp(statistics.fmean(math.log(each) for each in of))
        name, shape = found[of.index(min(of))][:2]
        lines.append(
            f"{sum(each >= 1 for each in of)} of {len(of)} steps take no longer than TorchRec's by {kind}; the "
            f"geometric mean of the ratios is {mean:.2f}, the worst {min(of):.2f} ({name}; {shape})"
        )
    slow = sorted((ratio for ratio in found if min(ratio[2:]) < 1), key=lambda ratio: ratio[2])
    return lines + [
        f"{cpu:.2f} by the processor's, {elapsed:.2f} by elapsed time: {name}; {shape}"
        for name, shape, cpu, elapsed in slow
    ]


def main() -> int:
    """Runs the command line."""
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--only", default="", help="part of the names of cases; default all")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--shapes", type=int, default=3, help="random shapes of each case (3)")
    number.add_argument("--random", type=int, help="the same, of any numbers in wider ranges")
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
    shapes = args.shapes if args.random is None else args.random
    given = (
        shapes,
        args.random is not None,
        args.rounds,
        args.seconds,
        args.seed,
        args.against_itself,
    )
    here = [name for name in CASES if args.only in name and not args.over_ranks]
    parallel_names = [name for name in PARALLEL if args.only in name and not args.one_process]
    if not here and not parallel_names:
        names = ", ".join([*CASES, *PARALLEL])
        parser.error(
            f"--only {args.only!r}: no case has it in its name; give a part of one of {names}"
        )
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{machine()}, {args.ranks} ranks, on {where}")
    kinds = ("of CPU", "elapsed")
    heads = [
        f"{cell} {kind}" for kind in kinds for cell in ("Tessera, us", "TorchRec, us", "ratio")
    ]
    print_head("step", "shape", *heads)
    ratios = work(CASES, args.device, here, *given)
    if parallel_names:
        backend = "nccl" if args.device == "cuda" else "gloo"
        found = in_ranks(parallel, args.ranks, backend, args.device, parallel_names, *given)
        ratios += [(name, shape, cpu, elapsed) for name, shape, cpu, elapsed in found]
    print(*summary(ratios), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
