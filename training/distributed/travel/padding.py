"""Batches that vary per key with empty bags added, so that every key has as many."""

from __future__ import annotations

import torch

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


def pad_vbe_kjt_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids with empty bags behind those of each key, up to the most bags of any key.

    Args:
        features: a batch with a number of bags ``S_f`` per key; it stays as it is.

    Returns:
        A batch with ``max(S_f)`` bags of each key and without weights.
    """
    strides = features.stride_per_key()
    most = max(strides, default=0)
    lengths = features.lengths()
    padded = lengths.new_zeros(len(strides), most)
    for row, own in zip(padded, torch.split(lengths, strides), strict=True):
        row[: own.numel()] = own
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=padded.flatten(),
        stride=most,
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
    )
