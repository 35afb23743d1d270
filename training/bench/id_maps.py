"""What rows cost and give where ids come and go: hashing, managed collisions, and TorchRec's own, in one run.

A stream of 63-bit ids: at any time ``--live`` of them come, as often as Zipf's law says, and after each step some of
them go for good and new ones take their places. Each id has a hidden weight, and a label is drawn from the sum of the
weights of a bag's ids. Over the run there are many more ids than the table has rows. Every contender has the same
tables and optimizer (plain SGD) and trains on the same batches, one after another; it scores each batch before it
trains on it.

Contenders: ``modulo`` (the id's hash modulo the rows, no map), ``MCH`` with each of its policies, ``MPZCH`` with LRU
(an hour is 10 steps of the stream), and, where TorchRec is installed, its MCH with each policy. Its MPZCH cannot be
trained without a GPU.

Columns, over the second half of the steps: the AUC of the scores; of the ids that came, the share that had a row with
another id of the last 100 steps; and the mean milliseconds of a step (map, look up, backward, update), since MCH
changes its maps in every 10th alone. With ``--clock cpu`` these are the milliseconds in which a CPU worked on the step, which other
programs of a busy machine change less.

    python -m tessera.training.bench.id_maps [--steps 600] [--rows 20000] [--live 16000] [--batch-size 1024]
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tessera.training.bench.harness import (
    CLOCKS,
    Clock,
    arguments,
    machine,
    print_head,
    print_row,
)
from tessera.training.bench.sharded_steps import Library, libraries
from tessera.training.metrics.binary import auc
from tessera.training.modules.hash_mc_evictions import (
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
)
from tessera.training.modules.hash_mc_modules import HashZchManagedCollisionModule
from tessera.training.modules.hashing import hash_ids

DIM, BAG, LEARNING_RATE = 8, 4, 0.2
RECENT, STEPS_AN_HOUR, MAP_EVERY = 100, 10, 10
POLICIES = ("LFU_EvictionPolicy", "LRU_EvictionPolicy", "DistanceLFU_EvictionPolicy")
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """How ids come and go.

    Attributes:
        steps: batches.
        live: ids that come at one time.
        leave: of them, how many go after each step.
        batch_size: bags of `BAG` ids each.
    """

    steps: int
    live: int
    leave: int
    batch_size: int

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids ``[B, BAG]`` int64 and labels ``[B]`` of each step."""
        generator = torch.Generator().manual_seed(0)
        often = 1 / torch.arange(1, self.live + 1).double()

        def fresh(count: int) -> Tensor:
            return torch.randint(0, 2**63 - 1, (count,), generator=generator)

        ids, weights = fresh(self.live), torch.randn(self.live, generator=generator)
        for _ in range(self.steps):
            places = often.multinomial(
                self.batch_size * BAG, replacement=True, generator=generator
            ).view(-1, BAG)
            chances = torch.sigmoid(weights[places].sum(1))
            yield ids[places], torch.bernoulli(chances, generator=generator)
            gone = torch.randperm(self.live, generator=generator)[: self.leave]
            ids[gone], weights[gone] = (
                fresh(self.leave),
                torch.randn(self.leave, generator=generator),
            )


class Model(nn.Module):
    """The sum of a bag's vectors, and a fixed sum of those as the logit.

    Args:
        library: whose tables and maps.
        rows: of the table.
        make_map: makes the managed collision module; None: ids are hashed.
    """

    def __init__(
        self, library: Library, rows: int, make_map: Callable[[], nn.Module] | None
    ) -> None:
        super().__init__()
        self._rows, self._keyed = rows, library.get("sparse.jagged_tensor", "KeyedJaggedTensor")
        table = library.get("modules.embedding_configs", "EmbeddingBagConfig")(
            num_embeddings=rows,
            embedding_dim=DIM,
            name="t",
            feature_names=["f"],
            init_fn=nn.init.zeros_,
        )
        self.tables = library.get("modules.embedding_modules", "EmbeddingBagCollection")([table])
        self._mapped = make_map is not None
        if make_map is not None:
            maps = library.get("modules.mc_modules", "ManagedCollisionCollection")
            outer = library.get(
                "modules.mc_embedding_modules", "ManagedCollisionEmbeddingBagCollection"
            )
            self.tables = outer(self.tables, maps({"t": make_map()}, [table]), True)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The logit of each of ``[B, BAG]`` ids' bags, and the ids' rows ``[B * BAG]``."""
        flat, lengths = ids.flatten(), torch.full([len(ids)], BAG)
        if not self._mapped:
            flat = hash_ids(flat, "murmur3", self._rows)
        given = self._keyed(keys=["f"], values=flat, lengths=lengths)
        if self._mapped:
            vectors, remapped = self.tables(given)
            return vectors.values().sum(1) / math.sqrt(DIM), remapped.values()
        return self.tables(given).values().sum(1) / math.sqrt(DIM), flat


@dataclass
class Contender:
    """A model in training.

    Attributes:
        model: a `Model`.
        optimizer: of its tables.
        clock: what steps are timed with.
        milliseconds: of each step.
        scores: of each step, before it.
        shared: of each step, the share of ids that had a row with another one.
    """

    model: Model
    optimizer: torch.optim.Optimizer
    clock: Clock
    milliseconds: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)

    def score(self, ids: Tensor, recent: Tensor) -> None:
        """Note the logits of a batch, and how many of its ids share a row with another of ``recent``."""
        self.model.eval()
        with torch.no_grad():
            logits, rows = self.model(ids)
            padded = torch.cat([recent, recent[: -len(recent) % BAG]]).view(-1, BAG)
            of_recent = self.model(padded)[1][: len(recent)]
        self.model.train()
        self.scores.append(logits)
        owners = torch.bincount(of_recent, minlength=int(rows.max()) + 1)
        self.shared.append(float((owners[rows] > 1).float().mean()))

    def train(self, ids: Tensor, labels: Tensor) -> None:
        """Train on one batch, and note how long it took."""
        begin = self.clock()
        logits, _ = self.model(ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.optimizer.step()
        self.milliseconds.append((self.clock() - begin) * 1e3)


def sorted_map(library: Library, rows: int, policy: str) -> nn.Module:
    """A library's `MCHManagedCollisionModule`."""
    made: nn.Module = library.get("modules.mc_modules", "MCHManagedCollisionModule")(
        zch_size=rows,
        device=CPU,
        eviction_policy=library.get("modules.mc_modules", policy)(),
        eviction_interval=MAP_EVERY,
    )
    return made


