"""What a step of the tables costs per optimizer, against plain torch in the same run.

26 tables of 100,000 rows, D=64, one id per feature and sample; forward, backward and update, no
dense part.  Every contender takes each batch in turn, round after round; a number is the median
over the rounds of the CPU time of the process (other processes want the cores too).

* ``tessera``: one fused kernel; ``by`` says whose code updates it.
* ``torch``: one ``nn.EmbeddingBag(sparse=True)`` over all rows, ids shifted, and torch's optimizer
  for sparse gradients where it has one (SGD, Adagrad, SparseAdam).

    python -m tessera.training.bench.table_optimizers [--rounds 15] [--batch-size 1024] [--threads 1]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tessera.training import EmbOptimType, KeyedJaggedTensor
from tessera.training.bench.harness import (
    arguments,
    in_turns,
    machine,
    print_head,
    print_row,
    seconds_of,
)
from tessera.training.distributed.tables.batched_kernels import BatchedFusedEmbeddingBag
from tessera.training.distributed.tables.kernels.choice import fbgemm_serves
from tessera.training.distributed.tables.kernels.interfaces import TableGroup
from tessera.training.distributed.tables.table_shards import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.modules.embedding_configs import DataType, PoolingType
from tessera.training.optim.fused import FusedParams

TABLES, ROWS, DIM, BATCHES, WARM_UP = 26, 100_000, 64, 4, 2

Step = Callable[[], None]

TORCHS: dict[EmbOptimType, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    EmbOptimType.EXACT_SGD: lambda params: torch.optim.SGD(params, lr=0.01),
    EmbOptimType.EXACT_ADAGRAD: lambda params: torch.optim.Adagrad(params, lr=0.01),
    EmbOptimType.ADAM: lambda params: torch.optim.SparseAdam(params, lr=0.01),
}


def group(optimizer: EmbOptimType) -> GroupedEmbeddingConfig:
    tables = [
        ShardedEmbeddingTable(
            num_embeddings=ROWS,
            embedding_dim=DIM,
            name=f"t{index}",
            feature_names=[f"f{index}"],
            local_rows=ROWS,
            local_cols=DIM,
        )
        for index in range(TABLES)
    ]
    return GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=tables,
        fused_params={"optimizer": optimizer, "learning_rate": 0.01},
    )


def tessera_step(optimizer: EmbOptimType, ids_TB: list[torch.Tensor]) -> Step:
    kernel = BatchedFusedEmbeddingBag(group(optimizer))
    kernel.init_parameters()
    kjts = [
        KeyedJaggedTensor(
            [f"f{index}" for index in range(TABLES)],
            ids.flatten(),
            lengths=torch.ones(ids.numel(), dtype=torch.int32),
        ).sync()
        for ids in ids_TB
    ]

    turns = itertools.cycle(kjts)

    def step() -> None:
        torch.autograd.backward(kernel(next(turns)).square().sum())

    return step


def torch_step(optimizer: EmbOptimType, ids_TB: list[torch.Tensor]) -> Step:
    bag = nn.EmbeddingBag(TABLES * ROWS, DIM, mode="sum", sparse=True)
    stepper = TORCHS[optimizer](list(bag.parameters()))
    shifted = itertools.cycle([ids + torch.arange(TABLES).unsqueeze(1) * ROWS for ids in ids_TB])

    def step() -> None:
        stepper.zero_grad()
        ids = next(shifted).flatten()
        torch.autograd.backward(bag(ids, torch.arange(ids.numel())).square().sum())
        stepper.step()

    return step


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measured steps each (default 15)")
    parser.add_argument("--batch-size", type=int, default=1024, help="samples (default 1024)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    batches = [torch.randint(0, ROWS, (TABLES, args.batch_size)) for _ in range(BATCHES)]
    print(machine())
    print(f"B={args.batch_size}, {args.threads} threads, median CPU ms of {args.rounds} steps")
    print_head("optimizer", "by", "tessera", "torch", "torch / tessera")
    for kind in EmbOptimType:
        steps = {"tessera": tessera_step(kind, batches)}
        if kind in TORCHS:
            steps["torch"] = torch_step(kind, batches)
        works = {name: partial(seconds_of, step, time.process_time) for name, step in steps.items()}
        times = in_turns(works, args.rounds + WARM_UP)
        found = {name: statistics.median(taken[WARM_UP:]) * 1e3 for name, taken in times.items()}
        ours, peer = found["tessera"], found.get("torch")
        params = FusedParams(optimizer=kind)
        tables = TableGroup(
            tables=group(kind).embedding_tables, pooled=True, mean=False, device=torch.device("cpu")
        )
        served = fbgemm_serves(tables, params)
        shown = ("", "") if peer is None else (f"{peer:.1f}", f"{peer / ours:.1f}")
        print_row(kind.value, "FBGEMM" if served else "ours", f"{ours:.1f}", *shown)


if __name__ == "__main__":
    main()
