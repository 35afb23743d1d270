"""Tracing of models whose inputs and outputs are sparse types."""

# isort: skip_file
# fmt: off
from typing import TYPE_CHECKING

from tessera.training.lazy_names import lazy_names

if TYPE_CHECKING:
    from tessera.training.fx.tracer import (
        Tracer as Tracer, is_fx_tracing as is_fx_tracing, symbolic_trace as symbolic_trace,
    )

__all__, __getattr__, __dir__ = lazy_names(__name__)
