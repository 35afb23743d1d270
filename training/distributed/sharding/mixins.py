"""What a sharding says about its features, and a sharded module about its shardings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping


class FeatureShardingMixIn(ABC):
    """What a sharding says about its features."""

    @abstractmethod
    def feature_names(self) -> list[str]:
        """The features that it sends, in the order in which it sends them."""

    @abstractmethod
    def feature_names_per_rank(self) -> list[list[str]]:
        """The features that each rank receives."""

    def features_per_rank(self) -> list[int]:
        """How many features each rank receives."""
        return [len(names) for names in self.feature_names_per_rank()]


class ModuleShardingMixIn(ABC):
    """What a sharded module says about its shardings."""

    @property
    @abstractmethod
    def shardings(self) -> Mapping[str, FeatureShardingMixIn]:
        """The shardings by sharding type."""
