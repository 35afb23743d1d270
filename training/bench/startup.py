"""What one waits for before the first step: the import, and the plan.

The import of ``tessera.training`` is timed in new interpreters, in turn with that of ``torch``
alone; a number is the median.  The plan is of 1,000 tables on 64 ranks (8 hosts of 8 GPUs), under
every sharding type and kernel; TorchRec's planner makes one of the same tables where TorchRec is
installed.

    python -m tessera.training.bench.startup [--rounds 9]
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import torch

from tessera.training.bench.harness import arguments, in_turns, machine, medians, seconds_of
from tessera.training.bench.sharded_steps import Library, libraries
from tessera.training.distributed.planner.stats import NoopEmbeddingStats

TABLES, RANKS, RANKS_PER_HOST, BATCH = 1000, 64, 8, 512


def import_seconds(module: str) -> float:
    """Wall time of a new interpreter that imports ``module``."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    return seconds_of(lambda: subprocess.run(command, check=True))


def sizes() -> list[tuple[int, int]]:
    return [(1000 * (1 + index % 97), 64 if index % 3 else 128) for index in range(TABLES)]


def plan_seconds(library: Library) -> float:
    """Seconds for a library's plan of the tables, with its default settings."""
    config = library.get("modules.embedding_configs", "EmbeddingBagConfig")
    tables = [
        config(
            num_embeddings=rows,
            embedding_dim=columns,
            name=f"t{index}",
            feature_names=[f"f{index}"],
        )
        for index, (rows, columns) in enumerate(sizes())
    ]
    collection = library.get("modules.embedding_modules", "EmbeddingBagCollection")
    model = collection(tables=tables, device=torch.device("meta"))
    topology = library.get("distributed.planner", "Topology")(
        RANKS, "cuda", local_world_size=RANKS_PER_HOST
    )
    maker = library.get("distributed.planner", "EmbeddingShardingPlanner")
    quiet = {"stats": NoopEmbeddingStats()} if library.name == "tessera" else {}
    planner = maker(topology=topology, batch_size=BATCH, **quiet)
    sharder = library.get("distributed.embeddingbag", "EmbeddingBagCollectionSharder")()
    taken = seconds_of(lambda: planner.plan(model, [sharder]))
    if library.name == "tessera":
        print(f"{planner.report.num_options} ways, {planner.report.num_proposals} proposals")
    return taken


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="imports of each; default: 9")
    rounds: int = parser.parse_args().rounds
    print(f"{machine()}, Python {sys.version.split()[0]}")
    imports = {name: partial(import_seconds, name) for name in ("torch", "tessera.training")}
    alone, ours = medians(in_turns(imports, rounds)).values()
    print(f"import torch {alone:.2f} s, import tessera.training {ours:.2f} s: {ours / alone:.2f}x")
    for library in libraries():
        taken = plan_seconds(library)
        print(f"{library.name}'s plan of {TABLES} tables on {RANKS} ranks: {taken:.2f} s")


if __name__ == "__main__":
    main()
