"""The error of checkpoints, apart so that naming it loads nothing else."""

from __future__ import annotations

from tessera.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or trusted."""
