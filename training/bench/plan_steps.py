"""Training steps by this planner's plans and by TorchRec's, on ranks of this machine's CPUs.

    python -m tessera.training.bench.plan_steps [--models 50] [--seed 0] [--ranks 2] [--rounds 9] [--seconds 0.3] [--fused-only]

TorchRec must be installed. For each of the seeded random models (3 to 10 tables of 1,000 to 200,000 rows) both planners
get the same tables, constraints and memory, and the bandwidths of memory and between ranks that are measured here first (or given), and
plan for gloo on CPUs; models of odd number may also be replicated, but not with --fused-only. TorchRec offers row-wise sharding on GPUs alone.

Where the two plans differ (not only in which rank is called which, or in the name of a way), both are followed by this library's
`DistributedModelParallel` in the same processes, with the same batches. Steps (forward, backward, update of the tables) are taken in
turns: a round takes as many steps by one plan as fit into --seconds, then as many by the other. A plan's time is the median
over rounds of the elapsed time per step of the first rank; a step ends on no rank before every rank has sent its vectors and gradients.
Beside it stands the processors' time per step, of all threads of the rank that needs most: other programs of a busy machine
change it less, and waiting does not count.

Each model gives a line: the tables' ways in both plans, the medians and their ratios, TorchRec's by this planner's. Above 1, this
planner's plan takes less time. --against-itself follows this planner's plan in both places, which tells what ratios say nothing.
"""

from __future__ import annotations

import json
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tessera.training.bench.harness import (
    arguments,
    in_turns,
    machine,
    print_head,
    print_row,
    seconds_of,
)
from tessera.training.bench.plans_versus_torchrec import (
    GIB,
    Model,
    Placed,
    Tessera,
    TorchRec,
    sharding_plan,
)
from tessera.training.bench.ranks import in_ranks
from tessera.training.bench.sharded_steps import LEARNING_RATE, libraries
from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.planner.measure import measure_bandwidths
from tessera.training.optim.optimizers import in_backward_optimizer_filter

CPU = torch.device("cpu")
BANDWIDTHS = ("ddr_mem_bw", "intra_host_bw")
BATCHES = 4  # different ones, used in turn
Timed = tuple[Model, Placed, Placed]


def random_model(
    seed: int, ranks: int, bandwidths: dict[str, float], *, may_be_replicated: bool
) -> Model:
    """Tables that two plans of them, with batches, fit into 2 GiB."""
    draw = random.Random(seed)  # noqa: S311 - test data
    tables = [
        (
            int(math.exp(draw.uniform(math.log(1e3), math.log(2e5)))),
            draw.choice([16, 32, 64, 128]),
            float(draw.choice([1, 1, 2, 5, 20])),
        )
        for _ in range(draw.randint(3, 10))
    ]
    return Model(
        tables,
        ranks,
        8 * GIB,
        draw.choice([128, 512, 2048]),
        may_leave_hbm=may_be_replicated,
        device="cpu",
        bandwidths=bandwidths,
    )


def bandwidths_here() -> dict[str, float]:
    """Bytes per second of memory and between ranks, under the names of `Topology`'s parameters."""
    torch.set_num_threads(1)
    found = measure_bandwidths(CPU)
    assert found.intra_host_bw is not None, "there is a group of several ranks"
    return dict(zip(BANDWIDTHS, (found.mem_bw, found.intra_host_bw), strict=True))


def same(ours: Placed, theirs: Placed, ranks: int) -> bool:
    """Whether two plans put the same shards together.

    On one host shards say all: a whole table is one shard table-wise and column-wise. Two ranks may have changed places.
    """

    def shards(placed: Placed, *, turned: bool) -> dict[str, tuple[str, list[object]]]:
        return {
            name: (
                kernel,
                [
                    (offset, size, ranks - 1 - rank if turned else rank)
                    for offset, size, rank in each
                ],
            )
            for name, (_, kernel, each) in placed.items()
        }

    found = shards(ours, turned=False)
    return found == shards(theirs, turned=False) or (
        ranks == 2 and found == shards(theirs, turned=True)
    )


class Follower:
    """Takes steps of a model by one plan.

    Args:
        model: whose tables are made anew, with weights of their own.
        placed: the plan.
    """

    def __init__(self, model: Model, placed: Placed) -> None:
        tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(rows, columns, name=f"t{i}", feature_names=[f"f{i}"])
                for i, (rows, columns, _) in enumerate(model.tables)
            ]
        )
        sharder = EmbeddingBagCollectionSharder(fused_params=dict(libraries()[0].fused_params))
        self._parallel = DistributedModelParallel(
            tables, device=CPU, plan=sharding_plan(placed, model), sharders=[sharder]
        )
        dense = dict(in_backward_optimizer_filter(self._parallel.named_parameters()))
        self._optimizer = torch.optim.SGD(dense.values(), LEARNING_RATE) if dense else None
        self._batches = [batch(model, number) for number in range(BATCHES)]
        self._gradient = torch.rand(
            model.batch_size, sum(columns for _, columns, _ in model.tables)
        )
        self._steps = 0

    def step(self) -> Tensor:
        """Take a step on the next batch; gives the vectors ``[B, sum of columns]``."""
        features = self._batches[self._steps % BATCHES]
        self._steps += 1
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        vectors: Tensor = self._parallel(features).values()
        torch.autograd.backward(vectors, self._gradient)
        if self._optimizer is not None:
            self._optimizer.step()
        return vectors

    def steps(self, count: int) -> None:
        """Take some steps."""
        for _ in range(count):
            self.step()


