"""Optimizer states under TorchRec's names and under ours.

A table that is updated in the backward pass has the states ``momentum1``, ``momentum2`` and ``step`` here.
TorchRec puts the table's name before them, calls the second one ``exp_avg_sq`` (``momentum2`` in older
releases) and keeps no count of steps.  One number per row and block of columns is ``[rows, k]`` here and
``[k * rows]`` there, block by block.  States of other parameters have the same names in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from tessera.training.conversion.content import Content, ConversionError, State, parameter_of

_TABLE = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")
_FROM_THEIRS = {"momentum1": "momentum1", "momentum2": "momentum2", "exp_avg_sq": "momentum2"}
_TO_THEIRS = {"momentum1": "momentum1", "momentum2": "exp_avg_sq"}
_STEP = "step"


def states_for_tessera(
    parameter: str, content: Content, step: int | None
) -> tuple[dict[str, State], dict[str, str]]:
    """One parameter's states under our names, and the old name of each that has one.

    Args:
        parameter: its name in ``content.states``.
        content: of a checkpoint of TorchRec's.
        step: finished steps, for optimizers that count them.

    Raises:
        ConversionError: a state that is not known, of a shape that does not fit, or a missing ``step``.
    """
    states = content.states[parameter]
    table = _table(parameter)
    fused = [key for key in states if table and key.startswith(f"{table}.")]
    if not fused:
        return dict(states), {key: key for key in states}
    found: dict[str, State] = {}
    origins: dict[str, str] = {}
    for key in fused:
        name = _FROM_THEIRS.get(key.removeprefix(f"{table}."))
        if name is None:
            raise ConversionError(
                f"state {key!r} of {parameter!r} belongs to an optimizer that is not here; known are "
                f"{', '.join(_FROM_THEIRS)}: give --only-model"
            )
        found[name] = _by_row(key, parameter, states[key], content)
        origins[name] = key
    if "momentum2" in found:
        if step is None:
            raise ConversionError(
                f"the optimizer of {parameter!r} counts steps, and TorchRec's checkpoints do not hold the"
                " count for tables; give --step with the number of finished steps"
            )
        found[_STEP] = torch.tensor(step, dtype=torch.int64)
    return found, origins


def states_for_torchrec(
    parameter: str, content: Content
) -> tuple[dict[str, State], dict[str, str]]:
    """One parameter's states under TorchRec's names, and the old name of each.

    Raises:
        ConversionError: a state of a shape that does not fit.
    """
    states = content.states[parameter]
    table = _table(parameter)
    if not table or not any(key in _TO_THEIRS for key in states):
        return dict(states), {key: key for key in states}
    found: dict[str, State] = {}
    origins: dict[str, str] = {}
    for key, value in states.items():
        if key in _TO_THEIRS:
            name = f"{table}.{_TO_THEIRS[key]}"
            found[name] = _by_block(key, parameter, value, content.model)
            origins[name] = key
    return found, origins


def _table(parameter: str) -> str:
    """The table that a parameter's name belongs to; empty: it is not a table."""
    found = _TABLE.fullmatch(parameter)
    return found[1] if found else ""


def _rows_and_columns(parameter: str, model: Mapping[str, Tensor]) -> tuple[int, int]:
    name = parameter_of(parameter, model)
    if not name or model[name].dim() != 2:
        raise ConversionError(
            f"the states of {parameter!r} belong to no table of the model; give --only-model, or the right "
            "--model-key"
        )
    rows, columns = model[name].shape
    return rows, columns


def _by_row(key: str, parameter: str, value: State, content: Content) -> State:
    """``[rows]`` as it is, ``[k * rows]`` as ``[rows, k]``."""
    if not isinstance(value, Tensor) or value.dim() != 1:
        return value
    rows, columns = _rows_and_columns(parameter, content.model)
    if parameter_of(parameter, content.model) in content.cut_both_ways:
        raise ConversionError(
            f"the table of {parameter!r} is cut into blocks of rows and columns, and the order of its state "
            f"{key!r} {list(value.shape)} depends on TorchRec's nodes; save it under another plan, or give "
            "--only-model"
        )
    blocks = value.numel() // rows if rows else 1
    bounds = content.columns.get(parameter_of(parameter, content.model))
    cut = (
        columns % blocks == 0 if bounds is None and blocks else blocks in {1, len(bounds or ()) - 1}
    )
    if blocks * rows != value.numel() or not cut:
        raise ConversionError(
            f"state {key!r} of {parameter!r} has shape {list(value.shape)}, and the table has shape "
            f"{[rows, columns]}: that is not one number for each row and block of columns; give --only-model"
        )
    return value if blocks == 1 else value.view(blocks, rows).t().contiguous()


def _by_block(key: str, parameter: str, value: State, model: Mapping[str, Tensor]) -> State:
    """``[rows, k]`` as ``[k * rows]``; numbers for each weight as they are."""
    if not isinstance(value, Tensor) or value.dim() != 2:
        return value
    rows, columns = _rows_and_columns(parameter, model)
    if tuple(value.shape) == (rows, columns):
        return value
    if value.size(0) != rows:
        raise ConversionError(
            f"state {key!r} of {parameter!r} has shape {list(value.shape)}, and the table has shape "
            f"{[rows, columns]}; give --only-model"
        )
    return value.t().contiguous().view(-1)
