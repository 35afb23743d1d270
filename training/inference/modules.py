"""Quantize the collections of a model, and spread them over the devices of one process.

``model, plan = shard_quant_model(quantize_inference_model(model))`` and then
`tessera.training.fx.symbolic_trace` and ``torch.jit.script`` make what C++ can load.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from tessera.errors import UserError
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.inference.sharded import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
)
from tessera.training.distributed.model.shard import shard_modules
from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.inference.predict_modules import (
    BatchingMetadata,
    PredictFactory,
    PredictModule,
    QualNameMetadata,
    quantize_dense,
    quantize_feature,
)
from tessera.training.modules.embedding_configs import QuantConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from tessera.training.quant.embedding_modules import EmbeddingCollection as QuantCollection

__all__ = [
    "QUANTIZED",
    "BatchingMetadata",
    "PredictFactory",
    "PredictModule",
    "QualNameMetadata",
    "quant_sharders",
    "quantize_dense",
    "quantize_embeddings",
    "quantize_feature",
    "quantize_inference_model",
    "shard_quant_model",
]

QUANTIZED: Mapping[type[nn.Module], type[nn.Module]] = {
    EmbeddingBagCollection: QuantBags,
    EmbeddingCollection: QuantCollection,
}
"""The quantized form of each type of collection."""


def quant_sharders() -> list[ModuleSharder[Any]]:
    """The sharders of quantized collections, each with its default settings."""
    return [QuantEmbeddingBagCollectionSharder(), QuantEmbeddingCollectionSharder()]


def quantize_embeddings(  # noqa: PLR0917 - the signature TorchRec users know
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    additional_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
) -> nn.Module:
    """Swap every collection in a model for its quantized form.

    Args:
        module: the model, or one collection.
        dtype: how numbers are stored: ``int8``, ``quint4x2``, ``quint2x4``, ``float16``,
            ``float32``.
        inplace: whether ``module`` itself is changed.
        additional_mapping: quantized forms of other types; each has a ``from_float``.
        output_dtype: of the looked-up vectors.
        per_table_weight_dtype: types of single tables, by name.

    Returns:
        The model, its tables as uint8 buffers under the parameters' names.

    Raises:
        UserError: a type that is not stored, or a table that is not there.
    """
    mapping = {**QUANTIZED, **(additional_mapping or {})}
    single = per_table_weight_dtype or {}
    tables = {
        name.split(".")[-2] for name, _ in module.named_parameters() if name.endswith(".weight")
    }
    unknown = sorted(set(single) - tables)
    if unknown:
        raise UserError(
            f"per_table_weight_dtype names table {unknown[0]!r}; there are {sorted(tables)}"
        )
    config = QuantConfig(
        activation=partial(SimpleNamespace, dtype=output_dtype),
        weight=partial(SimpleNamespace, dtype=dtype),
        per_table_weight_dtype=single,
    )
    return _swapped(module if inplace else copy.deepcopy(module), mapping, config)


def _swapped(
    module: nn.Module, mapping: Mapping[type[nn.Module], type[nn.Module]], config: QuantConfig
) -> nn.Module:
    kind = mapping.get(type(module))
    if kind is not None:
        cast("Any", module).qconfig = config
        quantized: nn.Module = cast("Any", kind).from_float(module)
        return quantized
    for name, child in module.named_children():
        setattr(module, name, _swapped(child, mapping, config))
    return module


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A copy of a trained model with quantized collections; the rest stays as it is.

    The arguments are those of `quantize_embeddings`, two of them called ``quantization_mapping``
    and ``quantization_dtype``.
    """
    return quantize_embeddings(
        model,
        quantization_dtype,
        additional_mapping=quantization_mapping,
        output_dtype=output_dtype,
        per_table_weight_dtype=per_table_weight_dtype,
    ).eval()


def shard_quant_model(  # noqa: PLR0917 - the signature TorchRec users know
    model: nn.Module,
    world_size: int = 1,
    compute_device: str | None = None,
    sharders: list[ModuleSharder[Any]] | None = None,
    constraints: Mapping[str, Any] | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Spread the quantized collections of a model over the devices of this process.

    Args:
        model: what `quantize_inference_model` gave; it is changed.
        world_size: how many devices.
        compute_device: their type; None: ``cuda`` where there is one, else ``cpu``.
        sharders: one per type of module; None: those of the quantized collections.
        constraints: of the planner, by table name.
        sharding_plan: where the tables go; None: what `EmbeddingShardingPlanner` says.

    Returns:
        The model and the plan that it follows.

    Raises:
        UserError: the plan cannot be followed.
        PlannerError: there is no plan.
    """
    # Planning is a package of its own, which a given plan does not need.
    from tessera.training.distributed.planner.hardware import Topology  # noqa: PLC0415
    from tessera.training.distributed.planner.planners import EmbeddingShardingPlanner  # noqa: PLC0415

    if compute_device is None:
        compute_device = "cuda" if torch.cuda.is_available() else "cpu"
    given = sharders or quant_sharders()
    if sharding_plan is None:
        topology = Topology(
            world_size=world_size, compute_device=compute_device, local_world_size=world_size
        )
        planner = EmbeddingShardingPlanner(topology, constraints=constraints)
        sharding_plan = planner.plan(model, given)
    env = ShardingEnv.from_local(world_size, 0)
    sharded = shard_modules(model, env, torch.device(compute_device), sharding_plan, given)
    return sharded, sharding_plan
