"""``factory: pkg.module:function``: a module of the user's, trained as any other architecture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from tessera.errors import UserError
from tessera.training.models.config import ModelConfig, architecture
from tessera.training.models.inputs import ModelInputs


@architecture
@dataclass(frozen=True, kw_only=True)
class CustomConfig(ModelConfig):
    """A module that a function of the user's builds.

    Attributes:
        factory: ``pkg.module:function``, found as Python finds modules, the working directory
            included.  It is called with a `ModelInputs` and ``arguments``, and returns what
            `ModelConfig.build` returns.
        arguments: keyword arguments of the function.
        output_layers: dotted names, within the module, of the ``nn.Linear`` that make the logit;
            their biases begin at the log-odds of the labels.  Without them a logit begins where the
            module puts it.
    """

    arch: Literal["custom"] = "custom"
    factory: str
    arguments: dict[str, Any] = field(default_factory=dict)
    output_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        module, colon, function = self.factory.partition(":")
        if not (colon and module and function.isidentifier()):
            raise UserError(f"factory is {self.factory!r}; give pkg.module:function")

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`; what the function itself raises is not caught."""
        built = self._function()(inputs, **self.arguments)
        if not isinstance(built, nn.Module):
            raise UserError(
                f"factory {self.factory} returned a {type(built).__name__}; return a torch.nn.Module"
            )
        return built

    def _function(self) -> Callable[..., Any]:
        module_name, _, name = self.factory.partition(":")
        here = str(Path.cwd())
        if here not in sys.path:  # an installed command does not look there
            sys.path.append(here)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(
                f"factory is {self.factory!r}, but {error.name} cannot be imported; install it, or"
                " run in the folder that holds it"
            ) from error
        found = getattr(module, name, None)
        if not callable(found):
            raise UserError(
                f"factory is {self.factory!r}, but {module_name} has no function {name}; it has "
                + ", ".join(key for key in vars(module) if not key.startswith("_"))
            )
        return found  # type: ignore[no-any-return] # whatever it is, it can be called

    def logit_layers(self) -> tuple[str, ...]:
        """The names that the configuration gives as ``output_layers``."""
        return self.output_layers
