"""Training samples per second, against plain torch in the same run.

Every contender trains the same DLRM (26 tables of 100,000 rows, D=64, one id per feature and
sample) with Adagrad on the same batches, a few steps in turn, round after round; a number is the
median over the rounds.

* ``torch, table by table``: 26 ``nn.EmbeddingBag(sparse=True)`` and ``torch.optim.Adagrad``.
* ``torch, one big table``: the same with all tables in one ``nn.EmbeddingBag``, ids shifted.
* ``tessera DLRM``: `DistributedModelParallel`, row-wise Adagrad fused into the backward pass.
* ``tessera RankingModel``: the same, and also what the trainer does around it: raw ids hashed
  with murmur3, missing dense values encoded.  More work than the others do.

The ratio is to the faster of the two plain loops.  ``MLPs`` says how large the dense part is,
which all contenders share: ``large`` is 512-256 on both sides, ``small`` 128-64, and ``none``
leaves it out (lookups, their backward and the tables' update only).

    python -m tessera.training.bench.train_speed [--rounds 7] [--threads 2] [--arch large|small|none] [--bf16]
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.training import (
    DLRM,
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    build_ranking_model,
    in_backward_optimizer_filter,
)
from tessera.training.bench.harness import (
    arguments,
    in_turns,
    machine,
    medians,
    print_head,
    print_row,
    seconds_of,
)
from tessera.training.models.architectures.dlrm import DLRMConfig

F_SPARSE, F_DENSE, ROWS, DIM = 26, 13, 100_000, 64
LEARNING_RATE = 0.01
ARCHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "large": ((512, 256), (512, 256)),
    "small": ((128, 64), (128, 64)),
    "none": ((), ()),
}
NAMES = [f"f{index}" for index in range(F_SPARSE)]


@dataclass
class RawBatch:
    """``dense`` ``[B, 13]``, ``ids_FB`` ``[26, B]`` rows, ``labels`` ``[B]``."""

    dense: Tensor
    ids_FB: Tensor  # noqa: N815 - shape letters
    labels: Tensor

    def kjt(self) -> KeyedJaggedTensor:
        """The ids as a jagged tensor, built anew for every step as a loader would."""
        return KeyedJaggedTensor(
            NAMES,
            self.ids_FB.flatten(),
            lengths=torch.ones(self.ids_FB.numel(), dtype=torch.int32),
        )


def draw_batches(ids: str, count: int, batch_size: int) -> list[RawBatch]:
    """``uniform`` ids, or ``power-law``: density proportional to 1/id."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        u = torch.rand(F_SPARSE, batch_size, generator=generator, dtype=torch.float64)
        ids_FB = u * ROWS if ids == "uniform" else ROWS**u - 1
        batches.append(
            RawBatch(
                dense=torch.randn(batch_size, F_DENSE, generator=generator),
                ids_FB=ids_FB.long().clamp(0, ROWS - 1),
                labels=(torch.rand(batch_size, generator=generator) < 0.25).float(),
            )
        )
    return batches


def layers(size_in: int, sizes: tuple[int, ...]) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for size in sizes:
        modules += [nn.Linear(size_in, size), nn.ReLU()]
        size_in = size
    return modules


class PlainDLRM(nn.Module):
    """DLRM as a torch user writes it; without layers, the sum of all looked-up numbers."""

    def __init__(self, dense: tuple[int, ...], over: tuple[int, ...], *, one_table: bool) -> None:
        super().__init__()
        tables, rows = (1, ROWS * F_SPARSE) if one_table else (F_SPARSE, ROWS)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, include_last_offset=True)
            for _ in range(tables)
        )
        self.one_table = one_table
        self.shift = torch.arange(F_SPARSE).unsqueeze(1) * ROWS
        self.only_tables = not over
        if self.only_tables:
            return
        self.bottom = nn.Sequential(*layers(F_DENSE, (*dense, DIM)))
        pairs = F_SPARSE * (F_SPARSE + 1) // 2
        self.top = nn.Sequential(*layers(DIM + pairs, over), nn.Linear(over[-1], 1))
        lower = torch.tril_indices(F_SPARSE + 1, F_SPARSE + 1, offset=-1)
        self.pairs = lower[0] * (F_SPARSE + 1) + lower[1]

    def forward(self, batch: RawBatch) -> Tensor:
        """Logits ``[B]``."""
        sparse = self.look_up(batch)
        if self.only_tables:
            return sparse.flatten(1).sum(1)
        bottom = self.bottom(batch.dense)
        vectors = torch.cat([bottom.unsqueeze(1), sparse], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits: Tensor = self.top(torch.cat([bottom, dots.index_select(1, self.pairs)], dim=1))
        return logits.squeeze(1)

    def look_up(self, batch: RawBatch) -> Tensor:
        """The vectors of all features, ``[B, 26, D]``."""
        size = batch.dense.size(0)
        if self.one_table:
            ids = (batch.ids_FB + self.shift).t().flatten()
            looked_up: Tensor = self.bags[0](ids, torch.arange(ids.numel() + 1))
            return looked_up.view(size, F_SPARSE, DIM)
        offsets = torch.arange(size + 1)
        return torch.stack(
            [bag(ids, offsets) for bag, ids in zip(self.bags, batch.ids_FB, strict=True)], dim=1
        )


Step = Callable[[RawBatch], None]


def make_step(
    score: Callable[[RawBatch], Tensor], optimizer: torch.optim.Optimizer, *, bf16: bool
) -> Step:
    loss_fn = nn.BCEWithLogitsLoss()

    def step(batch: RawBatch) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = score(batch)
        loss_fn(logits.float(), batch.labels).backward()
        optimizer.step()

    return step


def plain_step(arch: str, *, one_table: bool, bf16: bool) -> Step:
    model = PlainDLRM(*ARCHS[arch], one_table=one_table)
    return make_step(model, torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE), bf16=bf16)


