"""From raw 64-bit ids to rows of a table, inside the model.

The rule of each feature is part of the model, so that training and every server give an id the
same row.  All arithmetic is on int64 tensors with wraparound, which eager mode, TorchScript and
LibTorch share; unsigned steps are spelt out, because torch has no unsigned shift or remainder
for them.  A batch that is trained on takes one operator of ours for all of it, where that was built
for its device: the arithmetic is some thirty kernels on a GPU, and a step waits for the CPU to launch them.

Source of the mixing function: MurmurHash3's 64-bit finaliser ``fmix64`` (Austin Appleby, public
domain).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from torch import Tensor, nn

from tessera.errors import refuse_unknown
from tessera.kernels import ops
from tessera.kernels.plan import ID_RULES, OUT_OF_RANGE
from tessera.training.modules.choices import Hashing, OutOfRange
from tessera.training.sparse.checks import check_id_dtype, is_traced, values_are_unknown
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

MAX_ROWS = 2**62  # twice a row must fit in int64 (see `unsigned_remainder`)


def fmix64(ids: Tensor) -> Tensor:
    """Mix the bits of int64 ``ids`` (any shape); one-to-one on 64-bit words."""
    # An arithmetic shift copies the sign; the mask makes it a logical one.  The multipliers are
    # 0xFF51AFD7ED558CCD and 0xC4CEB9FE1A85EC53, written as the int64 with the same bits.
    mixed = ids ^ ((ids >> 33) & 0x7FFFFFFF)
    mixed = mixed * -49064778989728563
    mixed = mixed ^ ((mixed >> 33) & 0x7FFFFFFF)
    mixed = mixed * -4265267296055464877
    return mixed ^ ((mixed >> 33) & 0x7FFFFFFF)


def murmur3_rows(ids: Tensor, rows: Tensor) -> Tensor:
    """``fmix64(ids)`` read as uint64, modulo ``rows``.

    Args:
        ids: int64, any shape.
        rows: int64, broadcastable to ``ids``, in ``[1, 2**62]``.
    """
    return unsigned_remainder(fmix64(ids), rows)


def unsigned_remainder(words: Tensor, rows: Tensor) -> Tensor:
    """``words`` (int64) read as uint64, modulo ``rows`` (int64, broadcastable, in ``[1, 2**62]``)."""
    # u = 2 * half + bit with half >= 0, so u mod r = (2 * (half mod r) + bit) mod r.
    half = (words >> 1) & 0x7FFFFFFFFFFFFFFF
    return torch.remainder(torch.remainder(half, rows) * 2 + (words & 1), rows)


def hash_ids(ids: Tensor, rule: str, rows: int) -> Tensor:
    """The row of each id under one rule.

    Args:
        ids: int64, any shape.
        rule: ``none`` gives the id itself, ``modulo`` the non-negative remainder of the signed
            id, ``murmur3`` the mixed id read as an unsigned number, modulo ``rows``.
        rows: rows of the table.

    Returns:
        int64, shape of ``ids``; in ``[0, rows)`` except under ``none``.

    Raises:
        ValueError: an unknown rule.
    """
    if rule == "none":
        return ids
    if rule == "modulo":
        return torch.remainder(ids, rows)
    if rule == "murmur3":
        return murmur3_rows(ids, torch.full([], rows, dtype=torch.int64, device=ids.device))
    raise ValueError("the hashing rule is none of none, modulo, murmur3")


@dataclass(frozen=True, kw_only=True)
class HashSpec:
    """How the ids of one feature become rows.

    Attributes:
        name: the feature.
        rows: rows of its table.
        hashing: the rule, see `hash_ids`.
        out_of_range: under ``none``, what becomes of an id outside ``[0, rows)``: ``hash`` gives
            it the row of ``murmur3``, ``clamp`` the nearest row; ``reject`` is the server's word
            (it refuses the request), here it acts like ``clamp`` so that no id ever leaves the
            table.

    Raises:
        ValueError: an unknown rule or rows outside ``[1, 2**62]``.
    """

    name: str
    rows: int
    hashing: Hashing
    out_of_range: OutOfRange = "clamp"

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"feature {self.name!r}: rows is {self.rows}; give 1 to 2**62")
        for field, choices in (("hashing", Hashing), ("out_of_range", OutOfRange)):
            rule = getattr(self, field)
            refuse_unknown(f"feature {self.name!r}: {field}", rule, get_args(choices))

    @classmethod
    def of(cls, feature: Any) -> HashSpec:
        """That of a `SparseFeature`, or of a package's description of one."""
        return cls(**{field.name: getattr(feature, field.name) for field in fields(cls)})


def _clamped(ids: Tensor, rows: Tensor) -> Tensor:
    return torch.minimum(ids.clamp(min=0), rows - 1)


