"""What is packaged: a module, what its inputs are called, and a sample batch."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.packaging.inputs import ModelInputs
from tessera.serving.packaging.users_code import first_line, users_place
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

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
    path, colon, function = name.partition(":")
    if not colon or not path or not function:
        raise UserError(f"--factory {name!r} is not of the form pkg.module:function")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        factory = getattr(importlib.import_module(path), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--factory {name}: {error}; give pkg.module:function") from error
    except Exception as error:
        raise UserError(_failed(name, error)) from error
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UserError(f"--factory {name}: {error}; name a function without arguments") from error
    except ValueError:
        pass  # some functions written in C do not say what they take
    try:
        made = factory()
    except UserError:
        raise
    except Exception as error:
        raise UserError(_failed(name, error)) from error
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


def _failed(name: str, error: Exception) -> str:
    return f"--factory {name} fails{users_place(error)}: {first_line(error)}; correct it there"
