"""A training step of sharded tables in Tessera and in TorchRec, for `versus_torchrec`.

Both libraries have the same names in the same modules, so one function builds either's step: the same
tables by the same plan, the same first weights, batches and gradients.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LEARNING_RATE, EPS = 0.05, 1e-8
# First weights are in +-this.
FIRST_WEIGHT = 0.1
# What a step gives: its output by name, if anybody asks.
Outputs = Callable[[], dict[str, Tensor]]
Step = Callable[[int], Outputs]


@dataclass(frozen=True)
class Setting:
    """What is measured: ranks on ``cpu`` or ``cuda``, and tables ``rows`` by ``dim``, one feature each.

    Attributes:
        batch: samples per rank.
        ids: most ids per bag; a bag has 0 to this many, drawn evenly.
        rounds: per way of cutting.
        steps: per round.
        batches: different batches, used in turn.
        torchrec_kernel: of TorchRec's tables that the backward pass updates.
    """

    ranks: int
    device: str
    tables: int
    rows: int
    dim: int
    batch: int
    ids: int
    rounds: int
    steps: int
    batches: int = 4
    torchrec_kernel: str = "fused"

    def names(self) -> list[str]:
        """The features' names; table ``t_x`` serves feature ``x``."""
        return [f"f{index}" for index in range(self.tables)]


@dataclass(frozen=True)
class Library:
    """A library's name, the package of its modules, and the tables' optimizer in its words.

    Attributes:
        kernel: of the tables that the backward pass updates.
    """

    name: str
    root: str
    fused_params: dict[str, Any]
    kernel: str = "fused"

    def get(self, module: str, name: str) -> Any:
        """What the library calls ``name`` in its module ``module``."""
        return getattr(importlib.import_module(f"{self.root}.{module}"), name)


def libraries(torchrec_kernel: str = "fused") -> list[Library]:
    """Tessera, and TorchRec with the given kernel if it is installed."""
    fused = {"learning_rate": LEARNING_RATE, "eps": EPS}
    found = [
        Library("tessera", "tessera.training", {"optimizer": "exact_row_wise_adagrad", **fused})
    ]
    if importlib.util.find_spec("torchrec") is not None:
        configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        optimizer = configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD
        theirs = {"optimizer": optimizer, **fused}
        found.append(Library("torchrec", "torchrec", theirs, torchrec_kernel))
    return found


def device_of(setting: Setting) -> torch.device:
    if setting.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", dist.get_rank())


def plain_module(library: Library, setting: Setting, *, pooled: bool) -> nn.Module:
    module = "modules.embedding_modules"
    collection = library.get(module, "EmbeddingBagCollection" if pooled else "EmbeddingCollection")
    config = library.get(
        "modules.embedding_configs", "EmbeddingBagConfig" if pooled else "EmbeddingConfig"
    )
    tables = [
        config(
            num_embeddings=setting.rows,
            embedding_dim=setting.dim,
            name=f"t_{name}",
            feature_names=[name],
        )
        for name in setting.names()
    ]
    built: nn.Module = collection(tables=tables, device=torch.device("cpu"))
    return built


@torch.no_grad()
def fill(module: nn.Module, setting: Setting) -> None:
    """Give the tables the same weights in every library."""
    generator = torch.Generator()
    for place, (_, value) in enumerate(sorted(module.state_dict().items())):
        generator.manual_seed(place)
        whole = torch.empty(setting.rows, setting.dim)
        whole.uniform_(-FIRST_WEIGHT, FIRST_WEIGHT, generator=generator)
        if not hasattr(value, "local_shards"):
            value.copy_(whole)
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])


def plan_of(library: Library, module: nn.Module, sharder: Any, setting: Setting, kind: str) -> Any:
    """The same placements in each library's words."""
    ranks = setting.ranks

    def placed(index: int) -> Any:
        make = library.get("distributed.sharding_plan", kind)
        if kind == "table_wise":
            return make(rank=index % ranks)
        if kind == "column_wise":
            return make(ranks=list(range(ranks)))
        if kind in {"table_row_wise", "table_column_wise"}:
            return make(host_index=0)
        return make(host_indexes=[0]) if kind == "grid_shard" else make()

    construct = library.get("distributed.sharding_plan", "construct_module_sharding_plan")
    plan = construct(
        module,
        {f"t_{name}": placed(index) for index, name in enumerate(setting.names())},
        sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=setting.device,
    )
    for placement in plan.values():
        # TorchRec's helpers choose dense tables on a CPU.
        placement.compute_kernel = "dense" if kind == "data_parallel" else library.kernel
    return plan


def draw(setting: Setting, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Lengths ``[F * B]`` int32 and ids ``[N]`` int64 of one batch of one rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    bags = setting.tables * setting.batch
    lengths = torch.randint(0, setting.ids + 1, (bags,), generator=generator, dtype=torch.int32)
    ids = torch.randint(0, setting.rows, (int(lengths.sum()),), generator=generator)
    return lengths, ids


def stepper(library: Library, setting: Setting, kind: str, *, pooled: bool) -> Step:
    """A function that takes one step of a sharded collection, on the batch of the given number.

    The tables are cut by ``kind``, one of TorchRec's helpers in ``sharding_plan``.  The collection is
    an ``EmbeddingBagCollection`` where ``pooled``, else an ``EmbeddingCollection``.
    """
    device = device_of(setting)
    where = "embeddingbag" if pooled else "embedding"
    sharder_type = "EmbeddingBagCollectionSharder" if pooled else "EmbeddingCollectionSharder"
    sharder = library.get(f"distributed.{where}", sharder_type)(
        fused_params=dict(library.fused_params)
    )
    env = library.get("distributed.types", "ShardingEnv").from_process_group(dist.group.WORLD)
    plain = plain_module(library, setting, pooled=pooled)
    plan = plan_of(library, plain, sharder, setting, kind)
    module = sharder.shard(plain, plan, env, device)
    fill(module, setting)
    # Fused tables are parameters too, but have an optimizer; replicas need one.
    replicas = list(module.parameters()) if kind == "data_parallel" else []
    dense = torch.optim.SGD(replicas, lr=LEARNING_RATE) if replicas else None
    jagged = library.get("sparse.jagged_tensor", "KeyedJaggedTensor")
    drawn = [draw(setting, seed, dist.get_rank()) for seed in range(setting.batches)]
    drawn = [(lengths.to(device), ids.to(device)) for lengths, ids in drawn]
    torch.manual_seed(dist.get_rank())
    # None is negative: sums of them do not cancel (see `rounding_bound`).
    gradients = {name: torch.rand(setting.batch, setting.dim) for name in setting.names()}
    arranged: list[Tensor] = []

    def gradient(keys: list[str]) -> Tensor:
        """The same for each name; a library may have the names in an order of its own."""
        if not arranged:
            whole = torch.cat([gradients[key] for key in keys], dim=1) / setting.batch
            arranged.append(whole.to(device))
        return arranged[0]

    def step(index: int) -> Outputs:
        lengths, ids = drawn[index % setting.batches]
        features = jagged.from_lengths_sync(keys=setting.names(), values=ids, lengths=lengths)
        if dense is not None:
            dense.zero_grad()
        output = module(features)
        if pooled:
            torch.autograd.backward(output.values(), gradient(output.keys()))
            found: Outputs = output.to_dict
        else:
            values = torch.cat([output[name].values() for name in setting.names()])
            torch.autograd.backward(values, torch.full_like(values, 1.0 / setting.batch))

            def found() -> dict[str, Tensor]:
                return {name: jagged_.values() for name, jagged_ in output.items()}

        if dense is not None:
            dense.step()
        return found

    return step
