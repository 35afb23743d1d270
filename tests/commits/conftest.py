"""Packages in folders of versions, which tests copy or leave as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.package_factory import make_package


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """By what is special about them, packages that no test may write to."""
    kinds = {
        "cpu": {},
        "cuda": {"device": "cuda"},  # its rows of 8 bytes have their scales in the padding
        "apart": {"device": "cuda", "dim": 32},  # and of 32 bytes, scales of their own
        "blocks": {"dtype": "int8b", "dim": 16},
        "bf16": {"dense_dtype": "bf16"},
    }
    folder = tmp_path_factory.mktemp("packages")
    made: dict[str, Path] = {}

    def package(kind="cpu"):
        if kind not in made:
            made[kind], _ = make_package(folder, name=kind, **kinds[kind])
        return made[kind]

    return package


@pytest.fixture
def version(tmp_path, packages):
    """Makes the folder of version 1 of the model ``m`` in a repository."""

    def make(kind="cpu"):
        folder = tmp_path / "repository" / "m" / "1"
        folder.mkdir(parents=True)
        shutil.copy(packages(kind), folder / "model.pt")
        return folder

    return make
