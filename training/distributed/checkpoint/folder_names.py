"""Hidden names beside a checkpoint's folder while it is written; apart so that it loads nothing."""

from __future__ import annotations

from pathlib import Path

from tessera.training.durable import PARTIAL_SUFFIX

_REPLACED_SUFFIX = f".old{PARTIAL_SUFFIX}"


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
