"""Building blocks of models: embedding collections, MLP, cross network, hashing."""

from tessera.training.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
