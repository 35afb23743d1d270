"""One step of a module in Tessera and in TorchRec, for `modules_versus_torchrec`.

A case draws a shape, and gives either library's step on the same data.  Both have the same
names in the same modules, so one function makes either's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.bench.sharded_steps import Library, libraries

BATCHES = 8  # different ones, used in turn
BUCKETS = 4  # of a hash-based map, which divide its rows
Shape = dict[str, Any]
Step = Callable[[], Tensor]
"""Takes one step; what it gives is equal in both libraries where `Case.equal` says so."""


@dataclass(frozen=True)
class Draws:
    """Draws shapes.

    Attributes:
        generator: of random numbers.
        anywhere: whether a number may be any from half the least of those that a case names to twice the largest.
    """

    generator: torch.Generator
    anywhere: bool = False

    def one_of(self, *values: Any, step: int = 1) -> Any:
        """One of ``values``, drawn evenly; of numbers, with ``anywhere``, one within their range.

        Such a number is a multiple of ``step``, and its logarithm is drawn evenly.
        """
        if not self.anywhere or not all(type(value) is int for value in values):
            return values[int(torch.randint(len(values), (1,), generator=self.generator))]
        least, most = math.log(min(values) / 2), math.log(2 * max(values))
        place = float(torch.rand((), generator=self.generator, dtype=torch.float64))
        return max(1, round(math.exp(least + place * (most - least)) / step)) * step


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        draw: a shape.
        make: a library's step at a shape, on a device.
        equal: whether the step's result has to be equal in both libraries.
    """

    draw: Callable[[Draws], Shape]
    make: Callable[[Library, Shape, torch.device], Step]
    equal: bool = True


def random() -> torch.Generator:
    """The generator of a step's data, the same for each library."""
    return torch.Generator().manual_seed(5)


def _map_shape(draws: Draws) -> Shape:
    return {
        "rows": draws.one_of(1000, 20_000, 200_000, step=BUCKETS),
        "ids": draws.one_of(500, 5000, 50_000),
    }


def _sorted_map_shape(draws: Draws) -> Shape:
    policies = ("LFU_EvictionPolicy", "LRU_EvictionPolicy", "DistanceLFU_EvictionPolicy")
    more = {"policy": draws.one_of(*policies), "interval": draws.one_of(1, 5)}
    return {**_map_shape(draws), **more}


