"""What the lookup of one rank and the processing of its features promise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, unique
from typing import Generic, TypeVar

from torch import nn

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

F = TypeVar("F")


T = TypeVar("T")


@unique
class OptimType(Enum):
    """Names the optimizers as configs spell them."""

    SGD = "SGD"
    LARS_SGD = "LARS_SGD"
    LAMB = "LAMB"
    PARTIAL_ROWWISE_LAMB = "PARTIAL_ROWWISE_LAMB"
    ADAM = "ADAM"
    PARTIAL_ROWWISE_ADAM = "PARTIAL_ROWWISE_ADAM"
    ADAGRAD = "ADAGRAD"
    ROWWISE_ADAGRAD = "ROWWISE_ADAGRAD"
    SHAMPOO = "SHAMPOO"
    LION = "LION"


class BaseEmbeddingLookup(ABC, nn.Module, Generic[F, T]):
    """The tables of one rank and one sharding type: features to vectors."""

    @abstractmethod
    def forward(self, sparse_features: F) -> T:
        """Look up this rank's features (local row numbers)."""


class BaseGroupedFeatureProcessor(nn.Module, ABC):
    """Changes features on the rank that looks them up, before it does."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same bags with weights."""
