"""Quantized collections: tables of 1 to 4 bytes a number, or less, for inference."""
