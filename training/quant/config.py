"""From a trained collection and its quantization config to tables that are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.quant.rows import stored_data_type

C = TypeVar("C", bound=BaseEmbeddingConfig)


def quantization_of(
    module: nn.Module,
) -> tuple[torch.dtype, torch.dtype, Mapping[str, torch.dtype]]:
    """The lookup's output type, the tables' type, and the types of single tables.

    ``torch.ao.quantization.quantize_dynamic`` has put them on the module as ``qconfig``, a
    `tessera.training.modules.embedding_configs.QuantConfig` or torch's own.

    Raises:
        UserError: there is no ``qconfig``.
    """
    qconfig: Any = getattr(module, "qconfig", None)
    if qconfig is None:
        raise UserError(
            f"{type(module).__name__} has no qconfig; quantize it with "
            "torch.ao.quantization.quantize_dynamic, or give it one (QuantConfig)"
        )
    single = getattr(qconfig, "per_table_weight_dtype", None) or {}
    return qconfig.activation().dtype, qconfig.weight().dtype, single


def stored_tables(
    tables: Sequence[C], dtype: torch.dtype, single: Mapping[str, torch.dtype]
) -> list[C]:
    """Copies of ``tables`` with the types that they are stored in: ``dtype``, or ``single``'s.

    Raises:
        UserError: a type that is not stored.
    """
    return [
        replace(table, data_type=stored_data_type(single.get(table.name, dtype)))
        for table in tables
    ]


def float_tables(
    module: EmbeddingBagCollection | EmbeddingCollection,
) -> tuple[Sequence[BaseEmbeddingConfig], dict[str, Tensor]]:
    """The tables of a trained collection, and the weight of each by its name."""
    configs: Sequence[BaseEmbeddingConfig]
    if isinstance(module, EmbeddingBagCollection):
        configs, tables = module.embedding_bag_configs(), module.embedding_bags
    else:
        configs, tables = module.embedding_configs(), module.embeddings
    weights: dict[str, Tensor] = {}
    for name, table in tables.items():
        weight = table.weight
        assert isinstance(weight, Tensor)
        weights[name] = weight
    return configs, weights
