"""Damaged packages, read by the programs themselves: the short form of ``tests.attack.packages``."""

from __future__ import annotations

import random
from pathlib import Path

from tests.attack.packages import attack, good_packages


def test_damaged_packages_are_refused_in_one_line_and_in_little_memory(tmp_path: Path) -> None:
    packages = good_packages(tmp_path)
    assert {"verify", "python"} <= packages[0].programs.keys()
    good = tmp_path / "good.pt"
    good.write_bytes(packages[0].content)
    assert packages[0].programs["verify"](good).status == 0
    assert list(attack(tmp_path, packages, 60, random.Random(0))) == []
