"""One step over ranks in Tessera and in TorchRec, for `modules_versus_torchrec`: pipelines, replicas and pools.

The model has tables, placed table-wise and row-wise in turn, and one layer above them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tessera.training.bench.model_steps import drifting, mapped, pruned
from tessera.training.bench.module_steps import (
    Case,
    Draws,
    Shape,
    Step,
    ids_pool,
    pool_shape,
    tensor_pool,
)
from tessera.training.bench.sharded_steps import LEARNING_RATE, Library

ROWS, BATCHES = 5000, 4


class Model(nn.Module):
    """Tables and one layer; gives the loss twice, as pipelines want it."""

    def __init__(self, library: Library, shape: Shape) -> None:
        super().__init__()
        config = library.get("modules.embedding_configs", "EmbeddingBagConfig")
        tables = [
            config(
                num_embeddings=ROWS,
                embedding_dim=shape["dim"],
                name=f"t_{name}",
                feature_names=[name],
                init_fn=lambda weight: nn.init.constant_(weight, 0.01),
            )
            for name in features_of(shape)
        ]
        self.tables = library.get("modules.embedding_modules", "EmbeddingBagCollection")(
            tables=tables, device=torch.device("meta")
        )
        self.over = nn.Linear(shape["dim"] * shape["tables"], 1)
        nn.init.constant_(self.over.weight, 0.01)
        nn.init.zeros_(self.over.bias)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss, with and without gradients."""
        logits = self.over(self.tables(batch.ids).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def features_of(shape: Shape) -> list[str]:
    """The names of a shape's features, one for each table."""
    return [f"f{place}" for place in range(shape["tables"])]


def batches(library: Library, shape: Shape) -> Iterator[Any]:
    """This rank's batches without end, the same for each library."""
    kjt = library.get("sparse.jagged_tensor", "KeyedJaggedTensor")

    class Batch(library.get("streamable", "Pipelineable")):  # type: ignore[misc] # of either library
        def __init__(self, ids: Any, labels: Tensor) -> None:
            self.ids, self.labels = ids, labels

        def to(self, device: torch.device, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002 - as of torch.Tensor
            return Batch(
                self.ids.to(device, non_blocking=non_blocking),
                self.labels.to(device, non_blocking=non_blocking),
            )

        def record_stream(self, stream: torch.Stream) -> None:
            self.ids.record_stream(stream)
            self.labels.record_stream(stream)

    drawn = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(BATCHES):
        lengths = torch.randint(
            0, 2 * shape["ids"], (shape["tables"] * shape["batch"],), generator=generator
        )
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        labels = torch.randint(0, 2, (shape["batch"],), generator=generator).float()
        drawn.append(Batch(kjt(features_of(shape), values, lengths=lengths), labels))
    return cycle(drawn)


def plan_and_sharder(
    library: Library, module: nn.Module, shape: Shape, ranks: int, device: torch.device
) -> tuple[Any, Any]:
    """Tables are table-wise and row-wise in turn."""
    sharder = library.get("distributed.embeddingbag", "EmbeddingBagCollectionSharder")(
        fused_params=dict(library.fused_params)
    )
    table_wise = library.get("distributed.sharding_plan", "table_wise")
    row_wise = library.get("distributed.sharding_plan", "row_wise")
    plan = library.get("distributed.sharding_plan", "construct_module_sharding_plan")(
        module,
        {
            f"t_{name}": (
                row_wise(compute_kernel="fused")
                if place % 2
                else table_wise(rank=place // 2 % ranks, compute_kernel="fused")
            )
            for place, name in enumerate(features_of(shape))
        },
        sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=device.type,
    )
    return library.get("distributed.types", "ShardingPlan")({"tables": plan}), sharder


def distributed(
    library: Library, shape: Shape, device: torch.device, group: int | None = None
) -> Any:
    """The model over ranks; with ``group``: each so many of them have a copy of all tables."""
    model = Model(library, shape)
    model.over.to(device)
    ranks = group or dist.get_world_size()
    plan, sharder = plan_and_sharder(library, model.tables, shape, ranks, device)
    if group is None:
        kind = library.get("distributed.model_parallel", "DistributedModelParallel")
        return kind(model, device=device, plan=plan, sharders=[sharder])
    kind = library.get("distributed.model_parallel", "DMPCollection")
    return kind(
        model, device, plan, dist.get_world_size(), group, dist.group.WORLD, sharders=[sharder]
    )


def _dense_optimizer(model: Any) -> torch.optim.Optimizer:
    own = [p for name, p in model.named_parameters() if "over" in name]
    return torch.optim.SGD(own, lr=LEARNING_RATE)


def _shape(draws: Draws) -> Shape:
    return {
        "tables": draws.one_of(4, 16, step=2),
        "batch": draws.one_of(64, 512),
        "ids": draws.one_of(2, 10),
        "dim": draws.one_of(16, 64, step=4),
    }


def pipeline(name: str, **options: Any) -> Callable[[Library, Shape, torch.device], Step]:
    """A step of a pipeline: `progress`."""

    def make(library: Library, shape: Shape, device: torch.device) -> Step:
        model = distributed(library, shape, device)
        model.train(not name.startswith("Eval"))
        kind = library.get("distributed.train_pipeline.train_pipelines", name)
        built = kind(model, _dense_optimizer(model), device, **options)
        source = batches(library, shape)
        return lambda: built.progress(source)

    return make


def loop(library: Library, shape: Shape, device: torch.device) -> Step:
    """A step of a plain loop."""
    model = distributed(library, shape, device)
    return _loop(model, batches(library, shape), device, lambda: None)


def replicas(library: Library, shape: Shape, device: torch.device) -> Step:
    """A step of copies of all tables, whose weights and optimizer states are averaged after it."""
    model = distributed(library, shape, device, group=1)
    return _loop(model, batches(library, shape), device, model.sync)


def _loop(
    model: Any, source: Iterator[Any], device: torch.device, after: Callable[[], object]
) -> Step:
    optimizer = _dense_optimizer(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss, output = model(next(source).to(device))
        loss.backward()
        optimizer.step()
        after()
        return output  # type: ignore[no-any-return] # the model is untyped here

    return step


def tracked(library: Library, shape: Shape, device: torch.device) -> Step:
    """A step of a plain loop, after which a tracker tells which rows were trained."""
    model = distributed(library, shape, device)
    config = library.get("distributed.model_tracker.types", "DeltaTrackerConfig")()
    tracker = model.init_torchrec_delta_tracker(config)
    return _loop(model, batches(library, shape), device, tracker.get_unique_ids)


def moving(library: Library, shape: Shape, device: torch.device) -> Step:
    """A step of a plain loop, after which every table, with its optimizer's state, moves to the next rank."""
    if library.name == "torchrec" and device.type == "cpu":
        raise NotImplementedError("TorchRec 1.8's reshard does not return with gloo")
    model, ranks = Model(library, shape), dist.get_world_size()
    model.over.to(device)
    sharder = library.get("distributed.embeddingbag", "EmbeddingBagCollectionSharder")(
        fused_params=dict(library.fused_params)
    )
    table_wise = library.get("distributed.sharding_plan", "table_wise")
    construct = library.get("distributed.sharding_plan", "construct_module_sharding_plan")
    plans = [
        construct(
            model.tables,
            {
                f"t_{name}": table_wise(rank=(place + shift) % ranks, compute_kernel="fused")
                for place, name in enumerate(features_of(shape))
            },
            sharder,
            local_size=ranks,
            world_size=ranks,
            device_type=device.type,
        )
        for shift in range(2)
    ]
    whole = library.get("distributed.types", "ShardingPlan")({"tables": plans[0]})
    kind = library.get("distributed.model_parallel", "DistributedModelParallel")
    sharded = kind(model, device=device, plan=whole, sharders=[sharder])
    number = count(1)

    def move() -> None:
        new = plans[next(number) % 2]
        # What a plan's object holds is changed by the move.
        sharded.reshard({"tables": (0.0, copy.copy(new))}, "tables")

    return _loop(sharded, batches(library, shape), device, move)


def behind_maps(
    make: Callable[[Library, Shape, torch.device], Any], module: str, sharder: str, *, wraps: bool
) -> Callable[[Library, Shape, torch.device], Step]:
    """A step of tables behind maps, cut by rows.

    Args:
        make: the plain collection.
        module: where its sharder is.
        sharder: cuts it.
        wraps: whether that is made from the tables' sharder.
    """

    def made(library: Library, shape: Shape, device: torch.device) -> Step:
        plain, ranks = make(library, shape, torch.device("meta")), dist.get_world_size()
        inner = library.get("distributed.embeddingbag", "EmbeddingBagCollectionSharder")
        tables = inner(fused_params=dict(library.fused_params))
        maps = library.get("distributed.mc_modules", "ManagedCollisionCollectionSharder")
        own = library.get(module, sharder)(tables, *([] if wraps else [maps()]))
        row_wise = library.get("distributed.sharding_plan", "row_wise")
        plan = library.get("distributed.sharding_plan", "construct_module_sharding_plan")(
            plain,
            {f"t_{name}": row_wise(compute_kernel="fused") for name in features_of(shape)},
            own,
            local_size=ranks,
            world_size=ranks,
            device_type=device.type,
        )
        whole = library.get("distributed.types", "ShardingPlan")({"": plan})
        kind = library.get("distributed.model_parallel", "DistributedModelParallel")
        model = kind(plain, device=device, plan=whole, sharders=[own])
        return drifting(library, {**shape, "spread": 1} if wraps else shape, device, model)

    return made


def pool_over_ranks(
    make: Callable[[Library, Shape, torch.device, Callable[[Any], Any]], Step],
    sharder: str,
    module: str,
) -> Callable[[Library, Shape, torch.device], Step]:
    """A step of a pool that is cut by rows: every rank writes and reads.

    Args:
        make: the step of a pool.
        sharder: cuts it.
        module: where that is.
    """

    def made(library: Library, shape: Shape, device: torch.device) -> Step:
        kinds = library.get("distributed.types", "ObjectPoolShardingType")
        plan = library.get("distributed.types", "ObjectPoolShardingPlan")(kinds.ROW_WISE)
        env = library.get("distributed.types", "ShardingEnv").from_process_group(dist.group.WORLD)
        own = library.get(f"distributed.{module}", sharder)()
        return make(library, shape, device, lambda pool: own.shard(pool, plan, env, device))

    return made


PARALLEL = {
    "a plain loop": Case(_shape, loop),
    "TrainPipelineBase": Case(_shape, pipeline("TrainPipelineBase")),
    "TrainPipelineSparseDist": Case(_shape, pipeline("TrainPipelineSparseDist")),
    "TrainPipelineFusedSparseDist": Case(_shape, pipeline("TrainPipelineFusedSparseDist")),
    "TrainPipelineSemiSync": Case(_shape, pipeline("TrainPipelineSemiSync", start_batch=0)),
    "EvalPipelineSparseDist": Case(_shape, pipeline("EvalPipelineSparseDist")),
    "PrefetchTrainPipelineSparseDist": Case(_shape, pipeline("PrefetchTrainPipelineSparseDist")),
    "TrainPipelineSparseDistLite": Case(_shape, pipeline("TrainPipelineSparseDistLite")),
    "EvalPipelineFusedSparseDist": Case(_shape, pipeline("EvalPipelineFusedSparseDist")),
    "DMPCollection": Case(_shape, replicas),
    "ModelDeltaTracker": Case(_shape, tracked),
    "reshard": Case(_shape, moving),
    "ShardedManagedCollisionEmbeddingBagCollection": Case(
        _shape,
        behind_maps(
            mapped,
            "distributed.mc_embeddingbag",
            "ManagedCollisionEmbeddingBagCollectionSharder",
            wraps=False,
        ),
        equal=False,
    ),
    "ShardedITEPEmbeddingBagCollection": Case(
        _shape,
        behind_maps(
            pruned,
            "distributed.itep_embeddingbag",
            "ITEPEmbeddingBagCollectionSharder",
            wraps=True,
        ),
        equal=False,
    ),
    "ShardedTensorPool": Case(
        pool_shape, pool_over_ranks(tensor_pool, "TensorPoolSharder", "tensor_pool")
    ),
    "ShardedKeyedJaggedTensorPool": Case(
        pool_shape,
        pool_over_ranks(ids_pool, "KeyedJaggedTensorPoolSharder", "keyed_jagged_tensor_pool"),
    ),
}
