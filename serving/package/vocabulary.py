"""The ids that a package's vocabularies hold, read from the buffers of its module.

`FORMAT.md`, "Vocabularies", says what these buffers are; a server counts by them how many ids of a
request no training row had.  Shapes: ``V`` vocabularies, ``U`` ids of all of them, ``N`` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.serving.package.schema import FeatureSpec

_PREFIX = "vocabulary_"
_NAMES = ("keys_U", "places_U", "seeds_V")
_FACTORS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


@dataclass(frozen=True)
class Vocabularies:
    """Sorted keys of all ids, the place of each id, and each vocabulary's seed.

    Attributes:
        keys: ``[U]`` int64, ascending: ``fmix64(id ^ seed)``.
        places: ``[U]`` int64: by key, the id's place among those of all vocabularies, one after
            the other; below 0: it is none.
        seeds: ``[V]`` int64.
    """

    keys: NDArray[np.int64]
    places: NDArray[np.int64]
    seeds: NDArray[np.int64]

    @classmethod
    def of(cls, module: torch.nn.Module) -> Vocabularies | None:
        """Read them from a module as it was loaded; None where it has none that can be read.

        The first count where it has several, as an ensemble has.
        """
        found: dict[str, NDArray[np.int64]] = {}
        for name, value in module.named_buffers():
            end = name.rpartition(_PREFIX)[2]
            if end in _NAMES and end not in found and name.endswith(_PREFIX + end):
                if value.dtype != torch.int64 or value.dim() != 1:
                    return None
                found[end] = value.cpu().numpy()
        if len(found) < len(_NAMES) or not len(found["keys_U"]):
            return None
        if len(found["keys_U"]) != len(found["places_U"]):
            return None
        return cls(*(found[name] for name in _NAMES))

    def ids(self, number: int, start: int, size: int) -> NDArray[np.int64]:
        """``[size]``: the ids of one vocabulary in the order of their rows, of which the first is row 1.

        Args:
            number: the vocabulary's.
            start: how many ids the vocabularies before it have.
            size: how many it has itself.
        """
        own = (self.places >= start) & (self.places < start + size)
        ids = np.empty(size, np.int64)
        ids[self.places[own] - start] = _inverse_fmix64(self.keys[own]) ^ self.seeds[number]
        return ids


class OutsideVocabulary:
    """Tells which ids of some features their vocabularies do not hold.

    Args:
        features: ``F`` features, some of them with a vocabulary.
        vocabularies: what `Vocabularies.of` found.
    """

    def __init__(self, features: Sequence[FeatureSpec], vocabularies: Vocabularies) -> None:
        self._vocabularies = vocabularies
        numbers = [feature.vocabulary for feature in features]
        sizes = np.zeros(len(vocabularies.seeds), np.int64)
        for feature in features:
            if feature.vocabulary is not None and feature.vocabulary < len(sizes):
                sizes[feature.vocabulary] = feature.rows - 1
        starts = np.cumsum(sizes) - sizes
        self.has_F = np.array([n is not None and n < len(sizes) for n in numbers], np.bool_)
        own = [
            n if has and n is not None else 0 for n, has in zip(numbers, self.has_F, strict=True)
        ]
        empty = not len(sizes)
        zeros = np.zeros(len(own), np.int64)
        self._seed_F = zeros if empty else vocabularies.seeds[own]
        self._start_F = zeros if empty else starts[own]
        self._size_F = zeros if empty else sizes[own]

    def __call__(self, ids: NDArray[Any], feature_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``[N]`` whether each id is of a feature with a vocabulary that does not hold it.

        Args:
            ids: ``[N]`` int32 or int64.
            feature_N: ``[N]`` each id's feature.
        """
        found = self._vocabularies
        keys = _fmix64(ids.astype(np.int64) ^ self._seed_F[feature_N])
        at = np.minimum(np.searchsorted(found.keys, keys), len(found.keys) - 1)
        place = found.places[at] - self._start_F[feature_N]
        known = (found.keys[at] == keys) & (place >= 0) & (place < self._size_F[feature_N])
        outside: NDArray[np.bool_] = self.has_F[feature_N] & ~known
        return outside


def _fmix64(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """MurmurHash3's 64-bit finaliser."""
    mixed = ids.view(np.uint64)
    for factor in _FACTORS:
        mixed = (mixed ^ (mixed >> _SHIFT)) * factor
    return (mixed ^ (mixed >> _SHIFT)).view(np.int64)


def _inverse_fmix64(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """What `_fmix64` makes these numbers of."""
    value = keys.view(np.uint64)
    for factor in reversed(_FACTORS):
        value = (value ^ (value >> _SHIFT)) * np.uint64(pow(int(factor), -1, 1 << 64))
    return (value ^ (value >> _SHIFT)).view(np.int64)
