"""What is packaged: a module, what its inputs are called, and a sample batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.packaging.inputs import ModelInputs
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.users_code import call_named

SampleBatch = Sequence[Tensor | KeyedJaggedTensor]
"""A module's arguments for some samples; only their kinds, names and widths count."""

Source = tuple[nn.Module, ModelInputs | None, SampleBatch]
"""The module, what its inputs are called and how ids are treated (None: the defaults), and a sample
batch: what a ``--factory`` returns."""


def load_source(name: str) -> Source:
    """Call the factory ``package.module:function``, which the working directory is searched for first.

    Raises:
        UserError: there is no such function, or it returns something else.
    """
    made = call_named("--factory", name)
    if not (
        isinstance(made, tuple)
        and len(made) == 3
        and isinstance(made[0], nn.Module)
        and isinstance(made[1], ModelInputs | None)
    ):
        raise UserError(
            f"--factory {name} returned {type(made).__name__}; let it return the module, a "
            "ModelInputs (or None) and the sample batch"
        )
    return made
