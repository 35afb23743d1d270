"""Telling parameters that the backward pass updates from those that an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# The mark on a parameter that is updated in the backward pass: a list of its optimizers.
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"


def in_backward_optimizer_filter(
    named_parameters: Iterator[tuple[str, nn.Parameter]],
    include: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are left for an optimizer of the user's.

    Args:
        named_parameters: of a model.
        include: True gives the other ones, which the backward pass updates.
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, IN_BACKWARD_OPTIMIZERS) == include:
            yield name, parameter
