"""The sparse types under the module path that TorchRec users import them from."""

from __future__ import annotations

from tessera.training.sparse import tree
from tessera.training.sparse.conversion import ComputeJTDictToKJT, ComputeKJTToJTDict
from tessera.training.sparse.equality import jt_is_equal, kjt_is_equal
from tessera.training.sparse.jagged import JaggedTensor
from tessera.training.sparse.keyed import KeyedTensor
from tessera.training.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "jt_is_equal",
    "kjt_is_equal",
]

tree.register()
