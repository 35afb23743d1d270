"""The architectures of ranking models: each module here registers one.

A module that is put here is found by itself; docs/extending.md goes through an example.
"""
