"""The Python in docs/optimizers.md and docs/checkpoints.md runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.mark.parametrize("name", ["optimizers.md", "checkpoints.md"])
def test_the_examples_run(name):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {})
