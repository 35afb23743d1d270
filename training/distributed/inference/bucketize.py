"""Ids sorted by the block of rows that holds them, in one step of a traced graph."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.quant.lookup import checked_ids
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


def sort_by_block(  # noqa: PLR0917 - TorchScript calls it by position
    features: KeyedJaggedTensor,
    block_sizes: Tensor,
    row_bounds: list[Tensor],
    blocks: int,
    places: bool,  # noqa: FBT001 - TorchScript calls it by position
    row_counts: Tensor,
    warnings: Tensor,
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Sort the ids by block; within a block they keep their order.

    Args:
        features: the ids.
        block_sizes: ``[F]`` int64, rows of each feature's first block.
        row_bounds: per feature ``[blocks + 1]`` int64: where each block begins, and the end.
        blocks: how many.
        places: whether to work out where each id went.
        row_counts: ``[F]`` int64, rows of each feature's table.
        warnings: ``[1]`` int64, counts the ids that are not rows.

    Returns:
        ``blocks * F`` keys, block by block, each id counted from its block's first row; and
        ``[N]`` int64, each id's place there (empty unless asked for).
    """
    raw, lengths = features.values().long(), features.lengths().long()
    device = raw.device
    # An id that is not a row becomes row 0 here, where the whole table's size is known.
    ids = checked_ids(row_counts.to(device), raw, features.offsets().long(), warnings.to(device))[0]
    lengths_of_blocks, local_ids, weights, _positions, went = (
        torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths,
            ids,
            False,
            places,
            block_sizes.to(device),
            blocks,
            features.weights_or_none(),
            None,
            -1,
            [bounds.to(device) for bounds in row_bounds],
        )
    )
    # The operator reads -1, which is not an id, as the largest number there is.
    local_ids = local_ids.masked_fill(local_ids > 1 << 40, -1)
    keys: list[str] = []
    for _block in range(blocks):
        keys.extend(features.keys())
    # A key stands there once per block: split by place, not by name.
    by_block = KeyedJaggedTensor(
        keys,
        local_ids,
        weights=weights,
        lengths=lengths_of_blocks,
        stride=features.stride(),
        validate=False,
    )
    return by_block, ids[:0] if went is None else went


torch.fx.wrap("sort_by_block")
