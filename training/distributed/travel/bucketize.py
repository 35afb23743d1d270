"""Sorting ids by the block of rows that holds them, before they travel (row-wise sharding).

Legend: ``F`` features, ``B`` samples, ``W`` buckets, ``N`` ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.training.fbgemm import load_sparse_operators
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


def bucketize_kjt_before_all2all(  # noqa: PLR0917 - the signature TorchRec users know
    kjt: KeyedJaggedTensor,
    num_buckets: int,
    block_sizes: Tensor,
    output_permute: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    bucketize_pos: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    block_bucketize_row_pos: list[Tensor] | None = None,
    keep_original_indices: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
) -> tuple[KeyedJaggedTensor, Tensor | None]:
    """Sort the ids into buckets; within a bucket they keep their order.

    Args:
        kjt: the features; its batch size may vary per feature.
        num_buckets: ``W``.
        block_sizes: ``[F]``, of the ids' dtype: id ``i`` of feature ``f`` goes to bucket
            ``i // block_sizes[f]`` as id ``i % block_sizes[f]``.
        output_permute: whether to return where each id went.
        bucketize_pos: whether the result's weights are each id's place in its bag, as float32,
            instead of the ids' weights.
        block_bucketize_row_pos: for blocks of different sizes, per feature ``[W + 1]`` bounds;
            they take the place of ``block_sizes``.
        keep_original_indices: whether ids stay as they are in their buckets; those outside of all
            blocks go to any bucket, always to the same.

    Returns:
        The ids with ``W * F`` keys, bucket by bucket, and ``[N]`` int64: the place in the result
        of each id of ``kjt`` (None unless asked for).  An id outside the table stays outside the
        rows of the bucket that it goes to.

    Raises:
        ValueError: ``block_sizes`` has not one entry per key.
    """
    keys = kjt.keys()
    if block_sizes.numel() != len(keys):
        raise ValueError(
            f"block_sizes has {block_sizes.numel()} entries; give one for each of {len(keys)} keys"
        )
    load_sparse_operators()
    variable = kjt.variable_stride_per_key()
    empty = not kjt.lengths().numel()
    strides, ids = kjt.stride_per_key(), kjt.values()
    if empty:
        # FBGEMM's kernel cannot be started on nothing.
        lengths, bucketized, weights, positions = kjt.lengths(), ids, kjt.weights_or_none(), ids
        places = torch.empty(0, dtype=torch.int64, device=ids.device) if output_permute else None
    else:
        lengths, bucketized, weights, positions, places = (
            torch.ops.fbgemm.block_bucketize_sparse_features(
                kjt.lengths().view(-1),
                ids,
                bucketize_pos=bucketize_pos,
                sequence=output_permute,
                block_sizes=block_sizes.to(ids.dtype),
                my_size=num_buckets,
                weights=kjt.weights_or_none(),
                batch_size_per_feature=(
                    torch.tensor(strides, dtype=ids.dtype, device=ids.device) if variable else None
                ),
                max_B=max(strides, default=0) if variable else -1,
                block_bucketize_pos=(
                    None
                    if block_bucketize_row_pos is None
                    else [bounds.to(ids.dtype) for bounds in block_bucketize_row_pos]
                ),
                keep_orig_idx=keep_original_indices,
            )
        )
    sorted_ids = KeyedJaggedTensor(
        keys=keys * num_buckets,
        values=bucketized,
        weights=positions.float() if bucketize_pos else weights,
        lengths=lengths,
        stride=None if variable else 0 if empty else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() * num_buckets if variable else None,
        validate=False,
    )
    return sorted_ids, places


def ranks_of_ids(ids: Tensor, bounds: Sequence[int]) -> Tensor:
    """The rank that each id is sent to by its block, ``[N]`` int64; of one outside of all blocks, too.

    Args:
        ids: ``[N]``.
        bounds: where the block of each rank begins, and the end.
    """
    if not ids.numel():
        return torch.empty(0, dtype=torch.int64, device=ids.device)
    # The operator reads memory, not strides.
    features = KeyedJaggedTensor(
        ["ids"], ids.contiguous(), lengths=torch.tensor([len(ids)], device=ids.device)
    )
    sizes, blocks = blocks_of([list(bounds)], ids.device)
    sent, places = bucketize_kjt_before_all2all(
        features,
        len(bounds) - 1,
        sizes,
        output_permute=True,
        block_bucketize_row_pos=blocks,
        keep_original_indices=True,
    )
    assert places is not None, "asked for"
    ends = torch.tensor(sent.length_per_key(), device=ids.device).cumsum(0)
    return torch.searchsorted(ends, places.long(), right=True)


def blocks_of(
    row_bounds: Sequence[list[int]], device: torch.device | None
) -> tuple[Tensor, list[Tensor] | None]:
    """What `bucketize_kjt_before_all2all` takes for blocks with these bounds.

    Args:
        row_bounds: by feature, where the block of each rank begins, and the end.
        device: of the ids.

    Returns:
        ``block_sizes``, and ``block_bucketize_row_pos``: None where blocks are equally large.
    """
    sizes = [max(bounds[1], 1) for bounds in row_bounds]
    even = all(
        bounds == [min(size * place, bounds[-1]) for place in range(len(bounds))]
        for bounds, size in zip(row_bounds, sizes, strict=True)
    )
    return torch.tensor(sizes, dtype=torch.int64, device=device), (
        None
        if even
        else [torch.tensor(bounds, dtype=torch.int64, device=device) for bounds in row_bounds]
    )
