"""The tests, a package: their modules import one another as ``tests.folder.module``."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
"""The repository's root.  A child process that imports test modules has it in ``PYTHONPATH``."""
