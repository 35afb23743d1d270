"""The entries of a model's state dict that have another name or order in TorchRec, and no others.

* A cross network of low rank (`LowRankCrossNet`): ``X.W_kernels.I``, ``X.V_kernels.I`` and ``X.bias.I`` of
  TorchRec are ``X._w.I.weight``, ``X._v.I.weight`` and ``X._w.I.bias`` here.
* ``DLRM``: the pairs of F + 1 vectors come row by row from above the diagonal in TorchRec, (0, 1), (0, 2), ...,
  and from below it here, (1, 0), (2, 0), (2, 1), ....  The first layer that sees them, ``[out, D + P]`` with
  ``P = F (F + 1) / 2``, has its columns in that order behind the D of the dense vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tessera.training.conversion.content import ConversionError

_THEIRS = (
    (re.compile(r"(.*)\.W_kernels\.(\d+)"), r"\1._w.\2.weight"),
    (re.compile(r"(.*)\.V_kernels\.(\d+)"), r"\1._v.\2.weight"),
)
_OURS = (
    (re.compile(r"(.*)\._w\.(\d+)\.weight"), r"\1.W_kernels.\2"),
    (re.compile(r"(.*)\._v\.(\d+)\.weight"), r"\1.V_kernels.\2"),
)
_THEIR_BIAS = re.compile(r"(.*)\.bias\.(\d+)")
_OUR_BIAS = re.compile(r"(.*)\._w\.(\d+)\.bias")
_FIRST_LAYER = "over_arch.model.0._mlp.0._linear.weight"
_DENSE_LAYER = re.compile(r"dense_arch\.model\._mlp\.(\d+)\._linear\.weight")
_TABLE = re.compile(r"sparse_arch\.embedding_bag_collection\.embedding_bags\.[^.]+\.weight")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Says how the entries of one model are converted.

    Attributes:
        names: the new name of each entry.
        columns: of an entry whose columns have another order, the old place of each new column.
    """

    names: dict[str, str]
    columns: dict[str, Tensor] = field(default_factory=dict)

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """The entry ``name``, or a state of its shape, in the new order."""
        places = self.columns.get(name)
        if places is None or tensor.dim() != 2 or tensor.size(1) != places.numel():
            return tensor
        return tensor.index_select(1, places.to(tensor.device))


def layers_for_tessera(model: Mapping[str, Tensor], *, keep_columns: bool = False) -> Layers:
    """How TorchRec's entries become ours; ``keep_columns``: no layer is taken for a DLRM's.

    Raises:
        ConversionError: a layer above pairs has a width that no number of features gives.
    """
    low_rank = {_prefix(name, _THEIRS[0][0]) for name in model} - {""}
    names = {}
    for name in model:
        new = _renamed(name, _THEIRS)
        bias = _THEIR_BIAS.fullmatch(name)
        if bias and bias[1] in low_rank:
            new = f"{bias[1]}._w.{bias[2]}.bias"
        names[name] = new
    columns = {} if keep_columns else _columns(model, inverse=False)
    return Layers(names=names, columns=columns)


def layers_for_torchrec(model: Mapping[str, Tensor], *, keep_columns: bool = False) -> Layers:
    """How our entries become TorchRec's; see `layers_for_tessera`."""
    low_rank = {_prefix(name, _OURS[0][0]) for name in model} & {
        _prefix(name, _OURS[1][0]) for name in model
    }
    names = {}
    for name in model:
        new, bias = name, _OUR_BIAS.fullmatch(name)
        if bias and bias[1] in low_rank:
            new = f"{bias[1]}.bias.{bias[2]}"
        elif any(_prefix(name, pattern) in low_rank - {""} for pattern, _ in _OURS):
            new = _renamed(name, _OURS)
        names[name] = new
    columns = {} if keep_columns else _columns(model, inverse=True)
    return Layers(names=names, columns=columns)


def _prefix(name: str, pattern: re.Pattern[str]) -> str:
    found = pattern.fullmatch(name)
    return found[1] if found else ""


def _renamed(name: str, patterns: Collection[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in patterns:
        if pattern.fullmatch(name):
            return pattern.sub(new, name)
    return name


def pair_places(vectors: int) -> Tensor:
    """Where TorchRec has the pairs that we have, in our order; int64 ``[vectors (vectors - 1) / 2]``."""
    above = torch.triu_indices(vectors, vectors, offset=1)
    below = torch.tril_indices(vectors, vectors, offset=-1)
    place = torch.empty(vectors, vectors, dtype=torch.int64)
    place[above[0], above[1]] = torch.arange(above.size(1))
    return place[below[1], below[0]]


def _columns(model: Mapping[str, Tensor], *, inverse: bool) -> dict[str, Tensor]:
    """The old places of the columns above the pairs of every DLRM in ``model``."""
    found = {}
    for name, weight in model.items():
        prefix = name.removesuffix(_FIRST_LAYER)
        if prefix == name or not _is_dlrm(prefix, model):
            continue
        dense = _dense_width(prefix, model)
        pairs = pair_places(_vectors(name, tuple(weight.shape), dense))
        pairs = torch.argsort(pairs) if inverse else pairs
        found[name] = torch.cat([torch.arange(dense), dense + pairs])
    return found


def _is_dlrm(prefix: str, model: Mapping[str, Tensor]) -> bool:
    """Whether the entries below ``prefix`` are a DLRM's: tables, and an interaction without weights."""
    below = [name.removeprefix(prefix) for name in model if name.startswith(prefix)]
    return any(_TABLE.fullmatch(name) for name in below) and not any(
        name.startswith("inter_arch.") for name in below
    )


def _dense_width(prefix: str, model: Mapping[str, Tensor]) -> int:
    """The columns of the dense vector: the rows of the last layer below the interaction."""
    layers = {
        int(match[1]): weight.size(0)
        for name, weight in model.items()
        if name.startswith(prefix) and (match := _DENSE_LAYER.fullmatch(name.removeprefix(prefix)))
    }
    return layers[max(layers)] if layers else 0


def _vectors(name: str, shape: tuple[int, ...], dense: int) -> int:
    """How many vectors are multiplied with each other: F + 1 of a width ``D + F (F + 1) / 2``."""
    pairs = shape[1] - dense
    features = (math.isqrt(8 * pairs + 1) - 1) // 2 if pairs >= 0 else -1
    if features * (features + 1) // 2 != pairs or features < 0:
        raise ConversionError(
            f"{name!r} has shape {list(shape)}: {shape[1]} columns are not the {dense} of the dense vector"
            " and the pairs of any number of vectors, so the order of its columns is not known; if the"
            " model is not a DLRM, give --keep-columns"
        )
    return features + 1
