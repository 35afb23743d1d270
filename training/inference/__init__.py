"""From a trained model to one that answers: quantized, sharded, ready to be traced."""

from tessera.training.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
