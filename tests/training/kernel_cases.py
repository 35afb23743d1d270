"""Groups of shards for tests of kernels, and a slow double of what they should do."""

import os

import torch
from torch import nn

from tessera.training.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.modules.embedding_configs import DataType, PoolingType
from tests.training.optimizer_reference import new_states, update_row

DEVICE = torch.device(os.environ.get("TESSERA_TEST_DEVICE", "cpu"))


def group(
    tables,
    *,
    mean=False,
    weighted=False,
    kernel=EmbeddingComputeKernel.FUSED,
    data_type=DataType.FP32,
    **fused_params,
):
    """``tables``: (rows, columns, number of features) of each."""
    shards = [
        ShardedEmbeddingTable(
            num_embeddings=rows,
            embedding_dim=cols,
            name=f"t{index}",
            feature_names=[f"f{index}_{place}" for place in range(features)],
            pooling=PoolingType.MEAN if mean else PoolingType.SUM,
            is_weighted=weighted,
            compute_kernel=kernel,
            local_rows=rows,
            local_cols=cols,
        )
        for index, (rows, cols, features) in enumerate(tables)
    ]
    return GroupedEmbeddingConfig(
        data_type=data_type,
        pooling=PoolingType.MEAN if mean else PoolingType.SUM,
        is_weighted=weighted,
        has_feature_processor=False,
        compute_kernel=kernel,
        embedding_tables=shards,
        fused_params=fused_params,
    )


class Double:
    """The same tables in float64, looked up by ``nn.EmbeddingBag`` and updated row by row."""

    def __init__(self, config, weights, *, pooled, kind):
        self.config, self.pooled, self.kind = config, pooled, kind
        self.weights = [weight.detach().double().cpu() for weight in weights]
        self.states = [new_states(kind, *weight.shape) for weight in self.weights]
        self.step = 0

    def forward(self, jagged):
        """``jagged``: feature to (bags of ids, their weights or None), in the group's order."""
        self.leaves = [weight.clone().requires_grad_() for weight in self.weights]
        self.touched = [set() for _ in self.weights]
        parts = []
        for index, (table, leaf) in enumerate(
            zip(self.config.embedding_tables, self.leaves, strict=True)
        ):
            for name in table.feature_names:
                bags, weights = jagged[name]
                parts.append(self._look_up(leaf, bags, weights))
                self.touched[index].update(row for bag in bags for row in bag)
        return torch.cat(parts, dim=1 if self.pooled else 0)

    def _look_up(self, leaf, bags, weights):
        if not self.pooled:
            return leaf[[row for bag in bags for row in bag]]
        mean = self.config.pooling is PoolingType.MEAN
        ids = torch.tensor([row for bag in bags for row in bag], dtype=torch.int64)
        offsets = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
        flat = None
        if weights is not None:
            shares = [
                weight / (len(bag) if mean else 1)
                for bag, own in zip(bags, weights, strict=True)
                for weight in own
            ]
            flat = torch.tensor(shares, dtype=torch.float64)
        mode = "mean" if mean and weights is None else "sum"
        bag = nn.EmbeddingBag(*leaf.shape, mode=mode, include_last_offset=True, _weight=leaf)
        # The module makes a parameter of its own; the function keeps the leaf.
        return nn.functional.embedding_bag(
            ids, leaf, offsets, mode=bag.mode, per_sample_weights=flat, include_last_offset=True
        )

    def update(self, **hyper):
        """After a backward pass: one step on every row that the batch named."""
        self.step += 1
        for leaf, weight, states, touched in zip(
            self.leaves, self.weights, self.states, self.touched, strict=True
        ):
            for row in touched:
                gradient = torch.zeros(weight.size(1)) if leaf.grad is None else leaf.grad[row]
                update_row(
                    self.kind,
                    weight[row],
                    gradient.double(),
                    [state[row] for state in states],
                    step=self.step,
                    **hyper,
                )
