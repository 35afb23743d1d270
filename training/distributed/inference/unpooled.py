"""Quantized EmbeddingCollections on the devices of one process, and their sharder."""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.inference.collection import (
    QuantCollectionContext,
    QuantCollectionSharder,
    ShardedQuantCollection,
)
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.travel.kjt_list import ListOfKJTList
from tessera.training.modules.embedding_configs import EmbeddingConfig
from tessera.training.quant.embedding_modules import EmbeddingCollection
from tessera.training.quant.pooled import named_vectors
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class ShardedQuantEmbeddingCollection(ShardedQuantCollection[EmbeddingConfig]):
    """A quantized EmbeddingCollection on several devices.

    Args:
        module: the quantized collection; its rows are copied to the devices.
        table_name_to_parameter_sharding: the plan.
        env: how many devices: ``ShardingEnv.from_local``.
        fused_params: ``output_dtype`` and ``row_alignment``; None: the module's own.
        device: the devices' type; None: ``cuda`` where there is one, else ``cpu``.

    Raises:
        UserError: the plan leaves a table out, or cannot be followed.
    """

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        self._embedding_names = [
            name for names in module.embedding_names_by_table() for name in names
        ]
        self._need_indices = module.need_indices()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The settings of every table, in the collection's order."""
        return self.configs

    def need_indices(self) -> bool:
        """Whether the output carries the ids, as weights."""
        return self._need_indices

    def output_dist(
        self,
        ctx: QuantCollectionContext,
        dist_input: ListOfKJTList,
        output: list[list[Tensor]],
    ) -> dict[str, JaggedTensor]:
        """The vectors on the first device, by feature in the unsharded module's order."""
        vectors: list[Tensor] = []
        for index, sharding in enumerate(self._shardings.values()):
            vectors.extend(
                sharding.unpooled_vectors(dist_input[index], ctx.routes[index], output[index])
            )
        assert ctx.features is not None
        return named_vectors(
            ctx.features,
            self.in_order(vectors),
            self._embedding_names,
            need_indices=self._need_indices,
        )

    def compute_and_output_dist(
        self,
        ctx: QuantCollectionContext,
        input: ListOfKJTList,  # noqa: A002 - the reference's name
    ) -> dict[str, JaggedTensor]:
        """`compute`, then `output_dist`."""
        return self.output_dist(ctx, input, self.compute(ctx, input))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """All steps.

        Args:
            features: at least the features of all tables, in any order.

        Returns:
            Of each feature (or ``feature@table``) the vectors ``[N_f, D]`` of its ids.

        Raises:
            IndexError: an id on the CPU is not a row of its table.
            KeyError: a feature is missing.
        """
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features))


class QuantEmbeddingCollectionSharder(QuantCollectionSharder[EmbeddingCollection]):
    """Makes `ShardedQuantEmbeddingCollection`s; see `QuantCollectionSharder`."""

    _unsharded = EmbeddingCollection
    _sharded = ShardedQuantEmbeddingCollection
