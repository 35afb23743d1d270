"""One step of a model or of a module with tables in Tessera and in TorchRec, for `modules_versus_torchrec`.

Weights depend on their places alone, so that both libraries compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.bench.module_steps import (
    BATCHES,
    Case,
    Draws,
    Shape,
    Step,
    dense,
    random,
    trained,
)
from tessera.training.bench.sharded_steps import LEARNING_RATE, Library

ROWS, DENSE = 5000, 13


def _layers_shape(draws: Draws) -> Shape:
    return {
        "features": draws.one_of(10, 20),
        "batch": draws.one_of(128, 512),
        "dim": draws.one_of(8, 16, step=4),
    }


def _tables_shape(draws: Draws) -> Shape:
    return {
        "tables": draws.one_of(4, 16, step=2),
        "batch": draws.one_of(64, 512),
        "ids": draws.one_of(2, 10),
        "dim": draws.one_of(16, 64, step=4),
    }


def _names(shape: Shape) -> list[str]:
    return [f"f{place}" for place in range(shape["tables"])]


def configs(library: Library, shape: Shape, names: list[str], rows: int = ROWS) -> list[Any]:
    """The settings of one table for each feature."""
    config = library.get("modules.embedding_configs", "EmbeddingBagConfig")
    return [
        config(num_embeddings=rows, embedding_dim=shape["dim"], name=f"t_{name}", feature_names=[name])
        for name in names
    ]  # fmt: skip


def _collection(library: Library, shape: Shape, names: list[str], device: torch.device) -> Any:
    kind = library.get("modules.embedding_modules", "EmbeddingBagCollection")
    return kind(tables=configs(library, shape, names), device=device)


def _ids(
    library: Library, shape: Shape, names: list[str], device: torch.device, rows: int = ROWS
) -> Any:
    generator = random()
    lengths = torch.randint(
        0, 2 * shape["ids"], (len(names) * shape["batch"],), generator=generator
    )
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    kjt = library.get("sparse.jagged_tensor", "KeyedJaggedTensor")
    return kjt.from_lengths_sync(names, values, lengths).to(device)


def _dense_features(shape: Shape, device: torch.device) -> Tensor:
    return torch.rand(shape["batch"], DENSE, generator=random()).to(device)


def simple_deepfm(library: Library, shape: Shape, device: torch.device) -> Step:
    """Forward and backward of a whole DeepFM."""
    tables = _collection(library, shape, _names(shape), device)
    model = library.get("models.deepfm", "SimpleDeepFMNN")(DENSE, tables, 32, 16).to(device)
    ids = _ids(library, shape, _names(shape), device)
    return trained(model, _dense_features(shape, device), ids)


def dlrm_projection(library: Library, shape: Shape, device: torch.device) -> Step:
    """Forward and backward of a whole DLRM with projections."""
    tables, dim = _collection(library, shape, _names(shape), device), shape["dim"]
    layers = {
        "dense_arch_layer_sizes": [32, dim],
        "over_arch_layer_sizes": [64, 1],
        "interaction_branch1_layer_sizes": [64, 4 * dim],
        "interaction_branch2_layer_sizes": [64, 4 * dim],
    }
    model = library.get("models.dlrm", "DLRM_Projection")(
        embedding_bag_collection=tables, dense_in_features=DENSE, dense_device=device, **layers
    )
    ids = _ids(library, shape, _names(shape), device)
    return trained(model, _dense_features(shape, device), ids)


def wrapped_dlrm(library: Library, shape: Shape, device: torch.device) -> Step:
    """Forward, with the loss, and backward of a wrapped DLRM."""
    model = library.get("models.dlrm", "DLRMWrapper")(
        _collection(library, shape, _names(shape), device), DENSE, [32, shape["dim"]], [64, 1]
    ).to(device)
    generator = random()
    batch = library.get("datasets.utils", "Batch")(
        dense_features=_dense_features(shape, device),
        sparse_features=_ids(library, shape, _names(shape), device),
        labels=torch.randint(0, 2, (shape["batch"],), generator=generator).float().to(device),
    )
    batch.float_features, batch.idlist_features = batch.dense_features, batch.sparse_features
    batch.label = batch.labels

    class Loss(nn.Module):
        """The loss of the wrapper alone."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, given: Any) -> Tensor:
            loss: Tensor = self.model(given)[0]
            return loss

    return trained(Loss(), batch)


