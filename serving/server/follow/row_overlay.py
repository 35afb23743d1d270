"""A commit's rows of tables, which passes read where they were staged until the tables have them.

Exchanging the rows of a commit takes milliseconds, and every pass would wait for it.  An overlay is shown in
microseconds, and the rows are written beside the passes (``kernels/csrc/row_overlay.h`` says how).
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch

from tessera.serving.commits.file import ReadCommit
from tessera.serving.package.commit import Patch
from tessera.serving.package.pace import Pace
from tessera.serving.server.follow.exchange import Exchange, patch_arguments


def rows_apart(read: ReadCommit) -> set[Patch]:
    """The patches of tables' rows that can be laid over them: those of records in which no two patches lie within each other.

    A staged row takes as much memory as a row of its table, gaps included, so rows with large gaps are left out.
    """
    by_record: dict[str, list[tuple[int, int, Patch]]] = defaultdict(list)
    for patch in read.commit.patches:
        last = read.last_row(patch)
        end = patch.offset + last * patch.stride + patch.width
        by_record[patch.record].append((patch.offset, end, patch))
    apart: set[Patch] = set()
    for patches in by_record.values():
        patches.sort(key=lambda one: one[:2])
        if all(before[1] <= after[0] for before, after in itertools.pairwise(patches)):
            apart.update(patch for *_, patch in patches)
    return {one for one in apart if one.table and one.rows and one.stride < 2 * one.width}


class RowOverlay:
    """Rows of a commit; to be made, kept and written by one thread.

    Args:
        exchanges: of rows of tables, none within another; afterwards their values are what undoes them.
        pace: that of the thread.

    Attributes:
        number: later overlays have higher ones.
    """

    def __init__(self, exchanges: Sequence[Exchange], pace: Pace) -> None:
        self.exchanges = exchanges
        self._share = pace.share
        self.number: int = torch.ops.tessera.overlay_make_aside(
            *patch_arguments(exchanges), self._share, pace.left_s
        )
        self.close = weakref.finalize(self, torch.ops.tessera.overlay_drop, self.number)
        """Let go of the rows; after `show`, once no pass runs that began before the end of `write`."""

    def show(self, *, beside: bool = False) -> None:
        """From now on passes read the new rows; while none runs.

        Args:
            beside: threads that look up to an older overlay do not read them, and their passes may run.
        """
        show = torch.ops.tessera.overlay_show_beside if beside else torch.ops.tessera.overlay_show
        show(self.number)

    @property
    def fits(self) -> bool:
        """Whether all lookups so far could read them; those that could not, beside others, have raised ``RuntimeError``."""
        return bool(torch.ops.tessera.overlay_fits(self.number))

    def take_back(self) -> None:
        """From now on they read what the tables had; while none runs."""
        torch.ops.tessera.overlay_take_back(self.number)

    def write(self, pause_s: float) -> None:
        """Bring the rows into their tables beside the passes, with pauses for so many seconds, if any; blocks."""
        torch.ops.tessera.overlay_write_aside(self.number, self._share, pause_s)
