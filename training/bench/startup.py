"""What one waits for before the first step: the import, and the plan.

The import of ``tessera.training`` is timed in new interpreters, in turn with that of ``torch``
alone; a number is the median.  The plan is of 1,000 tables on 64 ranks (8 hosts of 8 GPUs), under
every sharding type and kernel; TorchRec's planner makes one of the same tables where TorchRec is
installed.

    python -m tessera.training.bench.startup [--rounds 9]
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial
from typing import Any

import torch

from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
)
from tessera.training.bench.harness import arguments, in_turns, machine, medians, seconds_of
from tessera.training.distributed.planner import EmbeddingShardingPlanner, Topology
from tessera.training.distributed.planner.stats import NoopEmbeddingStats

TABLES, RANKS, RANKS_PER_HOST, BATCH = 1000, 64, 8, 512


def import_seconds(module: str) -> float:
    """Wall time of a new interpreter that imports ``module``."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    return seconds_of(lambda: subprocess.run(command, check=True))


def sizes() -> list[tuple[int, int]]:
    """Rows and columns of the tables."""
    return [(1000 * (1 + index % 97), 64 if index % 3 else 128) for index in range(TABLES)]


def our_plan() -> float:
    """Seconds for a plan of ours."""
    tables = [
        EmbeddingBagConfig(rows, columns, name=f"t{index}", feature_names=[f"f{index}"])
        for index, (rows, columns) in enumerate(sizes())
    ]
    model = EmbeddingBagCollection(tables, device=torch.device("meta"))
    topology = Topology(RANKS, "cuda", local_world_size=RANKS_PER_HOST)
    planner = EmbeddingShardingPlanner(topology, batch_size=BATCH, stats=NoopEmbeddingStats())
    taken = seconds_of(lambda: planner.plan(model, [EmbeddingBagCollectionSharder()]))
    report = planner.report
    assert report is not None, "a planner that planned has a report"
    print(f"{report.num_options} ways, {report.num_proposals} proposals")
    return taken


def torchrec_plan() -> float:
    """Seconds for TorchRec's plan of the same tables, with its default settings."""
    peer: Any = __import__("torchrec")
    embeddingbag: Any = __import__("torchrec.distributed.embeddingbag", fromlist=["x"])
    planner: Any = __import__("torchrec.distributed.planner", fromlist=["x"])
    tables = [
        peer.EmbeddingBagConfig(
            num_embeddings=rows,
            embedding_dim=columns,
            name=f"t{index}",
            feature_names=[f"f{index}"],
        )
        for index, (rows, columns) in enumerate(sizes())
    ]
    model = peer.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    topology = planner.Topology(RANKS, "cuda", local_world_size=RANKS_PER_HOST)
    maker = planner.EmbeddingShardingPlanner(topology=topology, batch_size=BATCH)
    return seconds_of(lambda: maker.plan(model, [embeddingbag.EmbeddingBagCollectionSharder()]))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="imports of each; default: 9")
    rounds: int = parser.parse_args().rounds
    print(f"{machine()}, Python {sys.version.split()[0]}")
    imports = {name: partial(import_seconds, name) for name in ("torch", "tessera.training")}
    alone, ours = medians(in_turns(imports, rounds)).values()
    print(f"import torch {alone:.2f} s, import tessera.training {ours:.2f} s: {ours / alone:.2f}x")
    print(f"plan of {TABLES} tables on {RANKS} ranks: {our_plan():.2f} s")
    if importlib.util.find_spec("torchrec") is not None:
        print(f"TorchRec's: {torchrec_plan():.2f} s")


if __name__ == "__main__":
    main()
