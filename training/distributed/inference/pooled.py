"""Quantized EmbeddingBagCollections on the devices of one process, and their sharder.

Works on machines without a GPU: all shards are then on the CPU.  The sharded module is traced by
torch.fx and compiles under ``torch.jit.script``, and takes batches of any size.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.inference.collection import (
    QuantCollectionContext,
    QuantCollectionSharder,
    QuantInputDist,
    ShardedQuantCollection,
    create_infer_sharding,
)
from tessera.training.distributed.inference.sharding import InferSharding
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.travel.kjt_list import ListOfKJTList
from tessera.training.modules.embedding_configs import EmbeddingBagConfig
from tessera.training.quant.embedding_modules import EmbeddingBagCollection
from tessera.training.quant.pooled import MeanColumns
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

ShardedQuantEbcInputDist = QuantInputDist


def create_infer_embedding_bag_sharding(
    sharding_type: str,
    sharding_infos: Sequence[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
) -> InferSharding:
    """Pooled tables of one sharding type on the devices of this process.

    See `tessera.training.distributed.inference.collection.create_infer_sharding`.
    """
    return create_infer_sharding(sharding_type, sharding_infos, env, device, pooled=True)


class ShardedQuantEmbeddingBagCollection(ShardedQuantCollection[EmbeddingBagConfig]):
    """A quantized EmbeddingBagCollection on several devices.

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
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        self._embedding_names = module.embedding_names()
        self._length_per_key = [
            table.embedding_dim for table in self.configs for _ in table.feature_names
        ]
        self._weighted = module.is_weighted()
        self._means = MeanColumns(self.configs)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The settings of every table, in the collection's order."""
        return self.configs

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._weighted

    def output_dist(self, ctx: QuantCollectionContext, output: list[list[Tensor]]) -> KeyedTensor:
        """The vectors on the first device, in the unsharded module's order."""
        assert ctx.features is not None
        shardings = list(self._shardings.values())
        if len(shardings) == 1 and shardings[0].in_order and not self._means.needed:
            return self._named(shardings[0].merged(output[0]))
        columns: list[Tensor] = []
        for sharding, tensors in zip(shardings, output, strict=True):
            columns.extend(sharding.pooled_columns(tensors))
        lengths = ctx.features.lengths()
        if shardings[0].output_device.type != "cpu":
            lengths = lengths.to(shardings[0].output_device, non_blocking=True)
        columns = self._means.divide_columns(self.in_order(columns), lengths)
        return self._named(torch.cat(columns, dim=1))

    def _named(self, pooled: Tensor) -> KeyedTensor:
        return KeyedTensor(self._embedding_names, self._length_per_key, pooled)

    def compute_and_output_dist(
        self,
        ctx: QuantCollectionContext,
        input: ListOfKJTList,  # noqa: A002 - the reference's name
    ) -> KeyedTensor:
        """`compute`, then `output_dist`."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """All steps.

        Args:
            features: at least the features of all tables, in any order.

        Returns:
            ``[B, sum of D]`` on the first device; an empty bag gives zeros.

        Raises:
            IndexError: an id on the CPU is not a row of its table.
            KeyError: a feature is missing.
        """
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features))


class QuantEmbeddingBagCollectionSharder(QuantCollectionSharder[EmbeddingBagCollection]):
    """Makes `ShardedQuantEmbeddingBagCollection`s; see `QuantCollectionSharder`."""

    _unsharded = EmbeddingBagCollection
    _sharded = ShardedQuantEmbeddingBagCollection
