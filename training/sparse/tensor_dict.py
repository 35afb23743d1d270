"""Batches that come as a ``tensordict.TensorDict`` of nested tensors, one per feature."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


def maybe_td_to_kjt(features: Any, keys: list[str] | None = None) -> Any:
    """A keyed jagged tensor of a ``TensorDict``; anything else is returned as it is.

    Args:
        features: a ``TensorDict`` whose entries are nested tensors (``torch.jagged``) of ``B`` rows of ids, or
            a `KeyedJaggedTensor`.
        keys: the entries to take, in order; None: all.

    Raises:
        KeyError: an entry is missing.
        ValueError: an entry is not a nested tensor of layout ``torch.jagged``.
    """
    # Who has a TensorDict has imported its library, which is not one of ours.
    library = sys.modules.get("tensordict")
    if library is None or not isinstance(features, library.TensorDict):
        return features
    names = list(features.keys()) if keys is None else keys
    ids: list[Tensor] = []
    lengths: list[Tensor] = []
    for name in names:
        entry = features[name]
        if not (isinstance(entry, Tensor) and entry.layout == torch.jagged):
            raise ValueError(
                f"feature {name!r} is a {type(entry).__name__}, which is not a nested tensor of layout "
                "torch.jagged; make it with torch.nested.nested_tensor(..., layout=torch.jagged)"
            )
        given = entry.lengths()  # type: ignore[attr-defined]
        if given is not None:
            raise ValueError(
                f"feature {name!r} has gaps between its rows; make its values contiguous"
            )
        ids.append(entry.values())
        lengths.append(entry.offsets().diff())  # type: ignore[attr-defined]
    return KeyedJaggedTensor(keys=names, values=torch.cat(ids), lengths=torch.cat(lengths))
