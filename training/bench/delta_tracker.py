"""What noting the touched rows costs a training step on a CPU.

One model (`tessera.training.bench.train_speed`'s DLRM of 26 tables of 100,000 rows, D=64, one id per feature and
sample, row-wise Adagrad fused into the backward pass) takes the same steps with and without
`DeltaTracker`, in turn; a number is the median.  ``none`` leaves the dense layers out: lookups, their
backward and the tables' update only.

    python -m tessera.training.bench.delta_tracker [--rounds 20] [--threads 1] [--batch-size 2048]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tessera.training.bench.harness import (
    arguments,
    in_turns,
    machine,
    medians,
    print_head,
    print_row,
    seconds_of,
)
from tessera.training.bench.train_speed import (
    ARCHS,
    DIM,
    F_DENSE,
    RawBatch,
    Step,
    draw_batches,
    fused_step,
    tables,
)
from tessera.training.distributed.tables.delta_tracker import DeltaTracker
from tessera.training.models.dlrm import DLRM


def make_step(arch: str) -> tuple[Step, list[Any]]:
    """A step, and the kernels of its tables, which are known once it has run."""
    kernels: list[Any] = []

    def score(dmp: Any, batch: RawBatch) -> torch.Tensor:
        if not kernels:
            tracker = DeltaTracker.of(dmp)
            kernels.extend(tracker.kernels)
        if arch == "none":
            pooled: torch.Tensor = dmp(batch.kjt()).values().sum(1)
            return pooled
        logits: torch.Tensor = dmp(batch.dense, batch.kjt()).squeeze(1)
        return logits

    dense, over = ARCHS[arch]
    model = tables() if arch == "none" else DLRM(tables(), F_DENSE, [*dense, DIM], [*over, 1])
    return fused_step(model, score, bf16=False), kernels


def main() -> None:
    """Measure and print a table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="over 8 batches (default 20)")
    parser.add_argument("--threads", type=int, default=1, help="torch's (default 1)")
    parser.add_argument("--batch-size", type=int, default=2048, help="samples (default 2048)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine())
    print_head("MLPs", "without, ms", "with, ms", "ratio")
    batches = draw_batches("uniform", 8, args.batch_size)
    for arch in ("large", "small", "none"):
        step, kernels = make_step(arch)
        for batch in batches[:2]:
            step(batch)
        noted = [kernel.touched for kernel in kernels]

        def timed(batch: RawBatch, *, track: bool) -> float:
            for kernel, touched in zip(kernels, noted, strict=True):  # noqa: B023 - called below
                kernel.touched = touched if track else None
            return seconds_of(partial(step, batch))  # noqa: B023 - as above

        times: dict[str, list[float]] = {"without": [], "with": []}
        for batch in batches * args.rounds:
            for name, found in in_turns(
                {
                    "without": partial(timed, batch, track=False),
                    "with": partial(timed, batch, track=True),
                },
                2,
            ).items():
                times[name] += found
        median = medians(times)
        print_row(
            arch,
            *(f"{median[name] * 1e3:.2f}" for name in ("without", "with")),
            f"{median['with'] / median['without']:.4f}",
        )


if __name__ == "__main__":
    main()