def fused_step(
    model: nn.Module, score: Callable[[nn.Module, RawBatch], Tensor], *, bf16: bool
) -> Step:
    sharder = EmbeddingBagCollectionSharder({"learning_rate": LEARNING_RATE})
    dmp = DistributedModelParallel(model, sharders=[sharder])
    parts = [dmp.fused_optimizer]
    if dense := dict(in_backward_optimizer_filter(dmp.named_parameters())):
        parts.append(
            KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, lr=LEARNING_RATE))
        )
    optimizer = CombinedOptimizer(parts)
    return make_step(lambda batch: score(dmp, batch), optimizer, bf16=bf16)


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(ROWS, DIM, name=f"t_{n}", feature_names=[n]) for n in NAMES],
        device="meta",
    )


def tables_step(*, bf16: bool) -> Step:
    return fused_step(tables(), lambda dmp, batch: dmp(batch.kjt()).values().sum(1), bf16=bf16)


def dlrm_step(arch: str, *, bf16: bool) -> Step:
    dense, over = ARCHS[arch]
    model = DLRM(tables(), F_DENSE, [*dense, DIM], [*over, 1])
    return fused_step(model, lambda dmp, batch: dmp(batch.dense, batch.kjt()).squeeze(1), bf16=bf16)


def ranking_step(arch: str, *, bf16: bool) -> Step:
    dense, over = ARCHS[arch]
    config = DLRMConfig(embedding_dim=DIM, rows=ROWS, dense_layers=dense, over_layers=over)
    model = build_ranking_model(config, [f"d{i}" for i in range(F_DENSE)], NAMES, device="meta")
    return fused_step(model, lambda dmp, batch: dmp(batch.dense, batch.kjt()), bf16=bf16)


def measure(contenders: dict[str, Step], batches: list[RawBatch], rounds: int) -> dict[str, float]:
    """Median samples per second of each contender; they take turns after every batch."""

    def speed(step: Step, turns: Iterator[RawBatch]) -> float:
        batch = next(turns)
        return batch.labels.numel() / seconds_of(partial(step, batch))

    for step in contenders.values():
        for batch in batches[:2]:
            step(batch)
    steps = {n: partial(speed, s, itertools.cycle(batches)) for n, s in contenders.items()}
    return medians(in_turns(steps, rounds * len(batches)))


def make_contenders(arch: str, *, bf16: bool) -> dict[str, Step]:
    contenders = {
        "torch, table by table": plain_step(arch, one_table=False, bf16=bf16),
        "torch, one big table": plain_step(arch, one_table=True, bf16=bf16),
    }
    if arch == "none":
        return {**contenders, "tessera tables": tables_step(bf16=bf16)}
    return {
        **contenders,
        "tessera DLRM": dlrm_step(arch, bf16=bf16),
        "tessera RankingModel": ranking_step(arch, bf16=bf16),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="passes over the batches (7)")
    parser.add_argument("--batches", type=int, default=4, help="different batches (4)")
    parser.add_argument("--batch-size", type=int, default=4096, help="samples (4096)")
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="CPU threads (default: %(default)s)",
    )
    parser.add_argument("--arch", choices=ARCHS, action="append", help="MLP sizes (all)")
    parser.add_argument("--bf16", action="store_true", help="all under bfloat16 autocast (no)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    print(f"{machine()}, {args.threads} threads")
    print_head("MLPs", "ids", "contender", "samples/s", "ratio")
    for arch in args.arch or list(ARCHS):
        for ids in ("uniform", "power-law"):
            torch.manual_seed(0)
            contenders = make_contenders(arch, bf16=args.bf16)
            batches = draw_batches(ids, args.batches, args.batch_size)
            speeds = measure(contenders, batches, args.rounds)
            peer = max(speed for name, speed in speeds.items() if name.startswith("torch"))
            for name, speed in speeds.items():
                row = {"arch": arch, "ids": ids, "name": name, "samples_per_second": speed}
                results.append({**row, "ratio": speed / peer})
                print_row(arch, ids, name, f"{speed:,.0f}", f"{speed / peer:.2f}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
