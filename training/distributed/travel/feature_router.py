"""Which features of a batch each sharding of a collection gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.training.sparse.checks import check_id_dtype
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class FeatureRouter:
    """Cuts a batch into one tensor per sharding, each with its features in its order.

    Args:
        features_per_sharding: names; one may come more than once.
        is_weighted: whether the ids' weights go along.
    """

    def __init__(
        self, features_per_sharding: Sequence[Sequence[str]], *, is_weighted: bool
    ) -> None:
        self._names = [name for names in features_per_sharding for name in names]
        self._counts = [len(names) for names in features_per_sharding]
        self._is_weighted = is_weighted
        self._known_keys: list[str] | None = None
        self._order: list[int] | None = None
        self._order_tensor: torch.Tensor | None = None

    def _learn(self, features: KeyedJaggedTensor) -> None:
        keys = features.keys()
        places = {key: place for place, key in enumerate(keys)}
        missing = [name for name in self._names if name not in places]
        if missing:
            raise KeyError(f"feature {missing[0]!r} is missing; the input has {keys}")
        self._known_keys = list(keys)
        self._order = None if keys == self._names else [places[name] for name in self._names]
        if self._order is not None:
            self._order_tensor = torch.tensor(
                self._order, dtype=torch.int32, device=features.values().device
            )

    def route(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        """Return the features of each sharding.

        Args:
            features: at least the features of all shardings; others are ignored.

        Raises:
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, or weights are missing.
        """
        check_id_dtype(features.values())
        features.check_fields()
        if features.keys() != self._known_keys:
            self._learn(features)
        if self._is_weighted:
            features.weights()
        elif features.weights_or_none() is not None:
            features = features.with_fields(
                features.values(), None, features.lengths_or_none(), features.offsets_or_none()
            )
        if self._order is not None:
            features = features.permute(self._order, self._order_tensor)
        return [features] if len(self._counts) == 1 else features.split(self._counts)
