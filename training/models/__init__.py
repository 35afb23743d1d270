"""Ranking models: DLRM, DLRM with a cross network, and the whole way from raw features."""

from tessera.training.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