def hash_map(rows: int) -> nn.Module:
    """MPZCH in which ids that did not come in this hour go, those of the longest ago first."""
    return HashZchManagedCollisionModule(
        rows,
        CPU,
        total_num_buckets=1,
        eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION,
        eviction_config=HashZchEvictionConfig(["f"], single_ttl=0),
    )


def contenders(rows: int, clock: Clock) -> dict[str, Contender]:
    """By name; see the head of this file."""
    ours, *others = libraries()
    models: dict[str, Any] = {
        "modulo": Model(ours, rows, None),
        "MPZCH, LRU": Model(ours, rows, partial(hash_map, rows)),
    }
    for library in (ours, *others):
        for policy in POLICIES:
            name = f"MCH, {policy.partition('_')[0]}"
            name = name if library is ours else f"{library.name} {name}"
            models[name] = Model(library, rows, partial(sorted_map, library, rows, policy))
    return {
        name: Contender(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), clock)
        for name, model in models.items()
    }


def run(stream: Stream, rows: int, clock: Clock) -> dict[str, Contender]:
    """All contenders after the whole stream, and what they gave in the second half of its steps."""
    found = contenders(rows, clock)
    names = list(found)
    recent: deque[Tensor] = deque(maxlen=RECENT)
    for step, (ids, own_labels) in enumerate(stream.batches()):
        late = step >= stream.steps // 2
        recent.append(ids.flatten())
        lately = torch.unique(torch.cat(list(recent))) if late else ids
        for name in names[:: -1 if step % 2 else 1]:
            contender = found[name]
            with mock.patch("time.time", return_value=3600.0 * (1 + step // STEPS_AN_HOUR)):
                if late:
                    contender.score(ids, lately)
                contender.train(ids, own_labels)
    for contender in found.values():
        del contender.milliseconds[: stream.steps // 2]
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=600, help="batches (default 600)")
    parser.add_argument("--rows", type=int, default=20_000, help="of the table (default 20000)")
    parser.add_argument("--live", type=int, default=16_000, help="ids at one time (default 16000)")
    parser.add_argument("--leave", type=int, default=80, help="ids that go a step (default 80)")
    parser.add_argument("--batch-size", type=int, default=1024, help="bags (default 1024)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="see above (default wall)")
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu counts one thread's time; leave --threads out")
    torch.set_num_threads(args.threads)
    stream = Stream(steps=args.steps, live=args.live, leave=args.leave, batch_size=args.batch_size)
    labels = torch.cat([own for _, own in list(stream.batches())[args.steps // 2 :]])
    print(machine())
    ids = args.live + args.leave * args.steps
    print(f"{args.rows} rows, {args.live} ids at one time, {ids} in all, {args.steps} steps")
    print_head("rows by", "AUC", "ids that share a row", "ms a step")
    for name, contender in run(stream, args.rows, CLOCKS[args.clock]).items():
        score = auc(torch.cat(contender.scores).numpy(), labels.numpy())
        shared = statistics.fmean(contender.shared)
        cost = statistics.fmean(contender.milliseconds)
        print_row(name, f"{score:.4f}", f"{100 * shared:.1f}%", f"{cost:.2f}")


if __name__ == "__main__":
    main()
