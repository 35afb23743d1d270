"""Quantized collections on the devices of one process."""
