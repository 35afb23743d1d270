"""Jagged (variable-length) features: JaggedTensor, KeyedJaggedTensor, KeyedTensor."""

from tessera.training.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