class _Mixing(nn.Module):
    """A layer over the pooled vectors of a tower."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 8)

    def forward(self, pooled: Any) -> Tensor:
        """The layer's outputs, ``[B, 8]``."""
        mixed: Tensor = self.linear(pooled.values())
        return mixed


def towers(library: Library, shape: Shape, device: torch.device) -> Step:
    """Forward and backward of towers, each with two tables and a layer."""
    names = _names(shape)
    tower = library.get("modules.embedding_tower", "EmbeddingTower")
    built = [
        tower(
            _collection(library, shape, names[first : first + 2], device),
            _Mixing(2 * shape["dim"]),
        )
        for first in range(0, len(names), 2)
    ]
    model = library.get("modules.embedding_tower", "EmbeddingTowerCollection")(built).to(device)
    return trained(model, _ids(library, shape, names, device))


def regrouped(library: Library, shape: Shape, device: torch.device) -> Step:
    """Columns of two keyed tensors in groups, by the function."""
    names, generator = [f"f{place}" for place in range(shape["features"])], random()
    keyed = library.get("sparse.jagged_tensor", "KeyedTensor")
    given = []
    for own in (names[::2], names[1::2]):
        values = torch.rand(shape["batch"], shape["dim"] * len(own), generator=generator)
        given.append(keyed(own, [shape["dim"]] * len(own), values.to(device)))
    groups = [names[: len(names) // 2], names[len(names) // 2 :]]
    function = library.get("sparse.jagged_tensor", "regroup_kts")
    return lambda: function(given, groups)[1]


def fused_collection(library: Library, shape: Shape, device: torch.device) -> Step:
    """Forward and backward of tables whose optimizer is in the backward pass."""
    kind = library.get("modules.fused_embedding_modules", "FusedEmbeddingBagCollection")
    model = kind(
        configs(library, shape, _names(shape)),
        torch.optim.SGD,
        {"lr": LEARNING_RATE},
        device=device,
    )
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.arange(value.numel()).sin().view_as(value))
    ids = _ids(library, shape, _names(shape), device)

    def step() -> Tensor:
        pooled: Tensor = model(ids).values()
        pooled.square().sum().backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        return pooled.detach()

    return step


def mapped(library: Library, shape: Shape, device: torch.device) -> Any:
    """Tables behind sorted maps that learn."""
    names, modules = _names(shape), "modules.mc_modules"
    tables = configs(library, shape, names)
    maps = {
        table.name: library.get(modules, "MCHManagedCollisionModule")(
            zch_size=ROWS,
            device=device,
            eviction_policy=library.get(modules, "LFU_EvictionPolicy")(),
            eviction_interval=5,
            input_hash_size=2**40,
        )
        for table in tables
    }
    inner = library.get("modules.embedding_modules", "EmbeddingBagCollection")(
        tables=tables, device=device
    )
    outer = "ManagedCollisionEmbeddingBagCollection"
    return library.get("modules.mc_embedding_modules", outer)(
        inner, library.get(modules, "ManagedCollisionCollection")(maps, tables), False
    )


def pruned(library: Library, shape: Shape, device: torch.device) -> Any:
    """Tables that have fewer rows than there are ids, and are pruned every few steps."""
    inner = _collection(library, shape, _names(shape), device)
    unpruned = {f"t_{name}": 2 * ROWS for name in _names(shape)}
    pruning = library.get("modules.itep_modules", "GenericITEPModule")(
        table_name_to_unpruned_hash_sizes=unpruned, pruning_interval=5
    )
    kind = library.get("modules.itep_embedding_modules", "ITEPEmbeddingBagCollection")
    return kind(inner, pruning)


def mapped_collection(library: Library, shape: Shape, device: torch.device) -> Step:
    """Forward and backward of tables behind sorted maps that learn; ids drift."""
    return drifting(library, shape, device, mapped(library, shape, device))


def drifting(library: Library, shape: Shape, device: torch.device, model: Any) -> Step:
    """Forward and backward of a collection behind maps; which ids are frequent changes from batch to batch."""
    names = _names(shape)
    kjt, drawn = library.get("sparse.jagged_tensor", "KeyedJaggedTensor"), []
    for number in range(BATCHES):
        ids = _ids(library, shape, names, device, rows=ROWS)
        moved = (ids.values() + number * ROWS // 50) * shape.get("spread", 7919)
        drawn.append(kjt.from_lengths_sync(names, moved, ids.lengths()))
    taken: list[int] = []

    def step() -> Tensor:
        taken.append(0)
        for parameter in model.parameters():
            parameter.grad = None
        found = model(drawn[len(taken) % BATCHES])
        pooled: Tensor = (found[0] if isinstance(found, tuple) else found).values()
        pooled.sum().backward()  # type: ignore[no-untyped-call] # as above
        return pooled.detach()

    return step


def several_metrics(library: Library, shape: Shape, device: torch.device) -> Step:
    """A module of metrics of several tasks counts batches, and computes every few of them."""
    package = "metrics.metrics_config"
    kinds = library.get(package, "RecMetricEnum")
    define, info = library.get(package, "RecMetricDef"), library.get(package, "RecTaskInfo")
    tasks = [
        info(name=f"t{n}", label_name=f"l{n}", prediction_name=f"p{n}", weight_name=f"w{n}")
        for n in range(shape["tasks"])
    ]
    own = define(rec_tasks=tasks, window_size=20 * shape["batch"])
    config = library.get(package, "MetricsConfig")(
        rec_tasks=tasks,
        rec_metrics={kinds[name]: own for name in ("NE", "CALIBRATION", "CTR", "AUC", "MSE")},
        throughput_metric=None,
        state_metrics=[],
    )
    module = library.get("metrics.metric_module", "generate_metric_module")(
        library.get("metrics.metric_module", "RecMetricModule"),
        metrics_config=config,
        batch_size=shape["batch"],
        world_size=1,
        my_rank=0,
        state_metrics_mapping={},
        device=device,
    )
    generator = random()
    batch = {}
    for place in range(shape["tasks"]):
        batch[f"p{place}"] = torch.rand(shape["batch"], generator=generator).to(device)
        batch[f"w{place}"] = torch.rand(shape["batch"], generator=generator).to(device)
        drawn = torch.rand(shape["batch"], generator=generator)
        batch[f"l{place}"] = (drawn < 0.5).float().to(device)

    def step() -> Tensor:
        for _ in range(shape["every"]):
            module.update(batch)
        found = module.compute()
        values = [found[key] for key in sorted(found) if "window" in key]
        return torch.stack([torch.as_tensor(v).double().reshape(-1)[0].cpu() for v in values])

    return step


def _metrics_shape(draws: Draws) -> Shape:
    return {
        "batch": draws.one_of(128, 2048),
        "tasks": draws.one_of(1, 4),
        "every": draws.one_of(10, 50),
    }


MODELS: dict[str, Case] = {
    "CrossNet": Case(_layers_shape, dense("modules.crossnet", "CrossNet", 3)),
    "LowRankMixtureCrossNet": Case(
        _layers_shape, dense("modules.crossnet", "LowRankMixtureCrossNet", 3, 4, 16)
    ),
    "SimpleDeepFMNN": Case(_tables_shape, simple_deepfm),
    "DLRM_Projection": Case(_tables_shape, dlrm_projection),
    # The pairs of vectors are in another order here, so weights by place give another loss.
    "DLRMWrapper": Case(_tables_shape, wrapped_dlrm, equal=False),
    "EmbeddingTowerCollection": Case(_tables_shape, towers),
    "regroup_kts": Case(_layers_shape, regrouped),
    "FusedEmbeddingBagCollection": Case(_tables_shape, fused_collection),
    "ManagedCollisionEmbeddingBagCollection": Case(_tables_shape, mapped_collection, equal=False),
    "RecMetricModule": Case(_metrics_shape, several_metrics),
}
"""Models, and modules with tables, of one process."""
