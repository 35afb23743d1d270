"""Tracing of models whose inputs and outputs are sparse types."""

from tessera.training.fx.tracer import Tracer, is_fx_tracing, symbolic_trace

__all__ = ["Tracer", "is_fx_tracing", "symbolic_trace"]
