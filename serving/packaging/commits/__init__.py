"""Commits made of trained models: where tables lie in a package, and what has changed."""
