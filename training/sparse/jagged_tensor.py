"""The three sparse types under the module path that TorchRec users import them from."""

from tessera.training.sparse.jagged import JaggedTensor
from tessera.training.sparse.keyed import KeyedTensor
from tessera.training.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
