"""Quantized collections on the devices of one process, and their sharders.

They work on machines without a GPU: all shards are then on the CPU.  A sharded module is traced by
torch.fx and compiles under ``torch.jit.script``, and takes batches of any size.

Legend: ``B`` samples, ``D`` columns, ``N_f`` ids of feature ``f``.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

from typing import cast

import torch
from torch import Tensor

from tessera.training.distributed.collections.pooled_output import PooledOutput
from tessera.training.distributed.inference.collection import (
    QuantCollectionContext,
    QuantCollectionSharder,
    ShardedQuantCollection,
)
from tessera.training.distributed.sharding.interfaces import blocks_by_name
from tessera.training.distributed.sharding.layout import output_columns
from tessera.training.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.training.modules.tables import DescribesPooled, DescribesUnpooled
from tessera.training.quant.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    MeanColumns,
    named_vectors,
)
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class ShardedQuantEmbeddingBagCollection(
    DescribesPooled, ShardedQuantCollection[EmbeddingBagConfig]
):
    """A quantized EmbeddingBagCollection on several devices; see `ShardedQuantCollection`."""

    def _prepare_output(self, module: EmbeddingBagCollection) -> None:
        self._length_per_key = [
            table.embedding_dim for table in self.configs for _ in table.feature_names
        ]
        self.weighted = module.weighted
        self._means = MeanColumns(self.configs)
        self._output = PooledOutput(
            self._embedding_names,
            self._length_per_key,
            [sharding.layout.parts() for sharding in self._shardings.values()],
        )

    def output_dist(self, ctx: QuantCollectionContext, output: list[list[Tensor]]) -> KeyedTensor:
        """The vectors ``[B, sum of D]`` on the first device, in the unsharded module's order."""
        assert ctx.features is not None
        shardings = list(self._shardings.values())
        joined = self._output.join(
            [s.merged(own) for s, own in zip(shardings, output, strict=True)]
        )
        if not self._means.needed:
            return joined
        lengths = ctx.features.lengths()
        if shardings[0].output_device.type != "cpu":
            lengths = lengths.to(shardings[0].output_device, non_blocking=True)
        pooled = self._means.divide(joined.values(), lengths)
        return KeyedTensor(self._embedding_names, self._length_per_key, pooled)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """All steps; see the unsharded `forward`.  The vectors are on the first device."""
        ctx = self.create_context()
        return cast(
            "KeyedTensor", self.compute_and_output_dist(ctx, self.input_dist(ctx, features))
        )


class ShardedQuantEmbeddingCollection(DescribesUnpooled, ShardedQuantCollection[EmbeddingConfig]):
    """A quantized EmbeddingCollection on several devices; see `ShardedQuantCollection`."""

    def _prepare_output(self, module: EmbeddingCollection) -> None:
        self._need_indices = module.need_indices()
        # Each name's blocks of columns among the teams of all shardings.
        self._blocks = blocks_by_name(
            self._embedding_names,
            [
                output_columns(groups)
                for sharding in self._shardings.values()
                for groups in sharding.layout.groups_per_team()
            ],
        )

    def output_dist(
        self, ctx: QuantCollectionContext, output: list[list[Tensor]]
    ) -> dict[str, JaggedTensor]:
        """The vectors ``[N_f, D]`` on the first device, by feature in the unsharded order."""
        assert ctx.features is not None
        assert ctx.sent is not None
        teams: list[tuple[Tensor, list[int]]] = []
        for index, sharding in enumerate(self._shardings.values()):
            teams += sharding.unpooled_vectors(ctx.sent[index], ctx.routes[index], output[index])
        vectors = []
        for blocks in self._blocks:
            parts = []
            for block in blocks:
                team, starts = teams[block.source]
                parts.append(team[starts[block.place] : starts[block.place + 1]])
            vectors.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        return named_vectors(
            ctx.features, vectors, self._embedding_names, need_indices=self._need_indices
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """All steps; see the unsharded `forward`.  The vectors are on the first device."""
        ctx = self.create_context()
        found = self.compute_and_output_dist(ctx, self.input_dist(ctx, features))
        return cast("dict[str, JaggedTensor]", found)


class QuantEmbeddingBagCollectionSharder(QuantCollectionSharder[EmbeddingBagCollection]):
    """Makes `ShardedQuantEmbeddingBagCollection`s; see `QuantCollectionSharder`."""

    _plain, _sharded = EmbeddingBagCollection, ShardedQuantEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(QuantCollectionSharder[EmbeddingCollection]):
    """Makes `ShardedQuantEmbeddingCollection`s; see `QuantCollectionSharder`."""

    _plain, _sharded = EmbeddingCollection, ShardedQuantEmbeddingCollection


QuantEmbeddingCollection = EmbeddingCollection
"""TorchRec's name, beside the sharded form, of the quantized unpooled collection."""
