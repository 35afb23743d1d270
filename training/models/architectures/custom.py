"""``factory: pkg.module:function``: a module of the user's, trained as any other architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from tessera.errors import UserError
from tessera.training.models.config import ModelConfig, architecture
from tessera.training.models.inputs import ModelInputs
from tessera.users_code import call_named, check_named


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
        check_named("factory", self.factory)

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`; a `UserError` says in which line the function fails."""
        built = call_named("factory", self.factory, inputs, **self.arguments)
        if not isinstance(built, nn.Module):
            raise UserError(
                f"factory {self.factory} returned a {type(built).__name__}; return a torch.nn.Module"
            )
        return built

    def logit_layers(self) -> tuple[str, ...]:
        """The names that the configuration gives as ``output_layers``."""
        return self.output_layers
