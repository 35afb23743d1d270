"""Converts what a checkpoint holds from one library's names and orders to the other's."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from torch import Tensor

from tessera.training.conversion.content import (
    Content,
    ConversionError,
    Line,
    State,
    parameter_of,
    shape_of,
)
from tessera.training.conversion.layers import Layers, layers_for_tessera, layers_for_torchrec
from tessera.training.conversion.states import states_for_tessera, states_for_torchrec

Library = Literal["tessera", "torchrec"]
_REORDERED = "columns in the order of the other library's pairs"


def converted(
    content: Content, to: Library, *, step: int | None = None, keep_columns: bool = False
) -> tuple[Content, list[Line]]:
    """A checkpoint of the other library for ``to``, and what became of each entry.

    Args:
        content: as the other library has it.
        to: whose names and orders the result has.
        step: finished steps, for tables whose optimizer counts them; to Tessera alone.
        keep_columns: whether no layer is taken for the one above a DLRM's pairs.

    Raises:
        ConversionError: an entry that cannot be converted; the text says what to do.
    """
    make = layers_for_tessera if to == "tessera" else layers_for_torchrec
    layers = make(content.model, keep_columns=keep_columns)
    _refuse_twice(layers.names.values())
    model: dict[str, Tensor] = {}
    lines: list[Line] = []
    for name, tensor in content.model.items():
        new = layers.names[name]
        model[new] = layers.value(name, tensor)
        change = _REORDERED if name in layers.columns else ""
        lines.append(Line(name=name, shape=shape_of(tensor), new_name=new, new_shape=shape_of(model[new]),
                          change=change))  # fmt: skip
    states: dict[str, dict[str, State]] = {}
    for parameter in content.states:
        if to == "tessera":
            found, origins = states_for_tessera(parameter, content, step)
        else:
            found, origins = states_for_torchrec(parameter, content)
        entry = parameter_of(parameter, content.model)
        new = parameter.removesuffix(entry) + layers.names[entry] if entry else parameter
        states[new] = {}
        for key, value in found.items():
            ordered = layers.value(entry, value) if isinstance(value, Tensor) else value
            states[new][key] = ordered
            lines.append(_line_of_state(parameter, origins.get(key), content, new, key, ordered,
                                        reordered=ordered is not value))  # fmt: skip
    left_out = list(content.left_out)
    if to == "torchrec":
        left_out += [
            f"step {int(value['step'])} of {name!r}: TorchRec keeps no count for tables; call "
            "set_optimizer_step of its fused optimizer where it has one"
            for name, value in content.states.items()
            if "momentum2" in value and "step" in value
        ]
    columns = _columns(content, states, layers) if to == "tessera" else {}
    result = dataclasses.replace(
        content, model=model, states=states, columns=columns, left_out=tuple(left_out)
    )
    return result, lines


def _line_of_state(  # noqa: PLR0917 - what a line says
    parameter: str,
    origin: str | None,
    content: Content,
    new: str,
    key: str,
    value: State,
    *,
    reordered: bool,
) -> Line:
    before = "--step" if origin is None else f"{parameter}: {origin}"
    shape = shape_of(value) if origin is None else shape_of(content.states[parameter][origin])
    return Line(
        name=before,
        shape=shape,
        new_name=f"{new}: {key}",
        new_shape=shape_of(value),
        change=_REORDERED if reordered else "",
    )


def _refuse_twice(names: Collection[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConversionError(
                f"two entries would become {name!r}; the checkpoint has names of both libraries: give "
                "--take with the part that is wanted"
            )
        seen.add(name)


def _columns(
    content: Content, states: dict[str, dict[str, State]], layers: Layers
) -> dict[str, list[int]]:
    """Where column blocks begin, by the name in the optimizer, of tables with a number for each of them."""
    found = {}
    for parameter in content.states:
        entry = parameter_of(parameter, content.model)
        if not entry:
            continue
        new = parameter.removesuffix(entry) + layers.names[entry]
        table = content.model[entry]
        blocks = [
            value.size(1)
            for value in states[new].values()
            if isinstance(value, Tensor) and value.dim() == 2 and value.shape != table.shape
        ]
        if blocks:
            width = table.size(1)
            equal = list(range(0, width + 1, width // blocks[0]))
            found[new] = content.columns.get(entry, equal)
    return found