def _hashed_outside(ids: Tensor, rows: Tensor) -> Tensor:
    outside = (ids < 0) | (ids >= rows)
    return torch.where(outside, murmur3_rows(ids, rows), ids)


_ACTIONS = (murmur3_rows, torch.remainder, _clamped, _hashed_outside)


def _action(spec: HashSpec) -> int:
    """The place of what becomes of a feature's ids in `_ACTIONS`."""
    of_none = _hashed_outside if spec.out_of_range == "hash" else _clamped
    rules = {"murmur3": murmur3_rows, "modulo": torch.remainder, "none": of_none}
    return _ACTIONS.index(rules[spec.hashing])


def _of_each_id(values_F: Tensor, counts_F: Tensor, ids: Tensor) -> Tensor:
    """The value of each id's feature."""
    if is_traced(ids):
        return torch.repeat_interleave(values_F, counts_F)
    # Not told how many there are, torch would wait for the GPU to count them.
    return torch.repeat_interleave(values_F, counts_F, output_size=ids.numel())


class FeatureHasher(nn.Module):
    """Turns the raw ids of all features into rows in one pass over the ids.

    One operator where it was built for the device of the ids.  Otherwise, and where a graph is made,
    a constant number of tensor operations whatever the number of features; where all features
    have the same table size or the same rule, the operations that tell them apart are left out.

    Args:
        specs: one per feature, in the order of the keys that `forward` gives back.

    Raises:
        ValueError: no feature, or one twice.
    """

    def __init__(self, specs: Sequence[HashSpec]) -> None:
        super().__init__()
        names = [spec.name for spec in specs]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"features {names}: give at least one, and each once")
        self.specs = tuple(specs)
        self._names = names
        actions = [_action(spec) for spec in specs]
        self._actions = frozenset(actions)
        self._one_size = len({spec.rows for spec in specs}) == 1
        # The buffers are worked out from the specs, so checkpoints need not hold them.
        rows = [spec.rows for spec in specs]
        self.rows_F: Tensor
        self.actions_F: Tensor
        self.bounds_F1: Tensor
        self._constant("rows_F", rows[:1] if self._one_size else rows)
        self._constant("actions_F", actions)
        self._constant("bounds_F1", list(range(len(names) + 1)))
        # What the operator is given.
        self.table_rows_F: Tensor
        self.rules_F: Tensor
        self.outside_F: Tensor
        self._constant("table_rows_F", rows)
        self._constant("rules_F", [ID_RULES[spec.hashing] for spec in specs])
        self._constant("outside_F", [OUT_OF_RANGE[spec.out_of_range] for spec in specs])

    def _constant(self, name: str, values: list[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Hash int32 or int64 raw ids of at least the features of ``specs``.

        The result has these features in their order, with int64 ids in ``[0, rows)`` of their table.

        Raises:
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64.
        """
        check_id_dtype(features.values())
        if features.keys() != self._names:
            places = features.index_per_key()
            if missing := [name for name in self._names if name not in places]:
                raise KeyError(
                    f"feature {missing[0]!r} is missing; the input has {features.keys()}"
                )
            features = features.permute([places[name] for name in self._names])
        ids = features.values()
        takes_operator = (
            not values_are_unknown(ids)
            and not features.variable_stride_per_key()
            and ops.is_built_for("rows_of_ids", ids.device.type)
        )
        rows = self._by_operator(ids, features) if takes_operator else self._rows_of(ids, features)
        return features.with_values(rows)

    def _by_operator(self, ids: Tensor, features: KeyedJaggedTensor) -> Tensor:
        rows: Tensor = torch.ops.tessera.rows_of_ids(
            ids.contiguous(), features.offsets(), self.table_rows_F, self.rules_F, self.outside_F
        )
        return rows

    def _rows_of(self, ids: Tensor, features: KeyedJaggedTensor) -> Tensor:
        ids = ids.long()
        one_action = len(self._actions) == 1
        counts = None
        if not (self._one_size and one_action):
            # Ids per feature without looking at the batch size: works at B = 0 and while traced.
            bounds = features.offsets().index_select(0, self.bounds_F1 * features.stride())
            counts = bounds[1:] - bounds[:-1]
        rows = self.rows_F
        if not self._one_size:
            assert counts is not None
            rows = _of_each_id(self.rows_F, counts, ids)
        if one_action:
            return _ACTIONS[next(iter(self._actions))](ids, rows)
        assert counts is not None
        action_N = _of_each_id(self.actions_F, counts, ids)
        order = sorted(self._actions)
        result = _ACTIONS[order[0]](ids, rows)
        for action in order[1:]:
            result = torch.where(action_N == action, _ACTIONS[action](ids, rows), result)
        return result
