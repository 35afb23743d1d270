"""Shared by the tests of transforms."""

from tests.devices import device  # noqa: F401 (a fixture)