def batch(model: Model, number: int) -> KeyedJaggedTensor:
    """This rank's batch of the given number; bags of 0 to twice the ids that the model says, drawn evenly."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    lengths, values = [], []
    for rows, _, ids in model.tables:
        most = round(2 * ids)
        lengths.append(torch.randint(0, most + 1, (model.batch_size,), generator=generator))
        values.append(torch.randint(0, rows, (int(lengths[-1].sum()),), generator=generator))
    return KeyedJaggedTensor.from_lengths_sync(
        [f"f{i}" for i in range(len(model.tables))], torch.cat(values), torch.cat(lengths)
    )


Times = dict[str, list[float]]
"""By side: milliseconds of a step, elapsed and of the processors."""


def timed(models: list[Timed], rounds: int, seconds: float) -> list[Times]:
    """For each model the milliseconds of a step by either plan: the medians over rounds."""
    torch.set_num_threads(1)
    found = []
    for model, ours, theirs in models:
        sides = {"Tessera": Follower(model, ours), "TorchRec": Follower(model, theirs)}
        measures = {}
        for name, follower in sides.items():
            follower.steps(3)  # warms up
            # The ranks have to take the same number of steps.
            taken = torch.tensor([seconds_of(partial(follower.steps, 3)) / 3])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            count = max(3, int(seconds / taken.item()))
            measures[name] = partial(milliseconds, follower, count)
        found.append(
            {
                name: [statistics.median(each) for each in zip(*measured, strict=True)]
                for name, measured in in_turns(measures, rounds).items()
            }
        )
    return found


def milliseconds(follower: Follower, count: int) -> tuple[float, float]:
    """The elapsed time of a step and the processors' time of the busiest rank, over steps that the ranks begin together."""
    dist.barrier()
    worked = time.process_time()
    elapsed = seconds_of(partial(follower.steps, count))
    most = torch.tensor([time.process_time() - worked])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return elapsed / count * 1e3, most.item() / count * 1e3


def ways(placed: Placed) -> str:
    """How many tables are cut in which way, and how many shards each rank has."""
    kinds = Counter(kind for kind, _, _ in placed.values())
    shards = Counter(rank for _, _, each in placed.values() for _, _, rank in each)
    cut = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{cut} ({'/'.join(str(shards[rank]) for rank in sorted(shards))})"


def main() -> None:
    """Plan, time, print a line for each model and the sum of them."""
    parser = arguments(__doc__)
    parser.add_argument("--models", type=int, default=50, help="random models; default 50")
    parser.add_argument("--seed", type=int, default=0, help="of the models; default 0")
    parser.add_argument("--ranks", type=int, default=2, help="processes; default 2")
    parser.add_argument("--rounds", type=int, default=9, help="of each plan; default 9")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a round; default 0.3")
    parser.add_argument(
        "--bandwidths",
        type=float,
        nargs=2,
        metavar=("MEMORY", "EXCHANGE"),
        help="GB/s of memory and between ranks that both planners get; default: measured here",
    )
    parser.add_argument("--fused-only", action="store_true", help="replicate no table")
    parser.add_argument(
        "--against-itself", action="store_true", help="follow this planner's plan in both places"
    )
    flags = parser.parse_args()
    if len(libraries()) == 1:
        sys.exit(
            "TorchRec is not installed here; pip install torchrec, in an environment of its own"
        )
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    bandwidths: dict[str, float] = (
        dict(zip(BANDWIDTHS, (value * 1e9 for value in flags.bandwidths), strict=True))
        if flags.bandwidths
        else in_ranks(bandwidths_here, flags.ranks, "gloo")
    )
    print(f"{machine()}; {json.dumps({k: f'{v / 1e9:.2f} GB/s' for k, v in bandwidths.items()})}")
    different: dict[int, Timed] = {}
    for number in range(flags.models):
        model = random_model(
            flags.seed * 1000 + number,
            flags.ranks,
            bandwidths,
            may_be_replicated=number % 2 == 1 and not flags.fused_only,
        )
        ours, theirs = Tessera(model).plan(), TorchRec(model).plan()
        if not same(ours, theirs, flags.ranks):
            different[number] = (model, ours, ours if flags.against_itself else theirs)
    print(f"{flags.models - len(different)} of {flags.models} plans are equal")
    found = in_ranks(
        timed, flags.ranks, "gloo", list(different.values()), flags.rounds, flags.seconds
    )
    print_head(
        *("model", "tables", "batch", "Tessera's plan", "TorchRec's plan"),
        *("ms", "ms", "ratio", "processors' ms", "processors' ms", "ratio"),
    )
    ratios: list[list[float]] = [[], []]
    for (number, (model, ours, theirs)), times in zip(different.items(), found, strict=True):
        cells: list[str] = []
        for own, other, into in zip(times["Tessera"], times["TorchRec"], ratios, strict=True):
            into.append(other / own)
            cells += [f"{own:.2f}", f"{other:.2f}", f"{into[-1]:.2f}"]
        print_row(number, len(model.tables), model.batch_size, ways(ours), ways(theirs), *cells)
    for what, each in zip(("elapsed", "processors"), ratios, strict=True):
        if each:
            print(
                f"{what}: {sum(ratio >= 1 for ratio in each)} of {len(each)} no slower, geometric mean "
                f"{statistics.geometric_mean(each):.2f}, {min(each):.2f} to {max(each):.2f}"
            )


if __name__ == "__main__":
    main()
