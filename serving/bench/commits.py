"""Publish synthetic commits for any package of a repository: rows and dense weights that change at random.

    python -m tessera.serving.bench.commits DIR/MODEL/VERSION --rows 100000 --every-s 1 --count 600

They are valid in every respect, for every type of rows: a changed row gets the bytes of another row of its
table, and dense weights move by a thousandth; the golden answers are those of the patched package.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tessera.serving.commits.chain import LOG_FOLDER
from tessera.serving.commits.patching import strided
from tessera.serving.commits.state import VersionState
from tessera.serving.commits.writer import Change, Facts, publishing_lock, write_next
from tessera.serving.packaging.commits.places import TablePiece, table_pieces

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MOVE = 1e-3


class SyntheticPublisher:
    """Makes one commit after the other for a version that has none yet.

    Args:
        version_folder: ``DIR/MODEL/VERSION``, which holds ``model.pt``.
        seed: of what changes.
        key: to sign with; None: not signed.

    Attributes:
        state: the package with the commits so far.
    """

    def __init__(
        self, version_folder: Path, *, seed: int = 0, key: Ed25519PrivateKey | None = None
    ) -> None:
        version, model = int(version_folder.name), version_folder.parent.name
        self.state = VersionState(version_folder / "model.pt", model, version)
        self._folder = version_folder / LOG_FOLDER
        state = self.state
        self._pieces = table_pieces(state.manifest, state.tensor_records, state.sizes)
        self._random = np.random.default_rng(seed)
        self._key = key

    def publish(
        self,
        *,
        rows: int,
        dense: bool = True,
        newest_example_s: float | None = None,
        number: int | None = None,
    ) -> Path:
        """Write the next commit; returns its file.

        Args:
            rows: how many rows of all tables change, in proportion to their sizes, at least one of each.
            dense: whether the dense weights change, too.
            newest_example_s: seconds since 1970.
            number: the commit's; None: the one after the last.
        """
        total = sum(piece.piece.rows for piece in self._pieces)
        changes = [
            change
            for piece in self._pieces
            for change in self._rows(piece, max(1, rows * piece.piece.rows // total))
        ]
        if dense:
            changes += self._dense()
        facts = Facts(newest_example_s=newest_example_s)
        return write_next(self.state, self._folder, changes, facts, self._key, number=number)

    def _rows(self, piece: TablePiece, count: int) -> list[Change]:
        """``count`` rows of a piece with the bytes of others."""
        have = piece.piece.rows
        rows = np.unique(self._random.integers(0, have, min(count, have)))
        others = self._random.integers(0, have, len(rows))
        changes = []
        for span in piece.spans:
            stored = strided(
                self.state.tensors[span.record], span.offset, span.stride, span.width, have
            )
            changes.append(
                Change(
                    record=span.record,
                    table=span.table,
                    offset=span.offset,
                    stride=span.stride,
                    rows=rows,
                    new=stored[others],
                )
            )
        return changes

    def _dense(self) -> list[Change]:
        """Every tensor of floats but the tables, a little off."""
        tables = {piece.record for piece in self._pieces}
        changes = []
        for record, dtype in self.state.dtypes.items():
            if dtype not in {torch.float32, torch.bfloat16} or record in tables:
                continue
            old = torch.from_numpy(self.state.tensors[record].copy()).view(dtype)
            noise = torch.from_numpy(self._random.standard_normal(len(old), np.float32))
            new = (old.float() * (1 + _MOVE * noise)).to(dtype)
            changes.append(Change.whole(record, new.view(torch.uint8).numpy()))
        return changes


def main() -> None:
    """Publish until the count is reached, each commit at its time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("version_folder", type=Path, help="DIR/MODEL/VERSION, which has no log yet")
    parser.add_argument("--rows", type=int, default=1000, help="of a commit (default 1000)")
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds (default 1)")
    parser.add_argument("--count", type=int, default=10, help="commits (default 10)")
    parser.add_argument("--sign", type=Path, help="private key (default: not signed)")
    args = parser.parse_args()
    key = None
    if args.sign is not None:
        from tessera.serving.package.signing import read_private_key  # noqa: PLC0415 - slow to import

        key = read_private_key(args.sign)
    with publishing_lock(args.version_folder):
        publisher = SyntheticPublisher(args.version_folder, key=key)
        begin = time.monotonic()
        for number in range(args.count):
            time.sleep(max(0.0, begin + number * args.every_s - time.monotonic()))
            started = time.monotonic()
            path = publisher.publish(rows=args.rows, newest_example_s=time.time())
            print(
                f"{path.name} {path.stat().st_size} bytes in {time.monotonic() - started:.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
