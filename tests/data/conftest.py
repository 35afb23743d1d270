from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real samples, which are not part of the repository."""
    named = os.environ.get("TESSERA_SHARED_DATA")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real samples here: set TESSERA_SHARED_DATA to the folder that has them")
    return folder
