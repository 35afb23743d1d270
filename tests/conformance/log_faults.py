"""What can be wrong with the commit that should come next, by the reason that servers give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tessera.serving.commits.file import read_commit, write_commit
from tessera.serving.package.golden import read_golden, write_golden
from tests.conformance.followed_logs import DRAFTS, History


@dataclass(frozen=True)
class Fault:
    """A fault: its name, the reason that servers give, and what makes the files by number, in front of ``number``."""

    name: str
    reason: str
    files: Callable[[int], dict[int, bytes]]


class Faults:
    """Faults of the log of ``history``, of which commits 2 to ``last`` may be spoilt.

    Args:
        folder: for drafts.
        history: of the commits that are right, signed with ``key``.
        key: that servers trust.
        other_key: that they do not.
        other_package: of another model.
        seed: of what is random.
    """

    def __init__(self, folder, history, *, key, other_key, other_package, seed=0):
        self._folder = folder
        self._history = history
        self._random = random.Random(seed)
        self._keys = key, other_key
        count = len(history.commits)
        # The first commits of these fit no other base; those of a branch follow other ones.
        self._other_base = History(folder / "base", other_package, count, key=key, whole=False)
        self._branch = History(
            folder / "branch", history.package, count, seed=9, key=key, whole=False
        )
        self.all = [
            Fault("missing", "gap", lambda n: {n + 1: self._right(n + 1)}),
            Fault("reordered", "gap", lambda n: {n: self._right(n + 1)}),
            Fault("repeated", "repeat", lambda n: {n: self._right(n - 1)}),
            Fault("wrong base", "base", lambda n: {n: self._other_base.commits[n]}),
            Fault("another chain", "chain", lambda n: {n: self._branch.commits[n]}),
            Fault("cut", "damaged", self._cut),
            Fault("empty", "damaged", lambda n: {n: b""}),
            Fault("flipped", "damaged", self._flipped),
            Fault("other key", "unsigned", lambda n: {n: self._rewritten(n, other=True)}),
            Fault("other answers", "golden", lambda n: {n: self._rewritten(n, golden=True)}),
            Fault("other record", "schema", lambda n: {n: self._rewritten(n, record="data/999")}),
        ]

    def _right(self, number):
        return self._history.commits[number]

    def _cut(self, number):
        content = self._right(number)
        return {number: content[: self._random.randrange(1, len(content))]}

    def _flipped(self, number):
        content = bytearray(self._right(number))
        # Not in the signature, which says something else then: below.
        content[self._random.randrange(len(content) // 2)] ^= 1 << self._random.randrange(8)
        return {number: bytes(content)}

    def _rewritten(self, number, *, other=False, golden=False, record=""):
        """Commit ``number`` with something else in it, whole and signed."""
        source = self._folder / f"{next(DRAFTS)}.source"
        source.write_bytes(self._right(number))
        read = read_commit(source)
        source.unlink()
        contents = dict(read.contents)
        commit = read.commit
        if golden:
            batch, outputs = read_golden(read.golden)
            changed = {name: 1 - output for name, output in outputs.items()}
            assert all(torch.any(changed[name] != outputs[name]) for name in outputs)
            contents["golden.bin"] = write_golden(batch, changed)
        if record:
            commit = replace(
                commit, patches=(*commit.patches[:-1], replace(commit.patches[-1], record=record))
            )
        path = self._folder / f"{next(DRAFTS)}.commit"
        write_commit(path, commit, contents, self._keys[other])
        written = path.read_bytes()
        path.unlink()
        return written
