"""What kind of batch a rank sends: the tensors it has and their dtypes, as one number.

A collective moves bytes.  Ranks whose batches differ in kind would take one another's ids for something else or
wait for ever, so each rank's kind travels before its batch, in the exchange of sizes, and each rank compares
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

_DTYPES = (
    *(torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.bool),
)
_FIELD = len(_DTYPES) + 1  # 0: the tensor is not there


def _code(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else _DTYPES.index(dtype) + 1


def batch_kind(features: KeyedJaggedTensor) -> int:
    """The kind of a batch: equal numbers mean equal dtypes of ids, lengths and weights, and equal tensors."""
    weights = features.weights_or_none()
    kind = 1 if features.variable_stride_per_key() else 0
    for dtype in (
        features.values().dtype,
        features.lengths().dtype,
        None if weights is None else weights.dtype,
    ):
        kind = kind * _FIELD + _code(dtype)
    return kind


def describe_kind(kind: int) -> str:
    """The words for a number of `batch_kind`."""
    names = []
    for _ in range(3):
        kind, code = divmod(kind, _FIELD)
        names.append("" if code == 0 else str(_DTYPES[code - 1]).removeprefix("torch."))
    weights, lengths, ids = names
    return (
        f"{ids} ids, {lengths} lengths, {f'{weights} weights' if weights else 'no weights'} and "
        f"{'a batch size for each feature' if kind else 'one batch size'}"
    )


def check_kinds(kinds: Sequence[int], rank: int) -> None:
    """Compare the kinds of all ranks' batches; every rank finds a difference at the same time.

    Args:
        kinds: ``[W]``, by rank.
        rank: the own one.

    Raises:
        ValueError: another rank's batch differs in kind from the own one.
    """
    for other, kind in enumerate(kinds):
        if kind != kinds[rank]:
            raise ValueError(
                f"the batches of the ranks differ in kind: rank {rank} has {describe_kind(kinds[rank])}, "
                f"rank {other} has {describe_kind(kind)}; give every rank's KeyedJaggedTensor the "
                "same tensors with the same dtypes"
            )
