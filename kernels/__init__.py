"""Lookup operators and the libraries that hold them."""