def _drifting_ids(shape: Shape) -> list[Tensor]:
    """Ids of which most are frequent ones, as of real features; the range drifts from batch to batch."""
    generator = random()
    uniform = [torch.rand(shape["ids"], generator=generator) for _ in range(BATCHES)]
    return [
        ((2 * shape["rows"] * u**3).long() + step * (shape["rows"] // 50)) * 7919
        for step, u in enumerate(uniform)
    ]


def _map_step(
    library: Library, shape: Shape, module: Any, device: torch.device, *, training: bool = True
) -> Step:
    jagged = library.get("sparse.jagged_tensor", "JaggedTensor")
    lengths = torch.ones(shape["ids"], dtype=torch.int32, device=device)
    batches = [{"f": jagged(ids.to(device), lengths=lengths)} for ids in _drifting_ids(shape)]
    module.train(training)
    number = count()

    def step() -> Tensor:
        found = module(batches[next(number) % BATCHES])["f"].values()
        if training:
            module.evict()
        return found  # type: ignore[no-any-return] # the modules are untyped here

    return step


def sorted_map(library: Library, shape: Shape, device: torch.device) -> Step:
    """Ids to rows by a sorted map that learns."""
    module = library.get("modules.mc_modules", "MCHManagedCollisionModule")(
        zch_size=shape["rows"],
        device=device,
        eviction_policy=library.get("modules.mc_modules", shape["policy"])(),
        eviction_interval=shape["interval"],
        input_hash_size=2**40,
    )
    return _map_step(library, shape, module, device)


def _hash_map(library: Library, shape: Shape, device: torch.device) -> Any:
    policy = library.get("modules.hash_mc_evictions", "HashZchEvictionPolicyName")
    config = library.get("modules.hash_mc_evictions", "HashZchEvictionConfig")
    return library.get("modules.hash_mc_modules", "HashZchManagedCollisionModule")(
        zch_size=shape["rows"],
        device=device,
        total_num_buckets=BUCKETS,
        eviction_policy_name=policy.SINGLE_TTL_EVICTION,
        eviction_config=config(features=["f"], single_ttl=24),
    )


def hash_map(library: Library, shape: Shape, device: torch.device) -> Step:
    """Ids to rows by probing."""
    return _map_step(library, shape, _hash_map(library, shape, device), device)


def hash_map_of_new_ids(library: Library, shape: Shape, device: torch.device) -> Step:
    """The same where the map forgets all ids every few steps, so that many are new."""
    module = _hash_map(library, shape, device)
    learn, number = _map_step(library, shape, module, device), count()

    def step() -> Tensor:
        if next(number) % BATCHES == 0:
            module._hash_zch_identities.fill_(-1)  # noqa: SLF001 - a buffer that both libraries have
            module._hash_zch_metadata.fill_(-1)  # noqa: SLF001 - as above
        return learn()

    return step


def hash_map_lookup(library: Library, shape: Shape, device: torch.device) -> Step:
    """The same in evaluation: the ids of each batch, which a map has learned as far as it has rows."""
    learned = _hash_map(libraries()[0], shape, device)
    learn = _map_step(libraries()[0], shape, learned, device)
    for _ in range(BATCHES):
        learn()
    module = _hash_map(library, shape, device)
    module.load_state_dict(learned.state_dict())
    module.reset_inference_mode()
    return _map_step(library, shape, module, device, training=False)


def pool_shape(draws: Draws) -> Shape:
    return {
        "rows": draws.one_of(1000, 100_000),
        "ids": draws.one_of(64, 1024, 8192),
        "dim": draws.one_of(16, 128, step=4),
    }


def tensor_pool(
    library: Library,
    shape: Shape,
    device: torch.device,
    spread: Callable[[Any], Any] | None = None,
) -> Step:
    """Vectors are written by number, then read; ``spread`` makes the pool one over ranks."""
    pool = library.get("modules.tensor_pool", "TensorPool")(
        shape["rows"], shape["dim"], torch.float32, device
    )
    pool = spread(pool) if spread else pool
    generator = random()
    ids = torch.randint(shape["rows"], (shape["ids"],), generator=generator).to(device)
    values = torch.rand(shape["ids"], shape["dim"], generator=generator).to(device)

    def step() -> Tensor:
        pool.update(ids, values)
        found = pool.lookup(ids)
        return found.wait() if spread else found  # type: ignore[no-any-return] # as above

    return step


def ids_pool(
    library: Library,
    shape: Shape,
    device: torch.device,
    spread: Callable[[Any], Any] | None = None,
) -> Step:
    """Bags are written by number, then read; ``spread`` makes the pool one over ranks."""
    most = {f"f{place}": place + shape["dim"] // 8 for place in range(4)}
    pool = library.get("modules.keyed_jagged_tensor_pool", "KeyedJaggedTensorPool")(
        shape["rows"], most, torch.int64, False, device
    )
    pool = spread(pool) if spread else pool
    generator = random()
    # In order: TorchRec 1.8 writes bags over ranks to other rows where they are not.
    ids = torch.randint(shape["rows"], (shape["ids"],), generator=generator).sort().values
    lengths = torch.cat(
        [torch.randint(bound + 1, (shape["ids"],), generator=generator) for bound in most.values()]
    )
    values = torch.randint(2**40, (int(lengths.sum()),), generator=generator)
    kjt = library.get("sparse.jagged_tensor", "KeyedJaggedTensor")
    bags = kjt.from_lengths_sync(list(most), values, lengths).to(device)
    ids = ids.to(device)

    def step() -> Tensor:
        pool.update(ids, bags)
        found = pool.lookup(ids)
        return (found.wait() if spread else found).values()  # type: ignore[no-any-return] # as above

    return step


SESSIONS = 16  # examples of each, for metrics that rank
RANKED = {"GAUC": ("metrics.gauc", "GAUCMetric")}
"""Metrics that are not in the mapping."""
METRICS = (
    *RANKED,
    "NDCG",
    "NE",
    "CTR",
    "CALIBRATION",
    "MSE",
    "MAE",
    "AUC",
    "AUPRC",
    "ACCURACY",
    "PRECISION",
    "RECALL",
)


def _metric_shape(draws: Draws) -> Shape:
    metric = draws.one_of(*METRICS)
    return {
        "metric": metric,
        "batch": draws.one_of(128, 2048, step=SESSIONS),
        "tasks": draws.one_of(1, 4),
        "every": draws.one_of(10, 50),
        "window": draws.one_of(20, 200),
        "fused": draws.one_of(False, metric not in {"NDCG", "AUPRC", "AUC", *RANKED}),
    }


def metric(library: Library, shape: Shape, device: torch.device) -> Step:
    """Batches are counted, and the metric computed, every few of them."""
    info = library.get("metrics.metrics_config", "RecTaskInfo")
    modes = library.get("metrics.metrics_config", "RecComputeMode")
    names = [f"t{place}" for place in range(shape["tasks"])]
    if shape["metric"] in RANKED:
        kind = library.get(*RANKED[shape["metric"]])
    else:
        by_name = library.get("metrics.metrics_config", "RecMetricEnum")[shape["metric"]]
        kind = library.get("metrics.metric_module", "REC_METRICS_MAPPING")[by_name]
    module = kind(
        world_size=1,
        my_rank=0,
        batch_size=shape["batch"],
        tasks=[info(name=name) for name in names],
        window_size=shape["window"] * shape["batch"],
        compute_mode=modes[
            "FUSED_TASKS_COMPUTATION" if shape["fused"] else "UNFUSED_TASKS_COMPUTATION"
        ],
    ).to(device)
    generator = random()

    def numbers() -> dict[str, Tensor]:
        drawn = {name: torch.rand(shape["batch"], generator=generator) for name in names}
        dtype = torch.float32 if shape["metric"] in RANKED else torch.float64  # as TorchRec's takes
        return {name: values.to(device, dtype) for name, values in drawn.items()}

    predictions, weights = numbers(), numbers()
    labels = {name: (values < 0.5).to(values.dtype) for name, values in numbers().items()}
    sessions = torch.arange(shape["batch"], device=device) // SESSIONS
    more: dict[str, Any] = {}
    if shape["metric"] == "NDCG":
        more["required_inputs"] = {"session_id": sessions.double()}
    elif shape["metric"] in RANKED:
        more["num_candidates"] = torch.full((shape["batch"] // SESSIONS,), SESSIONS, device=device)

    def step() -> Tensor:
        for _ in range(shape["every"]):
            module.update(predictions=predictions, labels=labels, weights=weights, **more)
        found = module.compute()
        return torch.stack([
            found[key].double().reshape(-1)[0] for key in sorted(found) if "window" in key
        ])  # fmt: skip

    return step


def _vectors_shape(draws: Draws) -> Shape:
    return {
        "features": draws.one_of(10, 40),
        "batch": draws.one_of(128, 2048),
        "dim": draws.one_of(16, 64, step=4),
    }


def regroup(library: Library, shape: Shape, device: torch.device) -> Step:
    """The vectors of two collections are put together in groups."""
    halves = [[f"f{place}" for place in range(first, shape["features"], 2)] for first in range(2)]
    generator = random()
    keyed = library.get("sparse.jagged_tensor", "KeyedTensor")
    given = [
        keyed(
            keys=names,
            length_per_key=[shape["dim"]] * len(names),
            values=torch.rand(shape["batch"], shape["dim"] * len(names), generator=generator).to(
                device
            ),
        )
        for names in halves
    ]
    names = [name for half in halves for name in half]
    groups = [sorted(names)[: len(names) // 2], sorted(names)[len(names) // 2 :]]
    module = library.get("modules.regroup", "KTRegroupAsDict")(groups, ["first", "second"])
    return lambda: module(given)["second"]


def trained(module: nn.Module, *given: Any) -> Step:
    """Forward and backward of a module whose weights depend on their places alone."""
    for parameter in module.parameters():
        values = torch.arange(parameter.numel()).sin() / parameter.size(-1) ** 0.5
        parameter.data.copy_(values.view_as(parameter))

    def step() -> Tensor:
        for parameter in module.parameters():
            parameter.grad = None
        loss: Tensor = module(*given).square().mean()
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        return loss.detach()

    return step


def dense(
    module: str, name: str, *arguments: Any
) -> Callable[[Library, Shape, torch.device], Step]:
    """Makes the step of a module whose input is ``[batch, features * dim]``."""

    def make(library: Library, shape: Shape, device: torch.device) -> Step:
        width = shape["features"] * shape["dim"]
        built = library.get(module, name)(width, *arguments).to(device)
        return trained(built, torch.rand(shape["batch"], width, generator=random()).to(device))

    return make


def factorization(library: Library, shape: Shape, device: torch.device) -> Step:
    """The pairs of a factorization machine."""
    built = library.get("modules.deepfm", "FactorizationMachine")()
    generator = random()
    given = [
        torch.rand(shape["batch"], shape["dim"], generator=generator).to(device).requires_grad_()
        for _ in range(shape["features"])
    ]

    def step() -> Tensor:
        for each in given:
            each.grad = None
        loss: Tensor = built(given).square().mean()
        loss.backward()  # type: ignore[no-untyped-call] # as above
        return loss.detach()

    return step


MODULES = {
    "MCHManagedCollisionModule": Case(_sorted_map_shape, sorted_map, equal=False),
    "HashZchManagedCollisionModule": Case(_map_shape, hash_map, equal=False),
    "HashZchManagedCollisionModule, new ids": Case(_map_shape, hash_map_of_new_ids, equal=False),
    "HashZchManagedCollisionModule, evaluation": Case(_map_shape, hash_map_lookup),
    "TensorPool": Case(pool_shape, tensor_pool),
    "KeyedJaggedTensorPool": Case(pool_shape, ids_pool),
    "metrics": Case(_metric_shape, metric),
    "KTRegroupAsDict": Case(_vectors_shape, regroup),
    "VectorCrossNet": Case(_vectors_shape, dense("modules.crossnet", "VectorCrossNet", 3)),
    "SwishLayerNorm": Case(_vectors_shape, dense("modules.activation", "SwishLayerNorm")),
    "FactorizationMachine": Case(_vectors_shape, factorization),
}
"""Modules of one process; those over ranks are in `parallel_steps`."""
