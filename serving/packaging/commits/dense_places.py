"""Where in a version's records each number of a model's dense part lies, so that a commit need not trace the model again.

Passes lay weights out anew: transposed, in panels, padded, in another type.  What each of them does is not
repeated here, it is looked up: the model is packaged some times with weights that tell their own numbers, and each value of the
result then names the weight that it is.  Weight ``n`` is given one digit of ``n`` to the base 128 a time, as
``(1 + digit) / 1024``, which every float type that is packaged holds exactly.

What is found is compared with the real records before it is used.  Where a value is none of the weights (a product of two,
say) nothing is found, and every commit traces the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.errors import UserError

TRAINED = "arch."
"""What the names of trained tensors begin with; the rest of a model's state stays as it is."""

_BASE = 128
_UNIT = 1 / 1024

DenseRecords = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From a dense part, by the names in checkpoints, to the flat content of each record that it makes."""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """A record: its content with any weights, the places in it that hold weights, and which these are."""

    content: Tensor
    places: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class DensePlaces:
    """See the module.

    Attributes:
        names: of the trained tensors, in the order in which their numbers are counted.
        fixed: the rest of the dense part, which the records are made with, too.
        records: by name.
    """

    names: tuple[str, ...]
    fixed: Mapping[str, Tensor]
    records: Mapping[str, _Record]

    def filled(self, dense: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The records of a dense part; None if more of it has changed than what is trained."""
        rest = {name: value for name, value in dense.items() if name not in self.names}
        if rest.keys() != self.fixed.keys() or not all(
            torch.equal(value, self.fixed[name]) for name, value in rest.items()
        ):
            return None
        weights = _flat(dense, self.names)
        found = {}
        for name, record in self.records.items():
            content = record.content.clone()
            content[record.places] = weights[record.weights].to(content.dtype)
            found[name] = content
        return found


def find_places(
    records_of: DenseRecords, dense: Mapping[str, Tensor], real: Mapping[str, Tensor]
) -> DensePlaces | None:
    """Where the numbers of ``dense`` lie in ``real``, the records that ``records_of`` makes of it; None: not found."""
    names = tuple(
        name
        for name, value in dense.items()
        if name.startswith(TRAINED) and value.dtype == torch.float32 and value.numel()
    )
    total = sum(dense[name].numel() for name in names)
    number, power = torch.arange(total), 1
    fixed = {name: torch.ones(len(value), dtype=torch.bool) for name, value in real.items()}
    known = {name: torch.ones(len(value), dtype=torch.bool) for name, value in real.items()}
    weight = {name: torch.zeros(len(value), dtype=torch.int64) for name, value in real.items()}
    while power == 1 or power < total:
        values = (number // power % _BASE + 1).float() * _UNIT
        try:
            probe = records_of({**dense, **_unflattened(values, dense, names)})
        except (UserError, RuntimeError, ValueError):
            return None
        if {name: value.shape for name, value in probe.items()} != {
            name: value.shape for name, value in real.items()
        }:
            return None
        for name, value in probe.items():
            fixed[name] &= value == real[name]
            digit = value.double() / _UNIT - 1
            known[name] &= (digit == digit.round()) & (digit >= 0) & (digit < _BASE)
            weight[name] += digit.nan_to_num().clamp(0, _BASE - 1).long() * power
        power *= _BASE
    if not all(bool((known[n] & (weight[n] < total) | fixed[n]).all()) for n in real):
        return None
    records = {}
    for name, value in real.items():
        places = (~fixed[name]).nonzero().flatten()
        records[name] = _Record(content=value.clone(), places=places, weights=weight[name][places])
    found = DensePlaces(
        names=names,
        fixed={name: value.clone() for name, value in dense.items() if name not in names},
        records=records,
    )
    again = found.filled(dense)
    assert again is not None
    same = all(torch.equal(_bytes(again[name]), _bytes(value)) for name, value in real.items())
    return found if same else None


def _flat(dense: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.cat([torch.empty(0), *(dense[name].flatten() for name in names)])


def _unflattened(
    values: Tensor, like: Mapping[str, Tensor], names: tuple[str, ...]
) -> dict[str, Tensor]:
    parts = torch.split(values, [like[name].numel() for name in names])
    return {n: part.view(like[n].shape).clone() for n, part in zip(names, parts, strict=True)}


def _bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8)
