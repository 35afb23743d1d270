"""Quantized collections: tables of 1 to 4 bytes a number, or less, for inference."""

from tessera.training.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
