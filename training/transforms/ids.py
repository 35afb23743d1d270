"""Ids of a batch: the first of each bag, and several joined into one.

Shapes: ``B`` samples, ``F`` sparse features of a batch, ``K`` keys of ``P`` features at most, ``N`` ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.training.modules.hashing import fmix64
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class FirstIds(nn.Module):
    """Joins the first ids of several features' bags into one 64-bit key a sample.

    A key of one feature is ``fmix64`` of its id; each further feature's id is joined by
    ``key = fmix64(key ^ id)``.

    Args:
        features: by key, the places of its features among the batch's keys, at least one.
    """

    def __init__(self, features: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._count = len(features)
        self._most = max(len(places) for places in features)
        # The place of each key's p-th feature; the first one again where it has not so many.
        places = [
            [own[p] if p < len(own) else own[0] for own in features] for p in range(self._most)
        ]
        has = [[p < len(own) for own in features] for p in range(self._most)]
        self.places_PK: Tensor
        self.has_PK1: Tensor
        self.register_buffer("places_PK", torch.tensor(places), persistent=False)
        self.register_buffer("has_PK1", torch.tensor(has).unsqueeze(2), persistent=False)
        self._full = [all(row) for row in has]

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Keys ``[K, B]`` int64, and whether every bag of a key has an id, ``[K, B]``.

        Where one has none the key is of no use.
        """
        count = len(features.keys())
        B = features.stride()
        lengths_FB = features.lengths().view(count, B)
        firsts_FB = features.offsets()[:-1].view(count, B)
        # One id more, so that the place behind the last one can be read.
        zero = torch.zeros_like(self.places_PK[0, :1])
        ids = torch.cat([features.values().long(), zero])
        key_KB = fmix64(ids[firsts_FB.index_select(0, self.places_PK[0])])
        has_KB = lengths_FB.index_select(0, self.places_PK[0]) > 0
        for p in range(1, self._most):
            joined_KB = fmix64(key_KB ^ ids[firsts_FB.index_select(0, self.places_PK[p])])
            also_KB = lengths_FB.index_select(0, self.places_PK[p]) > 0
            # A place that stands in for a missing feature repeats the first one, which changes
            # nothing about who has ids.
            has_KB = has_KB & also_KB
            all_have = self._full[p]
            key_KB = joined_KB if all_have else torch.where(self.has_PK1[p], joined_KB, key_KB)
        return key_KB, has_KB


def seeds(count: int, attempt: int = 0) -> Tensor:
    """``[count]`` int64 numbers that tell the members of a joint table of keys apart."""
    return fmix64(torch.arange(1, count + 1) + attempt * count)
