"""The code of docs/training.md runs, on ranks."""

import re
from pathlib import Path

from tests.training.ranks import run_on_ranks

DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def run(code):
    names = {}
    exec(compile(code, str(DOCS), "exec"), names)
    return float(names["loss"]), str(names["model"].plan)


def test_the_example_trains():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 1
    found = run_on_ranks(2, run, blocks[0])
    for loss, plan in found:
        assert loss >= 0
        assert "row_wise" in plan
        assert "column_wise" in plan
