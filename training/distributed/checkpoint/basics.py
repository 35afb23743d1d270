"""What checkpoints and their callers share, apart so that naming it loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tessera.durable import PARTIAL_SUFFIX
from tessera.errors import UserError

if TYPE_CHECKING:
    import torch

_REPLACED_SUFFIX = f".old{PARTIAL_SUFFIX}"


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or trusted."""


class Room(Protocol):
    """Makes the empty tensors that a reader fills: in memory, or in something larger."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor of this shape and dtype."""

    def settle(self, tensor: torch.Tensor) -> None:
        """Some of ``tensor``, which `empty` made, has been filled and is not needed for now."""


def partial_path(folder: Path) -> Path:
    """Where ``folder`` is written before it has its name."""
    return folder.with_name(f".{folder.name}{PARTIAL_SUFFIX}")


def replaced_path(folder: Path) -> Path:
    """Where an older ``folder`` is for the moment in which a new one takes its name."""
    return folder.with_name(f".{folder.name}{_REPLACED_SUFFIX}")


def restore_replaced(parent: Path) -> None:
    """Give back their names to folders of a writer that was killed in that moment.

    Only one process may do so, and nobody may be writing.
    """
    for hidden in parent.glob(f".*{_REPLACED_SUFFIX}"):
        folder = parent / hidden.name[1 : -len(_REPLACED_SUFFIX)]
        if not folder.exists():
            hidden.rename(folder)
