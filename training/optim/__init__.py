"""Optimizers that know parameters by name, and the ones that live inside a backward pass."""
